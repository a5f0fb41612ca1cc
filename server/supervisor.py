"""Starts, watches and restarts the engine's worker and the LMCache daemon, side by side and apart from each other.

When the daemon dies, the engine runs on (its plugin registers itself again); when the engine dies, its running turns end
as retryable, the owner of the KV books is told that the device is empty, and the next engine fetches KV from host and
storage. Ports are chosen once, so that either finds the other again after a restart.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import structlog

from kvstore.geometry import Geometry

from .components import Backoff, Component, State
from .engines.base import Engine, EngineStartError, EngineUnavailable, Listener
from .engines.channel import Ledger, Pressure, Progress, Ready
from .engines.config import EngineConfig
from .engines.remote import RemoteEngine, Timeouts
from .engines.scripted import ScriptedConfig, ScriptedEngine
from .processes import Child, LogFile, lock, sweep
from .settings import Settings, environment

log = structlog.get_logger(__name__)

OnExit = Callable[[int | None, str], None]
MakeEngine = Callable[[EngineConfig, OnExit], Engine]
DaemonCommand = Callable[[int, int], list[str]]
"""(port, HTTP port) -> argument vector."""

STORAGE_SWEEP_S = 30.0


@dataclass(frozen=True, slots=True)
class DaemonChecks:
    start_s: float = 60.0
    check_s: float = 2.0
    failures: int = 3
    """So many unanswered checks in a row, and it is killed and started again."""
    stop_s: float = 5.0


class Supervisor:
    """`config`: the engine's, without the daemon's address, which is filled in here. `listen` gets {engine, daemon, detail}
    after each change. `heard`: what the engine says unasked. `down`: an engine that served is gone. `make_engine` and
    `daemon_command` replace the real parts in tests."""

    def __init__(self, settings: Settings, config: EngineConfig, *, listen: Callable[[dict[str, str]], None],
                 heard: Listener = lambda message: None, ready: Callable[[Ready], None] = lambda ready: None,
                 down: Callable[[str], None] = lambda reason: None, backoff: Backoff | None = None,
                 checks: DaemonChecks = DaemonChecks(), make_engine: MakeEngine | None = None,
                 daemon_command: DaemonCommand | None = None) -> None:
        self._settings, self._config, self._checks = settings, config, checks
        self._listen, self._heard, self._on_ready, self._on_down = listen, heard, ready, down
        self._folder = settings.data.resolve()
        self._run_folder = self._folder / "run"
        self._storage = self._folder / "kv"
        self._engine_log = LogFile(self._folder / "logs" / "engine.log")
        self._daemon_log = LogFile(self._folder / "logs" / "daemon.log")
        self._make_engine = make_engine or (self._scripted if settings.engine.kind == "scripted" else self._remote)
        self._daemon_command = daemon_command or self._lmcache
        self._engine: Engine | None = None
        self._ready: Ready | None = None
        self._lock: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._port = self._http_port = 0
        backoff = backoff or Backoff()
        self._engine_part = Component("engine", self._engine_life, backoff=backoff, changed=self._changed, tail=self._engine_log.tail)
        with_daemon = settings.offload.enabled and (settings.engine.kind != "scripted" or daemon_command is not None)
        self._daemon_part = Component("daemon", self._daemon_life, backoff=backoff, changed=self._changed,
                                      tail=self._daemon_log.tail) if with_daemon else None

    # ---- reading -----------------------------------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        """The one that serves now. Raises EngineUnavailable."""
        if self._engine is None:
            part = self._engine_part
            raise EngineUnavailable(f"the engine is {part.state}" + (f": {part.detail.splitlines()[0]}" if part.detail else ""))
        return self._engine

    @property
    def ready(self) -> Ready | None:
        """What the engine said of itself when it was last ready; None until then."""
        return self._ready

    @property
    def geometry(self) -> Geometry | None:
        """None until an engine was ready once."""
        return Geometry(self._ready.page_tokens, self._ready.token_bytes, self._ready.device_tokens) if self._ready else None

    @property
    def restarts(self) -> dict[str, int]:
        """Deaths by component, since the start."""
        return {part.name: part.deaths for part in (self._engine_part, self._daemon_part) if part}

    def state(self) -> dict[str, str]:
        """The daemon is `disabled` where the engine works without one."""
        parts = [part for part in (self._engine_part, self._daemon_part) if part and part.detail]
        return {"engine": str(self._engine_part.state), "daemon": str(self._daemon_part.state) if self._daemon_part else "disabled",
                "detail": "\n".join(f"{part.name}: {part.detail}" for part in parts)}

    # ---- life --------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Sweep what a dead predecessor left, begin to start both parts, return. Raises FolderTaken."""
        from kvstore.lmcache.sweep import sweep_shm

        self._lock = lock(self._run_folder)
        for name in sweep(self._run_folder):
            log.warning("leftover_killed", component=name)
        sweep_shm()
        self._port, self._http_port = free_ports(2)
        self._tasks = [asyncio.create_task(part.keep(), name=part.name) for part in (self._daemon_part, self._engine_part) if part]

    async def wait_ready(self, timeout_s: float) -> None:
        """Until both parts serve. Raises TimeoutError, and EngineStartError once one has failed."""
        async with asyncio.timeout(timeout_s):
            while not all(part.state is State.READY for part in (self._engine_part, self._daemon_part) if part):
                for part in (self._engine_part, self._daemon_part):
                    if part and part.state is State.FAILED:
                        raise EngineStartError(f"the {part.name} failed: {part.detail}")
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Stop both parts; returns when their processes are gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _changed(self) -> None:
        self._listen(self.state())

    # ---- the engine --------------------------------------------------------------------------------------------
    async def _engine_life(self, up: Callable[[], None]) -> str:
        from kvstore.lmcache.sweep import sweep_shm

        died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        url = f"tcp://127.0.0.1:{self._port}" if self._daemon_part else None

        def on_exit(code: int | None, reason: str) -> None:
            if not died.done():                         # else the server is stopping
                died.set_result(reason)

        engine = self._make_engine(msgspec.structs.replace(self._config, offload_url=url), on_exit)
        try:
            self._ready = await engine.start(self._said)
            self._engine = engine
            self._on_ready(self._ready)
            up()
            return await died
        finally:
            self._engine = None
            await engine.close()
            sweep_shm()
            if died.done() and not died.cancelled():     # else it never served, or the server stops
                self._on_down(died.result())

    def _said(self, message: Ledger | Pressure | Progress) -> None:
        if isinstance(message, Progress):
            self._engine_part.progress(message.detail or message.stage)
        self._heard(message)

    def _remote(self, config: EngineConfig, on_exit: OnExit) -> Engine:
        return worker_engine(config.kind, msgspec.json.encode(config), run_folder=self._run_folder, log_file=self._engine_log,
                             timeouts=Timeouts(start_s=self._settings.engine.start_timeout_s), on_exit=on_exit)

    def _scripted(self, config: EngineConfig, on_exit: OnExit) -> Engine:
        scripted = ScriptedConfig(page_tokens=config.page_tokens, context_tokens=config.context_tokens, model=config.model_path)
        if config.device_tokens is not None:
            scripted.device_tokens = config.device_tokens
        return ScriptedEngine(scripted, on_exit)

    # ---- the daemon --------------------------------------------------------------------------------------------
    async def _daemon_life(self, up: Callable[[], None]) -> str:
        from kvstore.lmcache import daemon
        from kvstore.lmcache.sweep import sweep_unfinished

        assert self._daemon_part is not None
        self._storage.mkdir(parents=True, exist_ok=True)
        sweep_unfinished(self._storage)
        self._daemon_part.progress("starting LMCache")
        child = await Child.spawn("daemon", self._daemon_command(self._port, self._http_port), run_folder=self._run_folder,
                                  log=self._daemon_log, env=environment() | daemon.environment())
        try:
            exited = asyncio.ensure_future(child.wait())
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._http_port}", trust_env=False,
                                         timeout=self._settings.offload.timeout_s) as client:
                return await self._watch_daemon(exited, client, up)
        finally:
            await child.stop(self._checks.stop_s)

    async def _watch_daemon(self, exited: "asyncio.Future[int]", client: httpx.AsyncClient, up: Callable[[], None]) -> str:
        checks, began_s, failures, is_up, swept_s = self._checks, time.monotonic(), 0, False, 0.0
        while True:
            await asyncio.wait({exited}, timeout=checks.check_s if is_up else min(0.2, checks.check_s))
            if exited.done():
                return f"it exited with {exited.result()}"
            if await _answers(client):
                failures = 0
                if not is_up:
                    is_up = True
                    up()
            elif is_up:
                failures += 1
                if failures >= checks.failures:
                    return f"it left {failures} health checks unanswered"
            elif time.monotonic() - began_s > checks.start_s:
                return f"it did not serve within {checks.start_s:g} s"
            if is_up and time.monotonic() - swept_s > STORAGE_SWEEP_S:
                swept_s = time.monotonic()
                await self._sweep_storage()

    async def _sweep_storage(self) -> None:
        """LMCache's file tier never evicts: the bound is ours to keep."""
        from kvstore.lmcache.sweep import sweep_storage

        _, deleted = await asyncio.to_thread(sweep_storage, self._storage, int(self._settings.offload.storage_gb * (1 << 30)))
        if deleted:
            log.info("storage_swept", deleted_bytes=deleted)

    def _lmcache(self, port: int, http_port: int) -> list[str]:
        from kvstore.lmcache import daemon

        offload = self._settings.offload
        return daemon.command(python=sys.executable, port=port, http_port=http_port, chunk_tokens=offload.chunk_tokens,
                              host_gb=offload.host_gb, storage_path=self._storage, storage_gb=offload.storage_gb)


def worker_engine(kind: str, config_json: bytes, *, run_folder: Path, log_file: LogFile, timeouts: Timeouts,
                  on_exit: OnExit | None = None) -> RemoteEngine:
    """An engine in a worker process of ours. Its configuration travels as a file that only this user can read."""
    run_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = run_folder / "engine.json"
    path.touch(mode=0o600)
    path.write_bytes(config_json)
    argv = [sys.executable, "-m", "server.engines.worker", "--kind", kind, "--config", str(path)]
    return RemoteEngine(argv, run_folder=run_folder, log_file=log_file, env=environment(), timeouts=timeouts, on_exit=on_exit)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has now."""
    sockets: list[Any] = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/healthcheck")).is_success
    except httpx.HTTPError:
        return False
