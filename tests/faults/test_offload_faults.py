"""The real engine while the real LMCache daemon is stopped, killed or has lost files: turns go on, nothing is freed that was
not stored, and what cannot come back is computed again."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

pytest.register_assert_rewrite("tests.support.engine_contract")


from kvstore.receipt import Outcome
from server.engines import channel
from tests.support.engine_contract import Rig, Told
from tests.support.real_stack import Stack, real_stack

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
DICE = random.Random(12)
UNIT = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Stack]:
    async with real_stack(tmp_path_factory.mktemp("offload"), tiny_model) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def rig(stack: Stack) -> AsyncIterator[Rig]:
    await stack.until_daemon()
    yield Rig(stack.engine, stack.ready, stack.heard, unit_tokens=UNIT, vocabulary=range(1000, 9000), dice=DICE)


def daemon_process(stack: Stack) -> psutil.Process:
    record = stack.settings.data / "run" / "daemon.pid"
    return psutil.Process(json.loads(record.read_text())["pid"])


async def spoken(rig: Rig, prompt: list[int]) -> Told:
    """A turn, without waiting for the pool to settle: pages may be held back for as long as the daemon is silent."""
    request = rig.request(rig.session(), prompt)
    told = Told(request.session_id, prompt, "")
    async for event in rig.engine.generate(request):
        if isinstance(event, channel.Delta):
            told.output += event.token_ids
        else:
            told.ends.append(event)
    return told


async def test_a_daemon_that_stops_answering(stack: Stack, rig: Rig) -> None:
    """Turns go on without it, a spill frees nothing and says why, the books balance; when it answers again all works."""
    told = await rig.kept_turn(4)
    daemon = daemon_process(stack)
    daemon.send_signal(signal.SIGSTOP)
    try:
        receipt = await rig.do(channel.Spill, told, to="host")
        assert (receipt.outcome, receipt.tokens) == (Outcome.FAILED, 0) and receipt.reason
        following = await rig.turn(told.session_id, told.prompt + told.output + rig.tokens(5))
        assert following.finished.usage.cached == channel.Cached(device=4 * UNIT)
        other = await rig.turn(rig.session(), rig.tokens(40))
        assert len(other.output) == 4
        pressure = await rig.pressure()
        assert pressure.free_pages + pressure.used_pages + pressure.in_flight_pages == pressure.total_pages
        assert not pressure.daemon_healthy
    finally:
        daemon.send_signal(signal.SIGCONT)
    await stack.until_daemon()
    await rig.idle()
    assert (await rig.do(channel.Spill, told, to="host")).outcome is Outcome.DONE
    assert dict((await rig.do(channel.Restore, told)).source) == {"host": 4 * UNIT}


async def test_pages_of_an_unanswered_restore_are_kept_apart(stack: Stack, rig: Rig) -> None:
    """A daemon stopped while a restore is under way never leads to a wrong answer or a lost page."""
    told = await rig.kept_turn(6)
    prompt = told.prompt + told.output + rig.tokens(5)
    other = await rig.turn(rig.session(), prompt)
    expected, daemon = other.output, daemon_process(stack)
    for wait_s in (0.0, 0.002, 0.01, 0.03):
        await stack.until_daemon()
        for one in (told, other):
            await rig.do(channel.Spill, one, to="storage")
        restoring = asyncio.create_task(rig.do(channel.Restore, told))
        await asyncio.sleep(wait_s)
        daemon.send_signal(signal.SIGSTOP)
        try:
            receipt = await restoring
            assert receipt.outcome in (Outcome.DONE, Outcome.PARTIAL, Outcome.FAILED)
            other = await spoken(rig, prompt)
            assert other.output == expected
        finally:
            daemon.send_signal(signal.SIGCONT)
    await stack.until_daemon()
    pressure = await rig.idle()
    assert pressure.free_pages + pressure.used_pages == pressure.total_pages


async def test_a_daemon_that_dies(stack: Stack, rig: Rig) -> None:
    """After kill -9 and restart of the daemon the engine registers again by itself, and what is on disk comes back."""
    told = await rig.kept_turn(4)
    await rig.do(channel.Spill, told, to="storage")
    daemon_process(stack).kill()
    await stack.until_daemon(healthy=False)
    missed = await rig.turn(told.session_id, told.prompt + told.output + rig.tokens(3))
    assert missed.finished.usage.cached == channel.Cached()
    await stack.until_daemon()
    await rig.do(channel.Spill, missed, to="storage")
    back = await rig.do(channel.Restore, told)
    assert back.outcome is Outcome.DONE and dict(back.source) == {"storage": 4 * UNIT}


@pytest.mark.parametrize("damage", ["gone", "cut short"])
async def test_a_chunk_that_is_lost(stack: Stack, rig: Rig, damage: str) -> None:
    """The prefix before a lost chunk is used, the rest is computed again, and the answer is the same."""
    told = await rig.kept_turn(4)
    prompt = told.prompt + told.output + rig.tokens(5)
    expected = (await rig.turn(rig.session(), prompt)).output
    before = set((stack.settings.data / "kv").glob("*.data"))
    fresh = await rig.kept_turn(4)
    await rig.do(channel.Spill, fresh, to="storage")
    chunks = sorted(set((stack.settings.data / "kv").glob("*.data")) - before, key=lambda path: path.stat().st_mtime_ns)
    victim = chunks[2]
    victim.unlink() if damage == "gone" else victim.write_bytes(victim.read_bytes()[:100])
    receipt = await rig.do(channel.Restore, fresh)
    assert receipt.tokens < 4 * UNIT and set(receipt.source) <= {"storage"}
    assert (await rig.turn(told.session_id, prompt)).output == expected
    again = await rig.turn(fresh.session_id, fresh.prompt + fresh.output + rig.tokens(5))
    assert again.finished.usage.cached.device >= receipt.tokens
