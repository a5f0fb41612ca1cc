"""More running turns than the device pool holds: SGLang takes some of them back, and nobody is left waiting."""

import asyncio
from pathlib import Path

import pytest

from server.engines.channel import Content, Finished, Generate, Sampling
from tests.support.real_stack import Stack, real_stack

pytestmark = pytest.mark.timeout(600)
OUTPUT, POOL = 150, 512


async def turn(stack: Stack, n: int) -> int:
    """Tokens of its answer."""
    request = Generate(turn_id=f"r_{n}", session_id=f"s_{n}", generation=1, branch_id="root",
                       content=Content(token_ids=[1000 + n, *range(100, 130)], salt="t"),
                       sampling=Sampling(max_new_tokens=OUTPUT, ignore_eos=True))
    async for event in stack.engine.generate(request):
        if isinstance(event, Finished):
            return event.usage.completion_tokens
    return -1


async def test_after_a_full_pool_everybody_is_answered(tmp_path: Path, tiny_model: Path) -> None:
    """Eight turns, four at a time, in a pool for less than three: all get their whole answer, and so does the next."""
    async with real_stack(tmp_path / "data", tiny_model, device_tokens=POOL) as stack, asyncio.timeout(240):
        assert await asyncio.gather(*(turn(stack, n) for n in range(8))) == [OUTPUT] * 8
        assert await turn(stack, 99) == OUTPUT
        pressure = (await stack.engine.health()).pressure
        assert pressure.free_pages + pressure.used_pages + pressure.in_flight_pages == pressure.total_pages == POOL // 16
