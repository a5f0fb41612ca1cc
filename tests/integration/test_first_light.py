"""First light, on the real SGLang and LMCache with the bundled model, through `rekindle serve` and the client library:
a conversation of three images that survives memory, disk, and kill -9 of everything."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image, ImageDraw

from server import modelinfo, prompt
from server.client import connect
from sessions.model import ImagePart
from tests.support.served import Served

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

PAGE = 16
QUESTION = "What color is the shape?"
RECALL = "What color was the first shape?"


def picture(shape: str, colour: str, background: str, size: tuple[int, int] = (224, 224)) -> bytes:
    image = Image.new("RGB", size, background)
    draw, (width, height) = ImageDraw.Draw(image), size
    box = [width * 0.25, height * 0.25, width * 0.75, height * 0.75]
    (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def whole_pages(tokens: int) -> int:
    """Of a sequence of that length, the tokens whose KV can be kept: whole pages, without the last token."""
    return (tokens - 1) // PAGE * PAGE


@dataclass
class Story:
    """What the walk has established so far; later tests go on from it."""

    served: Served
    session_id: str = ""
    third: str = ""
    """The response after which RECALL is asked, each time from the same prompt."""
    hot_ids: list[int] = field(default_factory=list)
    hot_text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    image_start: int = 0
    """Of an image that opens a conversation: the tokens before it are everybody's."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def story(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> AsyncIterator[Story]:
    # float32, so that restored and recomputed KV give the same tokens; no idle spilling, the tests do it themselves.
    served = Served(tmp_path_factory.mktemp("first-light") / "data", demo_model, REKINDLE_MODEL__DTYPE="float32",
                    REKINDLE_IDLE__TO_HOST_S="none", REKINDLE_IDLE__TO_STORAGE_S="none")
    try:
        await served.start()
        opening = prompt.open_turn(modelinfo.read(str(demo_model)), "", [ImagePart("0" * 64, 224, 224, (1, 16, 16), 64, 0)])
        yield Story(served, image_start=opening.images[0].start)
    finally:
        await served.close()


async def recall(story: Story) -> tuple[str, list[int], dict[str, Any]]:
    """Ask RECALL after the third turn: (text, token ids, the response's usage and receipt)."""
    async with connect(story.served.url, story.served.key) as rk:
        chat = await rk.resume(story.session_id)
        text = await chat.ask(RECALL, previous_response_id=story.third)
        return text, story.served.output_ids(chat.last["id"]), {**chat.usage, "receipt": chat.last["receipt"]}


async def spill(story: Story, to: str) -> dict[str, Any]:
    async with connect(story.served.url, story.served.key) as rk:
        return await (await rk.resume(story.session_id)).spill(to)


async def test_three_images_in_three_turns(story: Story) -> None:
    """Each picture is answered by its own colour, and each turn computes only what is new."""
    pictures = [picture("circle", "red", "white"), picture("square", "blue", "yellow", (1024, 768)), picture("circle", "green", "black", (320, 240))]
    async with connect(story.served.url, story.served.key) as rk:
        chat = await rk.session()
        story.session_id = chat.id
        before = 0
        for image, colour in zip(pictures, ("red", "blue", "green"), strict=True):
            assert colour in (await chat.ask(QUESTION, images=[image])).lower()
            assert chat.usage["cached_tokens_details"] == {"device": whole_pages(before) if before else 0, "host": 0, "storage": 0}
            before = chat.usage["input_tokens"] + chat.usage["output_tokens"]
        story.third = chat.last["id"]


async def test_hot(story: Story) -> None:
    """(a) On the device: the first picture is remembered, and nothing but the question is computed."""
    story.hot_text, story.hot_ids, story.usage = await recall(story)
    assert "red" in story.hot_text.lower()
    assert story.usage["cached_tokens_details"]["device"] > 0 and story.usage["receipt"] is None


@pytest.mark.parametrize(("to", "state"), [("host", "warm"), ("storage", "cold")])
async def test_spilled_and_back(story: Story, to: str, state: str) -> None:
    """(b, c) After a spill to memory, then to disk: the pool's free pages rise by exactly the session's own, the next turn
    brings back every stored token of its prompt from that tier, and says the same, token for token."""
    await recall(story)                                                     # all of it is on the device, whatever came before
    prompt, answer = story.usage["input_tokens"], len(story.hot_ids)
    kept = whole_pages(prompt + answer)
    before = await story.served.free_pages()
    receipt = await spill(story, to)
    assert (receipt["outcome"], receipt["to"], receipt["from"], receipt["tokens"]) == ("done", to, {"device": kept}, kept)
    assert await story.served.free_pages() - before == kept // PAGE == receipt["pages"]
    kv = await story.served.get(f"/v1/sessions/{story.session_id}/kv")
    assert kv["state"] == state and kv["device_tokens"] == 0 and kv[f"{to}_tokens"] == kept
    text, ids, usage = await recall(story)
    restored = whole_pages(prompt)
    # What every conversation opens with stays in memory for the others; only the session's own chunks leave it.
    opening = story.image_start // PAGE * PAGE if to == "storage" else restored
    assert usage["cached_tokens_details"] == {"device": 0, "host": opening, "storage": restored - opening}
    assert sum(usage["receipt"]["from"].values()) == restored and usage["receipt"]["outcome"] == "done"
    assert (text, ids) == (story.hot_text, story.hot_ids)


async def test_kill_everything(story: Story) -> None:
    """(d) kill -9 of server, engine and daemon at once; after a restart the conversation is there and comes back from disk."""
    await spill(story, "storage")
    await story.served.kill()
    await story.served.start()
    async with connect(story.served.url, story.served.key) as rk:
        history = await (await rk.resume(story.session_id)).history()
    assert [item["status"] for item in history] == ["completed"] * 8          # three pictures, and RECALL on branches of its own
    assert [item["output_text"] for item in history[3:]] == [story.hot_text] * 5
    text, ids, usage = await recall(story)
    restored = whole_pages(story.usage["input_tokens"])
    assert usage["cached_tokens_details"] == {"device": 0, "host": 0, "storage": restored}
    assert (text, ids) == (story.hot_text, story.hot_ids)


async def test_two_sessions_never_mix(story: Story) -> None:
    """Same question, other picture of the same size, side by side: own answers, and the shared prefix ends where the image begins."""
    async with connect(story.served.url, story.served.key) as rk:
        first, second = await rk.session(), await rk.session()
        red, blue = await asyncio.gather(first.ask(QUESTION, images=[picture("circle", "red", "black")]),
                                         second.ask(QUESTION, images=[picture("circle", "blue", "black")]))
        assert "red" in red.lower() and "blue" in blue.lower()
        third = await rk.session()
        assert "green" in (await third.ask(QUESTION, images=[picture("circle", "green", "black")])).lower()
        assert third.usage["cached_tokens_details"]["device"] == story.image_start // PAGE * PAGE
        fourth = await rk.session()
        await fourth.ask(QUESTION, images=[picture("circle", "green", "black")])
        assert fourth.usage["cached_tokens_details"]["device"] == whole_pages(fourth.usage["input_tokens"])


async def test_a_neighbour_loses_nothing(story: Story) -> None:
    """Two sessions with the same instructions: when one is spilled, the other still finds all of its own on the device."""
    instructions = "You are a careful assistant. " * 12
    async with connect(story.served.url, story.served.key) as rk:
        one, other = await rk.session(instructions=instructions), await rk.session(instructions=instructions)
        await one.ask("Say hello.", max_output_tokens=8)
        await other.ask("Count to three.", max_output_tokens=8)
        receipt = await one.spill("host")
        assert receipt["shared_kept_tokens"] > 0 and receipt["outcome"] == "done"
        length = other.usage["input_tokens"] + other.usage["output_tokens"]
        await other.ask("Go on.", max_output_tokens=8)
        assert other.usage["cached_tokens_details"] == {"device": whole_pages(length), "host": 0, "storage": 0}


async def test_the_page(story: Story) -> None:
    """A person's walk in a real browser: three pictures dropped in, right answers, pages seen to move to memory and to disk
    by the buttons, and back by the next question."""
    from tests.support.browser import chromium
    from tests.support.page import ChatPage

    async with chromium() as browser:
        chat = ChatPage(await browser.new_page())
        await chat.open(story.served.page)
        for shape, colours in (("square", ("red", "black")), ("circle", ("blue", "white")), ("square", ("green", "white"))):
            await chat.drop(f"{colours[0]}.png", base64.b64encode(picture(shape, *colours)).decode())
            await chat.accepted(1)
            assert colours[0] in (await chat.ask(QUESTION)).lower()
        await chat.state("hot")
        for button, state, tier in (("spill-host", "warm", "host"), ("spill-storage", "cold", "storage")):
            receipt = await chat.press_verb(button)
            assert (receipt.verb, receipt.outcome, receipt.to) == ("spill", "done", tier)
            await chat.state(state)
            assert await chat.tier_tokens(tier) > 0 and await chat.tier_tokens("device") == 0
            await chat.shot(f"first-light-{state}")
            assert "red" in (await chat.ask(RECALL)).lower()
            await chat.state("hot")
        await chat.shot("first-light")
        assert chat.problems == []


@pytest.mark.parametrize("victim", ["sglang::scheduler", "server.engines.worker", "lmcache.cli.main"])
async def test_kill_one_part(story: Story, victim: str) -> None:
    """kill -9 of scheduler, worker or daemon: the server stays up, says so, starts it again, and the next turn is right."""
    part = "daemon" if "lmcache" in victim else "engine"
    restarts = (await story.served.status())[part]["restarts"]
    async with connect(story.served.url, story.served.key) as rk:
        story.served.find(victim).kill()
        async with asyncio.timeout(60):
            while (await story.served.status())[part]["restarts"] == restarts:
                await asyncio.sleep(0.05)
        assert (await story.served.get("/healthz"))["status"] == "ok"
        await story.served.until_ready()
        chat = await rk.resume(story.session_id)
        assert "red" in (await chat.ask(RECALL, previous_response_id=story.third)).lower()


async def test_stops_cleanly(story: Story) -> None:
    """SIGTERM ends the server with status 0 and leaves no process and no shared memory of ours."""
    children = story.served.children()
    assert await story.served.stop() == 0
    assert not [process for process in children if process.is_running() and process.status() != "zombie"]
    assert not [path for path in Path("/dev/shm").glob("lmcache_kv_*") if path.name.split("_")[2] in {str(p.pid) for p in children}]
