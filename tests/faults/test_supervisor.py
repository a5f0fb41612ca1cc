"""The supervisor with real processes: a scripted engine's worker and a stand-in for the LMCache daemon, killed in turn."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from server.components import Backoff
from server.engines.base import EngineStartError, EngineUnavailable
from server.engines.channel import Content, Failed, Finished, Generate, Ready, Sampling
from server.engines.config import EngineConfig
from server.engines.remote import RemoteEngine, Timeouts
from server.engines.scripted import ScriptedConfig, ScriptedEngine
from server.processes import FolderTaken, LogFile, command_line
from server.settings import Settings
from server.supervisor import DaemonChecks, Supervisor, worker_engine

FAKE_DAEMON = Path(__file__).parents[1] / "support" / "fake_daemon.py"
QUICK = Backoff(first_s=0.01, cap_s=0.05, stable_s=60, crash_deaths=5, crash_within_s=60, retry_s=0.2)
CONFIG = EngineConfig(model_path="scripted", fingerprint="f", image_folder="", vision_folder="", kind="scripted", page_tokens=8)


@dataclass
class Scene:
    supervisor: Supervisor
    folder: Path
    scripted: ScriptedConfig
    states: list[dict[str, str]] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    down: list[str] = field(default_factory=list)
    urls: list[str | None] = field(default_factory=list)

    @property
    def engine(self) -> RemoteEngine:
        engine = self.supervisor.engine
        assert isinstance(engine, RemoteEngine)
        return engine

    def daemon_pid(self) -> int:
        return json.loads((self.folder / "run" / "daemon.pid").read_text())["pid"]

    async def turn(self, most: int = 4) -> list:
        request = Generate(turn_id="t", session_id="s", generation=1, branch_id="b", content=Content(token_ids=list(range(30))),
                           sampling=Sampling(max_new_tokens=most, ignore_eos=True))
        return [event async for event in self.engine.generate(request)]

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(40):
            while not true():
                await asyncio.sleep(0.02)


def staged(folder: Path, **scripted) -> Scene:
    def make_engine(config, on_exit):
        scene.urls.append(config.offload_url)
        return worker_engine("scripted", msgspec.json.encode(scene.scripted), run_folder=folder / "run",
                             log_file=LogFile(folder / "logs" / "engine.log"), timeouts=Timeouts(start_s=60), on_exit=on_exit)

    scene = Scene(None, folder, ScriptedConfig(page_tokens=8, **scripted))
    scene.supervisor = Supervisor(
        Settings(data=folder), CONFIG, listen=scene.states.append, ready=scene.ready.append, down=scene.down.append, backoff=QUICK,
        checks=DaemonChecks(start_s=30, check_s=0.1, failures=3, stop_s=1), make_engine=make_engine,
        daemon_command=lambda port, http_port: [sys.executable, str(FAKE_DAEMON), str(http_port), str(folder)])
    return scene


@asynccontextmanager
async def running(folder: Path, **scripted) -> AsyncIterator[Scene]:
    scene = staged(folder, **scripted)
    await scene.supervisor.start()
    try:
        await scene.supervisor.wait_ready(60)
        yield scene
    finally:
        await scene.supervisor.close()
        assert not list((folder / "run").glob("*.pid"))


async def test_it_starts_both_and_stops_both(tmp_path: Path):
    """Both parts become ready, the engine knows the daemon's address, and the close leaves no process."""
    async with running(tmp_path) as scene:
        assert scene.supervisor.state() == {"engine": "ready", "daemon": "ready", "detail": ""}
        assert scene.supervisor.geometry.page_tokens == 8
        assert scene.urls[0].startswith("tcp://127.0.0.1:")
        assert isinstance((await scene.turn())[-1], Finished)
        pids = [scene.engine.pid, scene.daemon_pid()]
    assert [command_line(pid) for pid in pids] == [[], []]
    with pytest.raises(EngineUnavailable):
        scene.supervisor.engine  # noqa: B018
    assert scene.down == []


async def test_a_killed_engine_comes_back(tmp_path: Path):
    """kill -9 of the worker mid-turn: the turn fails as retryable, the books' owner is told, another one serves, the daemon stays."""
    async with running(tmp_path, token_delay_s=0.01) as scene:
        daemon, worker = scene.daemon_pid(), scene.engine.pid
        turn = asyncio.create_task(scene.turn(most=5000))
        await asyncio.sleep(0.3)
        os.kill(worker, signal.SIGKILL)
        last = (await turn)[-1]
        assert isinstance(last, Failed) and last.retryable
        await scene.until(lambda: len(scene.ready) == 2)
        assert isinstance((await scene.turn())[-1], Finished)
        assert scene.engine.pid != worker and scene.daemon_pid() == daemon
        assert len(scene.down) == 1 and "-9" in scene.down[0]
        assert scene.urls[0] == scene.urls[1]
        assert next(s["engine"] for s in scene.states if "exited with -9" in s["detail"]) == "restarting"
        assert scene.supervisor.restarts == {"engine": 1, "daemon": 0}


async def test_a_killed_daemon_comes_back(tmp_path: Path):
    """kill -9 of the daemon: another one serves on the same port, and the engine runs on."""
    async with running(tmp_path) as scene:
        daemon, worker = scene.daemon_pid(), scene.engine.pid
        os.kill(daemon, signal.SIGKILL)
        await scene.until(lambda: scene.supervisor.restarts["daemon"] == 1)
        await scene.supervisor.wait_ready(60)
        assert scene.daemon_pid() != daemon and scene.engine.pid == worker
        assert isinstance((await scene.turn())[-1], Finished)
        assert scene.down == []


async def test_a_daemon_that_does_not_answer_is_replaced(tmp_path: Path):
    """A daemon that leaves its health checks unanswered is killed and started again."""
    async with running(tmp_path) as scene:
        daemon = scene.daemon_pid()
        (tmp_path / "sick").touch()
        await scene.until(lambda: scene.supervisor.restarts["daemon"] == 1)
        (tmp_path / "sick").unlink()
        await scene.supervisor.wait_ready(60)
        assert command_line(daemon) == []
        assert any("3 health checks unanswered" in s["detail"] for s in scene.states)


async def test_an_engine_that_cannot_start_fails_and_is_tried_again(tmp_path: Path):
    """An engine's refusal makes it failed, with its reason; when the cause is gone, the next try serves."""
    scene = staged(tmp_path, start_error="the hooks did not apply")
    await scene.supervisor.start()
    try:
        with pytest.raises(EngineStartError, match="the hooks did not apply"):
            await scene.supervisor.wait_ready(60)
        with pytest.raises(EngineUnavailable):
            scene.supervisor.engine  # noqa: B018
        scene.scripted.start_error = ""
        await scene.until(lambda: scene.supervisor.state()["engine"] == "ready")
        assert isinstance((await scene.turn())[-1], Finished)
    finally:
        await scene.supervisor.close()


async def test_a_crash_loop_says_why(tmp_path: Path):
    """A daemon that dies at once, again and again, is failed with the end of its log; the engine serves all the same."""
    (tmp_path / "refuse").touch()
    scene = staged(tmp_path)
    await scene.supervisor.start()
    try:
        await scene.until(lambda: any(s["daemon"] == "failed" for s in scene.states))
        failed = next(s for s in scene.states if s["daemon"] == "failed")
        assert "exited with 1" in failed["detail"] and "refused to start" in failed["detail"]
        await scene.until(lambda: scene.supervisor.state()["engine"] == "ready")
        (tmp_path / "refuse").unlink()
        await scene.until(lambda: scene.supervisor.state()["daemon"] == "ready")
    finally:
        await scene.supervisor.close()


async def test_one_server_for_a_folder(tmp_path: Path):
    """A second server on the same data folder is refused and does the first no harm."""
    async with running(tmp_path) as scene:
        with pytest.raises(FolderTaken):
            await staged(tmp_path).supervisor.start()
        assert isinstance((await scene.turn())[-1], Finished)


async def test_the_scripted_kind_needs_no_processes(tmp_path: Path):
    """kind = scripted runs in the server's own process, without a daemon, and comes back when it dies."""
    down: list[str] = []
    supervisor = Supervisor(Settings(data=tmp_path, engine={"kind": "scripted", "device_tokens": 1024}), CONFIG,
                            listen=lambda state: None, down=down.append, backoff=QUICK)
    await supervisor.start()
    try:
        await supervisor.wait_ready(10)
        assert supervisor.state() == {"engine": "ready", "daemon": "disabled", "detail": ""}
        first = supervisor.engine
        assert isinstance(first, ScriptedEngine) and not list((tmp_path / "run").glob("*.pid"))
        first.die("a test says so")
        async with asyncio.timeout(10):
            while not down:
                await asyncio.sleep(0.01)
        await supervisor.wait_ready(10)
        assert supervisor.engine is not first and down == ["a test says so"]
    finally:
        await supervisor.close()
