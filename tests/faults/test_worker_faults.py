"""An engine's worker that is killed, hangs, refuses to start, or loses its parent: nobody waits for ever, nothing is left."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvstore.receipt import Outcome
from server.engines import channel
from server.engines.base import EngineStartError, EngineUnavailable
from server.engines.channel import Content, Delta, Failed, Finished, Generate, Sampling
from server.engines.remote import RemoteEngine, Timeouts
from server.engines.scripted import ScriptedConfig
from server.processes import LogFile, command_line
from server.supervisor import worker_engine


async def until(true: Callable[[], bool], within_s: float = 20) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.02)


PATIENT = Timeouts(start_s=60)


def make(folder: Path, exits: list | None = None, timeouts: Timeouts = PATIENT, **config) -> RemoteEngine:
    return worker_engine("scripted", msgspec.json.encode(ScriptedConfig(**config)), run_folder=folder / "run",
                         log_file=LogFile(folder / "engine.log"), timeouts=timeouts,
                         on_exit=None if exits is None else lambda *how: exits.append(how))


@asynccontextmanager
async def started(folder: Path, *args, **config) -> AsyncIterator[RemoteEngine]:
    engine = make(folder, *args, **config)
    await engine.start(lambda message: None)
    try:
        yield engine
    finally:
        await engine.close()
        assert command_line(engine.pid) == []


def request(turn: str = "t", most: int = 5) -> Generate:
    return Generate(turn_id=turn, session_id="s", generation=1, branch_id="b", content=Content(token_ids=list(range(40))),
                    sampling=Sampling(max_new_tokens=most, ignore_eos=True))


def drop(op: str = "o") -> channel.Drop:
    return channel.Drop(op_id=op, session_id="s", generation=1, contents=(Content(token_ids=list(range(40))),))


async def test_a_killed_worker_fails_its_turns(tmp_path: Path):
    """kill -9 in the middle of a turn ends it as retryable, tells of the exit once, and calls are refused from then on."""
    exits: list = []
    async with started(tmp_path, exits, token_delay_s=0.01) as engine:
        pid, events = engine.pid, []
        async for event in engine.generate(request(most=5000)):
            if not events:
                os.kill(pid, signal.SIGKILL)
            events.append(event)
        assert isinstance(events[0], Delta)
        assert isinstance(events[-1], Failed) and (events[-1].code, events[-1].retryable) == ("engine_died", True)
        assert sum(not isinstance(e, Delta) for e in events) == 1
        await until(lambda: bool(exits))
        for call in (engine.run(drop()), engine.report(channel.Report(op_id="r")), engine.health()):
            with pytest.raises(EngineUnavailable):
                await call
        with pytest.raises(EngineUnavailable):
            async for _ in engine.generate(request()):
                pass
    assert [code for code, _ in exits] == [-9]
    assert not list((tmp_path / "run").glob("*.pid"))


async def test_a_killed_worker_fails_calls_in_flight(tmp_path: Path):
    """A verb that waits for its answer raises EngineUnavailable when the worker dies."""
    async with started(tmp_path, verb_delay_s=60) as engine:
        call = asyncio.create_task(engine.run(drop()))
        await asyncio.sleep(0.2)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await call


async def test_an_engine_that_dies_takes_its_worker_with_it(tmp_path: Path):
    """When the engine in it dies, the worker says why and exits."""
    exits: list = []
    async with started(tmp_path, exits, die_after_tokens=3) as engine:
        events = [event async for event in engine.generate(request(most=9))]
        assert isinstance(events[-1], Failed) and events[-1].code == "engine_died"
        await until(lambda: bool(exits))
    assert exits[0][0] == 1 and "its script says so" in exits[0][1]


async def test_closing_fails_what_runs_and_tells_nobody(tmp_path: Path):
    """close ends a running turn as Failed, waits until the process is gone, and is no unasked exit."""
    exits: list = []
    async with started(tmp_path, exits, token_delay_s=0.01) as engine:
        events = []
        async for event in engine.generate(request(most=5000)):
            events.append(event)
            if len(events) == 1:
                closing = asyncio.create_task(engine.close())
        await closing
        assert isinstance(events[-1], Failed) and events[-1].code == "engine_died"
    assert exits == []


async def test_a_verb_that_takes_too_long_is_a_failed_receipt(tmp_path: Path):
    """Past its time a verb is failed, its late answer is dropped and counted, and the next calls work."""
    async with started(tmp_path, None, Timeouts(start_s=60, verb_s=0.2), verb_delay_s=0.6) as engine:
        receipt = await engine.run(drop())
        assert (receipt.outcome, receipt.session_id) == (Outcome.FAILED, "s") and "0.2 s" in receipt.reason
        await until(lambda: engine.late_messages == 1)
        assert isinstance([e async for e in engine.generate(request())][-1], Finished)


async def test_a_stopped_worker_does_not_answer_for_ever(tmp_path: Path):
    """A worker that hangs makes calls fail in their time, and is killed at the close."""
    async with started(tmp_path, None, Timeouts(start_s=60, call_s=0.3, stop_s=0.3)) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable, match="0.3 s"):
            await engine.health()


async def test_many_abandoned_turns_leak_nothing(tmp_path: Path):
    """Iterators that are closed early leave no queue behind and the worker idle."""
    async with started(tmp_path, token_delay_s=0.01) as engine:
        for n in range(20):
            events = engine.generate(request(f"t{n}", most=500))
            await anext(events)
            await events.aclose()
        async with asyncio.timeout(20):
            while (await engine.health()).running_turns:
                await asyncio.sleep(0.02)
        assert not engine._turns and not engine._calls


async def test_draining_lets_turns_end(tmp_path: Path):
    """A drained worker finishes what runs, takes nothing new, and exits with 0."""
    exits: list = []
    async with started(tmp_path, exits, token_delay_s=0.02) as engine:
        running = engine.generate(request("t1", most=20))
        first = await anext(running)
        draining = asyncio.create_task(engine.drain(30))
        await asyncio.sleep(0.05)
        refused = [event async for event in engine.generate(request("t2"))]
        assert isinstance(refused[-1], Failed) and refused[-1].code in ("draining", "engine_died")
        events = [first] + [event async for event in running]
        assert isinstance(events[-1], Finished) and len(events) == 21
        await draining
        await until(lambda: bool(exits))
    assert exits[0][0] == 0


@pytest.mark.parametrize(("config", "error", "words"), [
    ({"start_error": "half-hooked"}, EngineStartError, "half-hooked"), ({"page_tokens": 0}, EngineUnavailable, "exited with 1")])
async def test_a_worker_that_cannot_start(tmp_path: Path, config, error, words):
    """An engine's refusal is an EngineStartError with its reason; a worker that just ends is EngineUnavailable. Nothing is left."""
    engine = make(tmp_path, **config)
    with pytest.raises(error, match=words):
        await engine.start(lambda message: None)
    assert command_line(engine.pid) == [] and not list((tmp_path / "run").glob("*.pid"))
    assert not (tmp_path / "run" / "engine.sock").exists()


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path):
    """Cancelling a start, or its time running out, kills the worker."""
    engine = make(tmp_path, None, Timeouts(start_s=0.05))
    with pytest.raises(EngineStartError, match="0.05 s"):
        await engine.start(lambda message: None)
    assert command_line(engine.pid) == []
    other = make(tmp_path)
    task = asyncio.create_task(other.start(lambda message: None))
    await until(lambda: other.pid is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert command_line(other.pid) == []


async def test_a_killed_parent_takes_the_worker_along(tmp_path: Path):
    """kill -9 of the server: the worker is gone a moment later."""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.support.supervised_server", str(tmp_path),
                                                  stdout=asyncio.subprocess.PIPE)
    try:
        worker = int(await parent.stdout.readline())
        assert "server.engines.worker" in command_line(worker)
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: command_line(worker) == [])


async def test_the_socket_is_private_and_the_folder_may_be_deep(tmp_path: Path):
    """The run folder is 0700, its files 0600, the socket is gone once connected, and a path longer than an address works."""
    folder = tmp_path / ("deep" * 20) / ("deeper" * 20)
    async with started(folder) as engine:
        run = folder / "run"
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert stat.S_IMODE((run / "engine.json").stat().st_mode) == 0o600
        assert not (run / "engine.sock").exists()
        assert isinstance([e async for e in engine.generate(request())][-1], Finished)
