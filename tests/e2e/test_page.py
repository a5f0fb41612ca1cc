"""The chat page in a real browser, against the whole server. By default on the scripted engine, which answers by echoing the
last message; REKINDLE_E2E_ENGINE=sglang runs the same on the real one."""

import base64
import io

import pytest
from PIL import Image

expect = pytest.importorskip("playwright.async_api", reason="the package playwright is not installed").expect
pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "one two three four five six seven eight nine ten " * 12


def png_base64(colour: str, side: int = 224) -> str:
    out = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


async def test_first_light(chat, served) -> None:
    """A picture dropped in, an answer streamed out, spilled to memory and to disk by the buttons, and back by the next question."""
    assert "ticket" not in chat.page.url
    await chat.shot("welcome")
    await chat.drop("red.png", png_base64("red"))
    await chat.accepted(1)
    answer = await chat.ask("What colour is the shape?")
    assert served.is_right(answer, "What colour is the shape?")
    await chat.state("hot")
    tokens = await chat.tier_tokens("device")
    assert tokens >= 64

    spilled = await chat.press_verb("spill-host")
    assert (spilled.verb, spilled.outcome, spilled.to) == ("spill", "done", "host")
    await chat.state("warm")
    assert await chat.tier_tokens("host") > 0
    await chat.shot("warm")

    await chat.ask("What colour was the first shape?")
    await chat.state("hot")
    back = await chat.receipt(0)
    assert back.verb in ("restore", "prefetch") and back.to == "device" and "Memory" in back.words

    await chat.press_verb("spill-storage")
    await chat.state("cold")
    assert await chat.tier_tokens("storage") > 0
    await chat.shot("cold")
    restored = await chat.press_verb("restore")
    assert (restored.verb, restored.outcome, restored.to) == ("restore", "done", "device")
    await chat.state("hot")
    sources = await chat.sources()
    assert sum(sources.values()) > 64 and sources.get("device", 0) + sources.get("host", 0) > 0
    await chat.shot("hot-again")
    assert chat.problems == []


async def test_stop_keeps_what_was_said(chat) -> None:
    """The stop button ends the answer, marks it, keeps its words, and the next turn works."""
    await chat.say(LONG)
    await expect(chat.page.locator(".answer-text.streaming")).to_be_visible()
    await chat.shot("streaming")
    await chat.page.click("#stop")
    kept = await chat.answer()
    assert await chat.status() == "cancelled"
    assert kept and len(kept) < len(LONG)
    await expect(chat.page.locator(".turn .tag")).to_have_text("stopped")
    await chat.ask("And now?")
    assert await chat.status() == "completed"


async def test_reload_keeps_the_conversation(chat) -> None:
    """After a reload the same turns, pictures among them, are shown, and the conversation goes on."""
    await chat.sample(2)
    await chat.ask("What is this?")
    await chat.ask("Are you sure?")
    before = await chat.conversation()
    await chat.page.reload()
    await chat.connected()
    await expect(chat.page.locator(".turn")).to_have_count(2)
    assert await chat.conversation() == before
    await expect(chat.page.locator(".turn .thumb img").first).to_have_js_property("naturalWidth", 224)
    await chat.ask("And after the reload?")
    assert len(await chat.conversation()) == 3
    assert chat.problems == []


async def test_a_cut_connection_loses_and_repeats_nothing(chat, wire) -> None:
    """The socket is dropped twice in mid-answer: the page comes back by itself and the answer is whole, each word once."""
    await chat.say(LONG)
    for _ in range(2):
        await expect(chat.page.locator(".answer-text.streaming")).to_be_visible()
        wire.cut()
        await expect(chat.page.locator("#link")).to_have_attribute("data-state", "waiting")
        await expect(chat.page.locator("#banner")).to_be_visible()
        await chat.shot("reconnecting")
        await chat.connected()
    assert await chat.answer() == await served_text(chat)
    assert await chat.page.locator(".turn").count() == 1
    await expect(chat.page.locator("#banner")).to_be_hidden()


async def served_text(chat) -> str:
    """The last answer as the server keeps it, asked for after a reload."""
    await chat.page.reload()
    await chat.connected()
    return await chat.answer()


async def test_markup_stays_text(chat) -> None:
    """A title and a message that look like markup are shown as they were typed, and nothing of them runs."""
    markup = '<img src=x onerror="document.title=1"><b>bold</b>'
    await chat.ask(markup)
    await expect(chat.page.locator(".session-title").first).to_contain_text("<img src=x")
    await expect(chat.page.locator("#title")).to_contain_text("<img src=x")
    assert (await chat.conversation())[0][0].strip() == markup
    assert await chat.page.title() == "Rekindle"
    assert await chat.page.locator(".bubble b, .bubble img, #title img, .session img").count() == 0


async def test_a_refused_image_is_explained_and_the_next_one_works(chat, served) -> None:
    """A file that is no image and one picture too many each give a readable note; after that a good picture is sent."""
    await chat.page.set_input_files("#file", files=[{"name": "notes.png", "mimeType": "image/png", "buffer": b"no picture"}])
    note = chat.page.locator("#notes .note")
    await expect(note).to_contain_text("notes.png")
    await expect(chat.page.locator(".attachment")).to_have_count(0)
    await chat.shot("refused")
    good = base64.b64decode(png_base64("blue"))
    limit = served.images_per_message
    await chat.page.set_input_files("#file", files=[
        {"name": f"{n}.png", "mimeType": "image/png", "buffer": good} for n in range(limit + 1)])
    await expect(note).to_contain_text(f"images_per_message = {limit}, asked for {limit + 1}")
    await chat.accepted(limit)
    await chat.ask("What are these?")
    assert await chat.page.locator(".turn .thumb").count() == limit
    await expect(note).to_have_count(0)


async def test_regenerate_and_edit_make_branches(chat) -> None:
    """Answering again and editing keep the old version beside the new one, and one can go back to it."""
    await chat.ask("First question")
    await chat.page.locator(".turn .again").click()
    await expect(chat.page.locator(".turn .branches")).to_contain_text("2 / 2")
    await chat.answer()
    await chat.page.locator(".turn .said").hover()
    await chat.page.locator(".turn .edit").click()
    await expect(chat.page.locator("#editing")).to_be_visible()
    await chat.page.fill("#text", "Edited question")
    await chat.page.press("#text", "Enter")
    await expect(chat.page.locator(".turn .branches")).to_contain_text("3 / 3")
    await chat.answer()
    assert (await chat.conversation())[0][0].strip() == "Edited question"
    await chat.page.get_by_label("Earlier version").click()
    assert (await chat.conversation())[0][0].strip() == "First question"
    await chat.ask("Under the older one")
    assert [said.strip() for said, _ in await chat.conversation()] == ["First question", "Under the older one"]


async def test_sessions_can_be_told_apart_and_deleted(chat) -> None:
    """Two conversations keep their own turns; a deleted one is gone from the list and from the server."""
    await chat.ask("In the first")
    await chat.page.click("#new-session")
    await chat.ask("In the second")
    rows = chat.page.locator(".session")
    await expect(rows.locator(".session-title", has_text="In the first")).to_have_count(1)
    await rows.filter(has_text="In the first").locator(".session-open").click()
    assert [said.strip() for said, _ in await chat.conversation()] == ["In the first"]
    chat.page.on("dialog", lambda dialog: dialog.accept())
    await rows.filter(has_text="In the first").hover()
    await rows.filter(has_text="In the first").locator(".session-remove").click()
    await expect(rows.filter(has_text="In the first")).to_have_count(0)
    await expect(chat.page.locator("#welcome")).to_be_visible()
    await chat.page.reload()
    await chat.connected()
    await expect(rows.filter(has_text="In the second")).to_have_count(1)
    await expect(rows.filter(has_text="In the first")).to_have_count(0)


async def test_a_used_ticket_leads_to_the_sign_in_form_and_a_key_gets_in(browser, served, wire) -> None:
    """A wrong ticket and a wrong key are refused with a reason; the right key opens the page, and is not kept in it."""
    from tests.support.page import ChatPage

    page = await browser.new_page()
    chat = ChatPage(page)
    await page.goto(f"http://127.0.0.1:{wire.port}/#ticket=used-already")
    await expect(page.locator("#signin")).to_be_visible()
    await expect(page.locator("#signin-reason")).to_be_visible()
    for key in ("rk_wrong", served.key):
        await page.fill("#key", key)
        await page.press("#key", "Enter")
        await expect(page.locator("#key")).to_have_value("")
        if key != served.key:
            await expect(page.locator("#signin-reason")).to_be_visible()
    await chat.connected()
    assert served.key not in await page.evaluate("JSON.stringify({...sessionStorage}) + JSON.stringify({...localStorage})")
    await page.close()


@pytest.mark.parametrize("width", [390, 320])
async def test_a_phone_shows_it_all_without_sideways_scrolling(chat, width: int) -> None:
    """At phone width nothing is wider than the screen, and both panels open over the conversation."""
    await chat.page.set_viewport_size({"width": width, "height": 740})
    assert await chat.overflow_px() == 0
    await chat.sample(1)
    await chat.ask("A-very-long-word-" * 12)
    assert await chat.overflow_px() == 0
    await chat.shot(f"phone-{width}")
    await chat.page.get_by_role("button", name="Memory of this conversation").click()
    await expect(chat.page.locator("#spill-host")).to_be_visible()
    assert await chat.overflow_px() == 0
    await chat.shot(f"phone-{width}-memory")
    await chat.page.mouse.click(4, 500)
    await expect(chat.page.locator("#spill-host")).to_be_hidden()
    await chat.page.get_by_role("button", name="Conversations").click()
    await expect(chat.page.locator(".session").first).to_be_visible()
    assert await chat.overflow_px() == 0
