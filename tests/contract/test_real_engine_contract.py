"""The engine contract on the real SGLang with the real LMCache daemon, in a worker behind the channel."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.register_assert_rewrite("tests.support.engine_contract")

from tests.support.engine_contract import EngineContract, Rig
from tests.support.real_stack import Stack, real_stack

DICE = random.Random(11)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Stack]:
    async with real_stack(tmp_path_factory.mktemp("real"), tiny_model) as running:
        yield running


class TestRealSGLang(EngineContract):
    @pytest_asyncio.fixture(loop_scope="module")
    async def rig(self, stack: Stack) -> Rig:
        # One engine for all tests, so each takes tokens that no other has seen.
        return Rig(stack.engine, stack.ready, stack.heard, unit_tokens=16, vocabulary=range(1000, 9000), dice=DICE)
