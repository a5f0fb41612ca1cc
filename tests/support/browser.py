"""A headless Chromium for tests of the page, and a wire between it and the server that can be cut."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync"]
PATIENCE_MS = 20_000


@asynccontextmanager
async def chromium(*, width: int = 1360, height: int = 860, dark: bool = False) -> AsyncIterator["BrowserContext"]:
    """A browser with an empty profile. Skips the test, saying why, where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (`make deps` installs it)")
    playwright = pytest.importorskip("playwright.async_api", reason="the package playwright is not installed")
    with TemporaryDirectory(prefix="rekindle-browser-", ignore_cleanup_errors=True) as profile:
        async with playwright.async_playwright() as driver:
            context = await driver.chromium.launch_persistent_context(
                profile, executable_path=CHROMIUM, headless=True, args=ARGS, viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light")
            context.set_default_timeout(PATIENCE_MS)
            try:
                yield context
            finally:
                await context.close()


class Wire:
    """A TCP relay in front of the server. `cut` drops every connection at once; while `down`, new ones are dropped too.
    `target` may change: later connections go there."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.down = False

    async def start(self) -> "Wire":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    @property
    def port(self) -> int:
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            self._writers.add(sink)
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        self._writers.discard(sink)
        sink.close()


def shots_folder() -> Path | None:
    """Where screenshots go: the folder that REKINDLE_SHOTS names; None: nowhere."""
    name = os.environ.get("REKINDLE_SHOTS")
    if not name:
        return None
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
