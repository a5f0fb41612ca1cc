"""Small requests that used to cost much: each is refused for a price that does not grow with what it asks for."""

import base64
import json
from collections.abc import Iterator

import pytest

from server import wire
from server.codec import MAX_VALUES, BadFrame, decode_frame
from server.preparing import Preparer
from tests.support.app import Running, message, png, running


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def refused(text: str) -> str:
    with pytest.raises(BadFrame) as caught:
        decode_frame(text)
    return caught.value.code


def keys(count: int) -> Iterator[str]:
    return (f'"k{n}":0' for n in range(count))


# ---- frames --------------------------------------------------------------------------------------------------------
def test_a_frame_of_too_many_values_is_refused_before_it_is_read() -> None:
    """MAX_VALUES members are read and judged, one more is not; commas in texts are no members."""
    assert refused('{"type":"ping",' + ",".join(keys(MAX_VALUES - 1)) + "}") == "unknown_field"
    assert refused('{"type":"ping",' + ",".join(keys(MAX_VALUES)) + "}") == "too_many_values"
    assert refused('{"type":"ping","x":[' + "0," * 1_000_000 + "0]}") == "too_many_values"
    title = 'a,"\\' + "," * 400
    assert decode_frame(json.dumps({"type": "session.update", "session_id": "s", "title": title})) == wire.SessionUpdate("s", title)


def test_a_field_that_stands_twice_among_many_is_named() -> None:
    """However many others there are, and wherever the two stand."""
    assert refused("{" + ",".join(keys(MAX_VALUES - 2)) + ',"z":0,"z":0}') == "duplicate_field"


def test_of_thousands_of_bad_parts_the_first_is_named() -> None:
    """Each part that is wrong in its own way costs the same."""
    parts = '{"type":"input_text"},' * 3000
    frame = '{"type":"response.create","session_id":"s","input":[{"content":[' + parts + '{"type":"no"}]}]}'
    with pytest.raises(BadFrame) as caught:
        decode_frame(frame)
    assert (caught.value.code, caught.value.param) == ("missing_field", "input.0.content.0.text")


# ---- texts ---------------------------------------------------------------------------------------------------------
@pytest.fixture
async def app(tmp_path):
    async with running(tmp_path / "data") as app:
        yield app


async def test_a_text_that_can_never_fit_is_refused_before_tokenizing(app: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megabytes of text: context_tokens with the least that they are, no tokenizer asked; the next good turn works."""
    tokenized: list[int] = []
    prompt = Preparer._prompt
    monkeypatch.setattr(Preparer, "_prompt", lambda *args: tokenized.append(1) or prompt(*args))
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        told = await ws.say(session_id, "word " * 2_000_000)
        assert (told["error"]["code"], told["error"]["limit"]) == ("context_tokens_exceeded", app.services.context_tokens)
        assert told["error"]["requested"] > told["error"]["limit"] and not tokenized
        assert (await ws.say(session_id, "hello"))["type"] == "response.completed" and tokenized == [1]


@pytest.mark.parametrize("words", [9_000, 2_000_000])
async def test_instructions_that_leave_no_room_for_a_turn_are_refused(app: Running, words: int) -> None:
    """No session is made that could never answer; both numbers are told."""
    async with app.socket() as ws:
        told = await ws.answer("session.create", session={"instructions": "word " * words})
        assert (told["error"]["code"], told["error"]["limit"]) == ("context_tokens_exceeded", app.services.context_tokens)
        assert told["error"]["requested"] > told["error"]["limit"]
        assert not await app.services.store.list()
        made = await ws.answer("session.create", session={"instructions": "word " * 5_000})
        assert (await ws.say(made["session_id"], "hello"))["type"] == "response.completed"


# ---- images --------------------------------------------------------------------------------------------------------
async def test_a_turn_that_is_too_long_is_refused_before_any_image_is_decoded(app: Running) -> None:
    """The price is in the header: eight pictures above tokens_per_turn decode nothing and leave no file; within it they do."""
    pictures = [data_url(png((n, 0, 0), (448, 448))) for n in range(8)]
    async with app.socket() as ws, app.http() as http:
        session_id = (await ws.answer("session.create"))["session_id"]
        await http.patch(f"/v1/sessions/{session_id}/limits", json={"tokens_per_turn": 2000})
        answer = await ws.answer("response.create", session_id=session_id, input=message("what?", *pictures))
        assert answer["error"]["code"] == "tokens_per_turn_exceeded" and answer["error"]["requested"] > 8 * 256
        assert app.services.images.gate.peak_bytes == 0 and not list(app.services.images.folder.iterdir())
        await http.patch(f"/v1/sessions/{session_id}/limits", json={"tokens_per_turn": None})
        await ws.answer("response.create", session_id=session_id, input=message("what?", *pictures))
        assert (await ws.until("response.completed"))["response"]["usage"]["image_tokens"] == 8 * 256
        assert app.services.images.gate.peak_bytes >= 448 * 448 * 4


@pytest.mark.parametrize("bad", [png()[:-40], b"", b"no image at all"])
async def test_of_several_images_the_bad_one_is_named(app: Running, bad: bytes) -> None:
    """By its place in the message, whether its header or its pixels are wrong; the rest of it is taken without."""
    good = data_url(png())
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        answer = await ws.answer("response.create", session_id=session_id, input=message("?", good, data_url(bad), good))
        assert answer["error"]["type"] == "invalid_request" and answer["error"]["param"] == "input.0.content.1"
        assert (await app.services.store.totals(session_id)).turns == 0
        await ws.answer("response.create", session_id=session_id, input=message("?", good, good))
        assert (await ws.until("response.completed"))["response"]["usage"]["image_tokens"] == 2 * 16
