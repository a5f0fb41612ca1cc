"""A running server, a wire to it that can be cut, a browser, and a tab with the page signed in.

REKINDLE_E2E_ENGINE=sglang puts the real engine (and the demo model) behind the page instead of the scripted one.
"""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import pytest_asyncio

from server.settings import environment
from tests.support.browser import Wire, chromium

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext

    from tests.support.page import ChatPage

START_S = 600
SLOW_TOKENS_S = 0.02
"""So that an answer can be seen while it comes."""


@dataclass
class Served:
    """A server that answers, with an admin's key."""

    url: str
    key: str
    images_per_message: int
    scripted: bool

    async def ticket(self) -> str:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as http:
            answer = await http.post("/v1/tickets", headers={"Authorization": f"Bearer {self.key}"})
            answer.raise_for_status()
            return answer.json()["ticket"]

    def is_right(self, answer: str, question: str) -> bool:
        """The scripted engine says the question again; the demo model knows the colour of what it was shown."""
        return question in answer if self.scripted else "red" in answer.lower()


@asynccontextmanager
async def scripted(data: Path) -> AsyncIterator[Served]:
    from tests.support.app import ScriptedConfig, running

    async with running(data, ScriptedConfig(token_delay_s=SLOW_TOKENS_S), limits={"images_per_message": 3}) as server:
        yield Served(server.url, server.key, 3, True)


@asynccontextmanager
async def real(data: Path) -> AsyncIterator[Served]:
    """`rekindle serve` as a person would start it, on a free port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "server", "serve", "--data", str(data), stdout=asyncio.subprocess.PIPE,
        env=environment() | {"REKINDLE_SERVER__PORT": "0", "REKINDLE_LIMITS__IMAGES_PER_MESSAGE": "3"})
    said: dict[str, str] = {}
    try:
        async with asyncio.timeout(START_S):
            while "ticket" not in said:
                line = (await process.stdout.readline()).decode()
                assert line, "the server ended before it was ready"
                for name, pattern in (("key", r": (rk_\S+)"), ("url", r"listening on (http://\S+),"), ("ticket", r"#ticket=(\S+)")):
                    if found := re.search(pattern, line):
                        said[name] = found[1]
        yield Served(said["url"], said["key"], 3, False)
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    start = {"scripted": scripted, "sglang": real}[os.environ.get("REKINDLE_E2E_ENGINE", "scripted")]
    async with start(tmp_path_factory.mktemp("page") / "data") as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def wire(served: Served) -> AsyncIterator[Wire]:
    host, port = served.url.removeprefix("http://").split(":")
    wire = await Wire(host, int(port)).start()
    yield wire
    await wire.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator["BrowserContext"]:
    async with chromium() as context:
        yield context


@pytest_asyncio.fixture(loop_scope="module")
async def chat(browser: "BrowserContext", served: Served, wire: Wire) -> AsyncIterator["ChatPage"]:
    """A new tab, signed in by a ticket, through the wire."""
    from tests.support.page import ChatPage

    page = await browser.new_page()
    chat = ChatPage(page)
    await chat.open(f"http://127.0.0.1:{wire.port}/#ticket={await served.ticket()}")
    yield chat
    await page.close()
