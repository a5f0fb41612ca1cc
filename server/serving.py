"""`rekindle serve`: the process around the application. Listens at once; the engine starts meanwhile, and the page shows it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import structlog
import uvicorn
from fastapi import FastAPI

from .app import TURNS_END_WITHIN_S, create_app
from .modelinfo import ModelError
from .processes import FolderTaken, lock
from .runtime import DEMO, Services, model_folder
from .settings import Settings
from .telemetry import configure_logging
from .transports import Http, WebSocket

log = structlog.get_logger(__name__)

GRACEFUL_S = 10
PONG_WITHIN_S = 20.0
"""A peer that has not answered a ping by then is gone."""
WS_SIZE_FACTOR = 2
"""A frame above the announced limit is refused with an error that names it, up to this many times the limit; beyond, the
connection is closed without a word."""
TICKET_S = 3600.0
"""How long the ticket in the printed address can be used, once."""


class Server(uvicorn.Server):
    """Turns end before connections do, so that whoever watches sees how."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._services.stopping = True
        await self._services.turns.close(TURNS_END_WITHIN_S)
        await super().shutdown(sockets)


def uvicorn_config(settings: Settings, app: FastAPI) -> uvicorn.Config:
    """uvicorn's own access log would write query strings; requests are logged by `http.Route`."""
    return uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, lifespan="on", server_header=False,
        http=Http, ws=WebSocket, ws_max_size=settings.server.frame_bytes * WS_SIZE_FACTOR, ws_per_message_deflate=False,
        ws_ping_interval=settings.server.heartbeat_s, ws_ping_timeout=PONG_WITHIN_S,
        timeout_graceful_shutdown=GRACEFUL_S)


def run(settings: Settings, admin_key_file: str) -> int:
    """The exit status."""
    configure_logging(settings.log)
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.close(lock(settings.data.resolve() / "run"))      # the supervisor takes it for good; this is for a clear answer
        listening = listen(settings.server.host, settings.server.port)
        build_demo(settings)
        terminal = Terminal(settings, listening, settings.data / admin_key_file)
        app = create_app(settings, started=terminal.started, told=terminal.told)
    except (FolderTaken, ModelError, OSError, subprocess.CalledProcessError) as error:
        say(f"cannot start: {error}")
        return 1
    # uvicorn hands a signal on to who was here before it, once it has shut down: to nobody, so that the exit is a clean one.
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: None)
    server = Server(uvicorn_config(settings, app), app.state.services)
    server.run(sockets=[listening])
    say("stopped")
    return 0 if server.started else 1


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError, saying which address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"{host}:{port}: {error.strerror}") from error


def build_demo(settings: Settings) -> None:
    """In a process of its own: it needs torch, which this one never loads."""
    if settings.model.path != DEMO or settings.engine.kind == "scripted" or (Path(model_folder(settings)) / "config.json").exists():
        return
    say("building the demo model, once")
    subprocess.run([sys.executable, "-m", "server.demo.build", model_folder(settings)], check=True)


def say(line: str) -> None:
    print(line, flush=True)


class Terminal:
    """What the person who started the server is told."""

    def __init__(self, settings: Settings, listening: socket.socket, key_file: Path) -> None:
        host, port = listening.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._settings, self._key_file = settings, key_file
        self._services: Services | None = None
        self._last: tuple[str, ...] = ()
        self._given = False

    def started(self, services: Services) -> None:
        self._services = services
        if (key := services.auth.first_key) is not None:
            descriptor = os.open(self._key_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(key + "\n")
            say(f"admin key, shown once (the command line reads it from {self._key_file}): {key}")
        say(f"listening on {self.address}, data in {self._settings.data}; starting the engine")
        asyncio.get_running_loop().call_soon(lambda: self.told(services.supervisor.state()))

    def told(self, state: dict[str, str]) -> None:
        """A change of engine or daemon."""
        line = (f"engine {state['engine']}", f"offload {state['daemon']}", state["detail"].splitlines()[0] if state["detail"] else "")
        if line != self._last:
            self._last = line
            say("  " + ", ".join(part for part in line if part))
        if not self._given and self._services is not None and state["engine"] in ("ready", "failed"):
            self._given = True
            auth = self._services.auth
            say(f"\n  open {self.address}/#ticket={auth.issue_ticket(auth.local_admin, lifetime_s=TICKET_S).ticket}\n")
