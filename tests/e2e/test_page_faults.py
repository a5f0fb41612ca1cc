"""What a person sees when something under the page dies: a word about it, nothing lost, and a next turn that works."""

from typing import TYPE_CHECKING

import pytest

from tests.support.app import ScriptedConfig, running
from tests.support.browser import Wire, chromium

if TYPE_CHECKING:
    from tests.support.page import ChatPage

expect = pytest.importorskip("playwright.async_api", reason="the package playwright is not installed").expect


async def opened(browser, wire: Wire, server) -> "ChatPage":
    from tests.support.page import ChatPage

    chat = ChatPage(await browser.new_page())
    async with server.http() as http:
        ticket = (await http.post("/v1/tickets")).json()["ticket"]
    await chat.open(f"http://127.0.0.1:{wire.port}/#ticket={ticket}")
    return chat


def at(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


async def test_the_engine_dies_in_mid_answer(tmp_path) -> None:
    """The answer fails with a note, the banner tells of the restart, and the note's button asks again once it is back."""
    async with running(tmp_path / "data", ScriptedConfig(token_delay_s=0.05)) as server, chromium() as browser:
        wire = await Wire(*at(server.url)).start()
        chat = await opened(browser, wire, server)
        await chat.ask("Remember this")
        await chat.say("one two three four five six seven eight nine ten " * 3)
        await expect(chat.page.locator(".answer-text.streaming")).to_be_visible()
        await chat.watch_banner()
        server.engine.die("the test says so")
        await chat.answer()
        assert await chat.status() == "failed"
        await chat.shot("engine-died")
        server.config.token_delay_s = 0.0
        await expect(chat.page.locator("#banner")).to_be_hidden()
        assert "The engine is restarting" in await chat.banners()
        await chat.page.locator(".turn .note .button").click()
        await expect(chat.turn()).to_have_attribute("data-status", "completed")
        assert [said.strip()[:8] for said, _ in await chat.conversation()] == ["Remember", "one two "]
        await chat.ask("And on")
        assert await chat.page.locator(".turn").count() == 3
        await wire.close()


async def test_the_server_restarts_under_the_page(tmp_path) -> None:
    """The page says so, signs in to the new server by itself, shows the same conversation once, and goes on with it."""
    async with chromium() as browser:
        async with running(tmp_path / "data") as first:
            wire = await Wire(*at(first.url)).start()
            chat = await opened(browser, wire, first)
            await chat.sample(1)
            await chat.ask("Before the restart")
            before = await chat.conversation()
        await expect(chat.page.locator("#banner")).to_contain_text("The server is restarting")
        await chat.shot("server-restarts")
        async with running(tmp_path / "data") as second:
            wire.target = at(second.url)
            await chat.connected()
            await expect(chat.page.locator("#banner")).to_be_hidden()
            assert await chat.conversation() == before
            await chat.ask("After the restart")
            assert len(await chat.conversation()) == 2
            assert chat.problems == []
            await wire.close()
            await chat.page.close()
