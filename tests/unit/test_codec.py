"""JSON in: a frame or a BadFrame, and never the client's words in the refusal. Objects out."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import codec, wire
from server.codec import BadFrame, BadUtf8, decode, decode_frame

SECRET = "aGVsbG8gd29ybGQgdGhpcyBpcyBiYXNlNjQ="


def refused(text, kind=wire.ClientFrame):
    with pytest.raises(BadFrame) as caught:
        decode(text, kind)
    return caught.value


def frame(**fields):
    return json.dumps({"type": "response.create", "session_id": "s", "input": [message(text("hi"))]} | fields)


def message(*content):
    return {"type": "message", "role": "user", "content": list(content)}


def text(value):
    return {"type": "input_text", "text": value}


@pytest.mark.parametrize(("given_", "expected"), [
    ({"type": "session.create"}, wire.SessionCreate()),
    ({"type": "session.create", "event_id": "c1", "session": {"instructions": "Be brief.", "max_turns": 50, "budgets": {
        "tokens": 32000, "device_bytes": None, "host_bytes": 268435456}}},
     wire.SessionCreate(wire.SessionRequest("Be brief.", max_turns=50, budgets=wire.Budgets(tokens=32000, host_bytes=268435456)), "c1")),
    ({"type": "session.resume", "session_id": "s", "epoch": 1, "last_seq": 4}, wire.SessionResume("s", 1, 4)),
    ({"type": "session.update", "session_id": "s", "title": "Nächste"}, wire.SessionUpdate("s", "Nächste")),
    ({"type": "session.close", "session_id": "s"}, wire.SessionClose("s")),
    ({"type": "response.cancel", "session_id": "s"}, wire.ResponseCancel("s")),
    ({"type": "input.typing", "session_id": "s"}, wire.InputTyping("s")),
    ({"type": "ping"}, wire.Ping()),
    ({"type": "authenticate", "ticket": "t"}, wire.Authenticate("t")),
    ({"type": "response.create", "session_id": "s", "temperature": 1, "max_output_tokens": 64, "input": [message(
        {"type": "input_image", "image_url": "data:,"}, text("What?"), {"type": "input_image", "file_id": "f"})]},
     wire.ResponseCreate("s", (wire.InputMessage((wire.InputImage("data:,"), wire.InputText("What?"), wire.InputImage(None, "f"))),),
                         max_output_tokens=64, temperature=1.0)),
])
def test_every_documented_frame_is_read(given_, expected):
    """Each client event becomes its dataclass, missing fields their defaults, text or bytes alike."""
    assert decode_frame(json.dumps(given_)) == expected
    assert decode_frame(json.dumps(given_).encode()) == expected


@pytest.mark.parametrize(("raw", "code", "param"), [
    ("", "invalid_json", None), ("{", "invalid_json", None), ("[]", "invalid_json", None), ("null", "invalid_json", None),
    ("3", "invalid_json", None), ('{"type":"ping"} x', "invalid_json", None), ("\ufeff{}", "invalid_json", None),
    ("{}", "unknown_type", "type"), ('{"type":"nope"}', "unknown_type", "type"), ('{"type":3}', "unknown_type", "type"),
    ('{"type":["ping"]}', "unknown_type", "type"), ('{"type":"ping","type":"ping"}', "duplicate_field", "type"),
    ('{"type":"ping","x":1}', "unknown_field", "x"), ('{"type":"ping","event_id":3}', "wrong_type", "event_id"),
    ('{"type":"session.create","session":{"maxTurns":1}}', "unknown_field", "session.maxTurns"),
    ('{"type":"session.create","session":{"budgets":{"tokens":1,"tokens":2}}}', "duplicate_field", "tokens"),
    ('{"type":"session.create","session":{"max_turns":"5"}}', "wrong_type", "session.max_turns"),
    ('{"type":"session.create","session":{"max_turns":true}}', "wrong_type", "session.max_turns"),
    ('{"type":"session.create","session":{"max_turns":5.0}}', "wrong_type", "session.max_turns"),
    ('{"type":"session.create","session":{"max_turns":0}}', "invalid_value", "session.max_turns"),
    ('{"type":"session.create","session":null}', "wrong_type", "session"),
    ('{"type":"session.resume"}', "missing_field", "session_id"),
    (frame(max_output_tokens=10**30), "invalid_value", None), (frame(max_output_tokens=0), "invalid_value", "max_output_tokens"),
    (frame(temperature=-1), "invalid_value", "temperature"), (frame(top_p=0), "invalid_value", "top_p"),
    (frame(top_p=1.01), "invalid_value", "top_p"), (frame(seed=-1), "invalid_value", "seed"),
    (frame(input=[]), "invalid_value", "input"), (frame(input=[message(text("a")), message(text("b"))]), "invalid_value", "input"),
    (frame(input=[message()]), "invalid_value", "input.0.content"), (frame(input="hi"), "wrong_type", "input"),
    (frame(input=[message({"type": "input_image"})]), "invalid_value", "input.0.content.0"),
    (frame(input=[message({"type": "input_image", "file_id": "f", "image_url": "u"})]), "invalid_value", "input.0.content.0"),
    (frame(input=[message({"type": "input_audio"})]), "unknown_type", "input.0.content.0.type"),
    (frame(input=[message(text("a"), {"type": "input_image", "file_id": 3})]), "wrong_type", "input.0.content.1.file_id"),
    (frame(input=[message({"type": "input_image", "file_id": "f", "text": "x"})]), "unknown_field", "input.0.content.0.text"),
    (frame(input=[message({"type": "input_text"})]), "missing_field", "input.0.content.0.text"),
    (frame(input=[{"role": "system", "content": [text("x")]}]), "wrong_type", "input.0.role"),
    (frame(idempotency_key="k" * 257), "invalid_value", "idempotency_key"),
    ('{"type":"ping","event_id":NaN}', "invalid_json", None), (frame()[:-1] + ',"temperature":1e999}', "invalid_value", None),
    (frame()[:-1] + ',"temperature":-Infinity}', "invalid_json", None),
    ('{"type":"session.update","session_id":"s","title":"\\ud800"}', "invalid_value", None),
    ('{"type":"ping","\\ud800":1}', "invalid_value", None),
    ('{"type":"session.update","session_id":"s","title":"\ud800"}', "invalid_value", None),
    ('{"type":"ping","x":' + "[" * 50 + "]" * 50 + "}", "too_deep", None),
    ('{"type":"ping","x":' + "[" * 200_000 + "]" * 200_000 + "}", "too_deep", None),
    ('{"type":"ping","x":' + '{"a":' * 200_000, "too_deep", None),
    ('{"type":"ping","x":' + "9" * 5000 + "}", "invalid_value", None),
])
def test_what_is_no_frame_is_refused_with_code_and_field(raw, code, param):
    """Bad JSON, unknown or missing fields, wrong types and impossible values each name what is wrong and where."""
    error = refused(raw)
    assert (error.code, error.param) == (code, param)
    assert len(str(error)) < 200


@pytest.mark.parametrize("raw", [b"\xff", b'{"type":"ping","event_id":"\xed\xa0\x80"}', b'{"type":"\xc3'])
def test_bad_utf8_is_told_apart(raw):
    """Bytes that are no UTF-8 raise BadUtf8, which ends a connection."""
    with pytest.raises(BadUtf8) as caught:
        decode_frame(raw)
    assert caught.value.code == "invalid_utf8"


def test_a_refusal_carries_the_frames_event_id_where_it_is_one():
    """A client can match the refusal; an event_id that is no short text is left out."""
    assert refused('{"type":"nope","event_id":"c7"}').event_id == "c7"
    assert refused('{"type":"ping","x":1,"event_id":"c7"}').event_id == "c7"
    assert refused(frame(top_p=2, event_id="c8")).event_id == "c8"
    assert refused('{"type":"nope","event_id":7}').event_id is None
    assert refused(json.dumps({"type": "nope", "event_id": "c" * 300})).event_id is None


@pytest.mark.parametrize("raw", [
    frame(input=[message({"type": "input_image", "image_url": SECRET, "file_id": SECRET})]), frame(input=SECRET), frame(**{SECRET: 1}),
    frame(max_output_tokens=SECRET), frame(input=[message(text([SECRET]))]), json.dumps({"type": SECRET}), '{"a": "' + SECRET,
    frame(input=[message({"type": SECRET})]), '{"' + SECRET + '":1,"' + SECRET + '":2}', frame(input=[{"role": SECRET, "content": []}]),
])
def test_a_refusal_never_repeats_what_was_sent(raw):
    """Neither message nor param holds the client's content, wherever it stood."""
    error = refused(raw)
    assert SECRET not in str(error) and SECRET not in str(error.param) and error.__cause__ is None
    assert SECRET not in repr(error)


json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["ping", "response.create", "input_text"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["type", "session", "session_id", "input", "content", "event_id", "text", "role", "max_turns"]) | st.text(), inner, max_size=4),
    max_leaves=20)


@given(json_trees | st.fixed_dictionaries({"type": st.sampled_from(["ping", "response.create", "session.create"])}, optional={
    "input": json_trees, "session": json_trees, "session_id": json_trees, "event_id": json_trees}))
def test_any_json_is_a_frame_or_a_bad_frame(tree):
    """No JSON value raises anything else."""
    try:
        assert decode_frame(json.dumps(tree)).type
    except BadFrame as error:
        assert error.code and str(error)


@given(st.text() | st.binary())
def test_any_text_or_bytes_are_a_frame_or_a_bad_frame(raw):
    """No message raises anything else, surrogates and broken UTF-8 included."""
    with pytest.raises(BadFrame):
        decode_frame(raw)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_texts_arrive_as_they_were_sent(value):
    """Every character survives, NUL and emoji too, escaped or not."""
    for escaped in (True, False):
        raw = json.dumps({"type": "response.create", "session_id": "s", "input": [message(text(value))]}, ensure_ascii=escaped)
        assert decode_frame(raw).input[0].content[0].text == value


def test_rest_bodies_are_read_by_their_type():
    """Plain dataclasses, a dict of limits and either form of input; unknown fields are refused there too."""
    assert decode(b"{}", wire.SessionRequest) == wire.SessionRequest()
    assert decode(b'{"max_turns": 3, "host_bytes": null}', dict[str, int | None]) == {"max_turns": 3, "host_bytes": None}
    assert decode(b'{"input": "hi"}', codec.RestResponse).input == "hi"
    assert decode(frame().replace('"type": "response.create", "session_id": "s", ', ""), codec.RestResponse).input[0].content[0].text == "hi"
    assert decode(b'{"to": "storage"}', codec.SpillBody).to == "storage"
    assert refused(b'{"to": "device"}', codec.SpillBody).param == "to"
    assert refused(b'{"instruction": ""}', wire.SessionRequest).code == "unknown_field"
    assert refused(b'{"seconds": -1}', codec.PinBody).param == "seconds"
    assert refused(b'{"input": 3}', codec.RestResponse).param == "input"


def test_events_are_written_with_their_nulls():
    """Dataclasses inside an event become objects, None null, tuples arrays."""
    event = wire.event("response.completed", response=wire.Response("r_1", "completed", output=(
        wire.OutputMessage((wire.OutputText("The shape 🟥"),)),)), seq=4)
    tree = json.loads(codec.encode_event(event))
    assert tree["response"]["output"][0]["content"][0] == {"text": "The shape 🟥", "type": "output_text"}
    assert tree["response"]["previous_response_id"] is None and tree["seq"] == 4
    assert json.loads(codec.encode(event)) == tree and codec.plain(event) == tree


@dataclass
class Holder:
    inner: wire.ErrorObject


def test_plain_gives_what_encode_writes():
    """Nested dataclasses become dicts."""
    assert codec.plain(Holder(wire.ErrorObject("server", "internal_error", "x")))["inner"]["retryable"] is False
