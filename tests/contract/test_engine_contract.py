"""The engine contract on the scripted engine, in this process and in a worker behind the channel."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

pytest.register_assert_rewrite("tests.support.engine_contract")

from server.engines.remote import Timeouts
from server.engines.scripted import ScriptedConfig, ScriptedEngine
from server.processes import LogFile
from server.supervisor import worker_engine
from tests.support.engine_contract import EngineContract, Rig

CONFIG = ScriptedConfig(page_tokens=8, device_tokens=8 * 400, token_delay_s=0.001)


class TestScriptedInProcess(EngineContract):
    @pytest.fixture
    async def rig(self) -> AsyncIterator[Rig]:
        heard: list = []
        engine = ScriptedEngine(CONFIG)
        ready = await engine.start(heard.append)
        yield Rig(engine, ready, heard, unit_tokens=16, vocabulary=range(1000))
        await engine.close()


class TestScriptedInWorker(EngineContract):
    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[Rig]:
        heard: list = []
        engine = worker_engine("scripted", msgspec.json.encode(CONFIG), run_folder=tmp_path / "run",
                               log_file=LogFile(tmp_path / "engine.log"), timeouts=Timeouts(start_s=30))
        ready = await engine.start(heard.append)
        yield Rig(engine, ready, heard, unit_tokens=16, vocabulary=range(1000))
        await engine.close()
