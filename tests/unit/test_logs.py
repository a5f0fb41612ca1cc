"""Logs hold ids, counts and reasons; never contents, credentials, or anything that looks like base64."""

import base64
import json
import logging
import random

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from server import logs, wire
from server.logs import clean, configure_logging, redact
from server.settings import LogSettings

KEY = "rk_" + "aB3-" * 10 + "xyz"
CHANCE = random.Random(9)
BASE64 = base64.b64encode(CHANCE.randbytes(300)).decode()


def logged(**event):
    return json.dumps(redact(None, "info", {"event": "something", **event}))


@pytest.mark.parametrize("value", [
    KEY, f"Bearer {KEY}", f"bad key {KEY}!", f"authorization: Bearer {KEY}", f"GET /v1/chat?token={KEY}&x=1", "GET /?ticket=SECRET123 HTTP/1.1",
    "/?a=b&API_KEY=SECRET123", "http://h/#ticket=SECRET123", "Basic U0VDUkVUMTIz", 'key="SECRET123"', '{"token": "SECRET123"}', "rt_SECRET123.ab",
    {"Authorization": "SECRET123"}, {"nested": [{"x-api-key": "SECRET123"}]}, [("a", f"Bearer {KEY}")],
])
def test_credentials_never_reach_a_log(value):
    """In any field, header form, query string or nesting."""
    for text in (logged(reason=value), logged(detail={"inner": value}), json.dumps(redact(None, "info", {"event": str(value)}))):
        assert KEY not in text and "SECRET123" not in text and "U0VDUkVUMTIz" not in text


@pytest.mark.parametrize("name", ["authorization", "Authorization", "cookie", "token", "ticket", "api_key", "page_token", "headers", "secret",
                                  "idempotency_key", "password", "query"])
def test_fields_named_for_a_secret_are_redacted_whatever_they_hold(name):
    """The name alone is enough, at the top and inside."""
    assert "plain words" not in logged(**{name: "plain words"})
    assert "plain words" not in logged(detail={name: ["plain words"]})


@pytest.mark.parametrize("name", ["text", "content", "input", "output_text", "instructions", "image_url", "delta", "prompt", "messages", "title",
                                  "data", "frame", "payload", "parts", "token_ids", "output_ids"])
def test_contents_are_replaced_by_their_size(name):
    """What users and models say never stands in a log; its length may."""
    for value in ("my private words", ["my private words"], {"a": "my private words"}, (wire.InputText("my private words"),)):
        text = logged(**{name: value})
        assert "private" not in text and f"[{len(value)} " in text
        assert "private" not in logged(detail={name: value})


@pytest.mark.parametrize("value", [
    BASE64, f"data:image/png;base64,{BASE64}", f"frame {BASE64} refused", BASE64[:48], base64.urlsafe_b64encode(CHANCE.randbytes(60)).decode(),
    base64.encodebytes(CHANCE.randbytes(200)).decode(), repr(base64.encodebytes(CHANCE.randbytes(200)).decode()),
    "DATA:image/PNG;BASE64," + "\r\n".join(BASE64[i:i + 76] for i in range(0, 400, 76)), "data:;base64,AAAA", "data:image/png;base64,iVBO%2BRw0",
])
def test_nothing_that_looks_like_base64_is_logged(value):
    """Bare, in a sentence, URL-safe, wrapped, escaped or as a data URL: no piece of ten characters survives."""
    body = value.split(",")[-1].replace("frame ", "").replace(" refused", "").replace("\\n", "\n").strip("'")
    for text in (logged(reason=value), json.dumps(redact(None, "info", {"event": value})), logged(detail=[{"a": value}])):
        for line in body.splitlines():
            for at in range(0, max(1, len(line) - 10), 5):
                piece = line[at:at + 10]
                assert len(piece) < 4 or piece not in text, (piece, text)


@given(st.binary(min_size=40, max_size=200))
def test_any_binary_in_base64_is_recognised(data):
    """For any bytes of varied value; a run that could be a plain lower-case word is the exception."""
    text = base64.b64encode(data).decode().rstrip("=")
    if not logs._PLAIN_RUN.fullmatch(text):
        assert text not in logged(reason=f"x {text} y")


@pytest.mark.parametrize("value", [
    "a" * 64, "s_9f8e7d6c5b4a39281706f5e4d3c2b1a0", "r_0123456789abcdef0123456789abcdef", "turn_committed", "max_turns is 50, and this asks for 51",
    "/tmp/data/models/demo/model.safetensors", "tokens_per_session_exceeded_by_more_than_before", "the engine is starting", "2024-05-01T10:00:00Z",
    "http://127.0.0.1:8080", 17, 1.5, None, True,
])
def test_what_operators_need_stays_readable(value):
    """Ids, digests, reasons, paths, addresses and numbers are logged as they are."""
    assert json.loads(logged(detail=value))["detail"] == value


def test_counts_stay_even_under_names_of_contents_and_secrets():
    """input_tokens=5 or images=3 are figures."""
    event = redact(None, "info", {"event": "e", "input_tokens": 5, "images": 3, "prompt_tokens": 7, "token": None, "output": 0})
    assert (event["input_tokens"], event["images"], event["prompt_tokens"], event["output"]) == (5, 3, 7, 0)


def test_objects_bytes_and_long_lists_are_named_not_shown():
    """A frame, bytes, or token ids give their kind and size."""
    frame = wire.ResponseCreate("s", (wire.InputMessage((wire.InputText("private"),)),))
    text = logged(a=frame, b=b"private", c=list(range(500)), d=ValueError("bad " + BASE64), e={"k" * 50: frame})
    assert "private" not in text and "<ResponseCreate>" in text and "[7 bytes]" in text and "[500 items]" in text and "ValueError: bad" in text
    assert len(clean("ab " * 9000)) < 4100


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
                           lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=10)


@given(st.dictionaries(st.text(min_size=1), json_values, max_size=5))
def test_any_event_can_be_logged(event):
    """Redaction never raises, and what it leaves is JSON."""
    json.dumps(redact(None, "info", {"event": "e"} | event), default=None)


@pytest.fixture
def restored_logging():
    root = logging.getLogger()
    before = root.handlers[:], root.level, {name: logging.getLogger(name).level for name in logs.OURS}
    yield
    root.handlers[:], root.level = before[0], before[1]
    for name, level in before[2].items():
        logging.getLogger(name).setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_both_kinds_of_loggers_give_redacted_json_with_the_bound_ids(restored_logging, capsys):
    """structlog's and the standard library's events, tracebacks included, are one JSON line each."""
    configure_logging(LogSettings(level="info", format="json"))
    logs.bind(session_id="s_1", turn_id="r_1")
    structlog.get_logger("server.turns").info("turn_committed", output_tokens=3, text="private")
    logging.getLogger("server.x").warning("key %s and %s", KEY, BASE64)
    try:
        raise ValueError(f"private key {KEY}")
    except ValueError:
        structlog.get_logger("server.y").exception("failed")
        logging.getLogger("uvicorn.error").exception("failed too")
    structlog.get_logger("server.turns").debug("not at this level")
    logging.getLogger("websockets.server").info("< TEXT private")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"].split()[0] for line in lines] == ["turn_committed", "key", "failed", "failed"]
    assert all(line["session_id"] == "s_1" and line["turn_id"] == "r_1" and line["timestamp"] and line["level"] for line in lines)
    assert lines[0]["output_tokens"] == 3 and lines[0]["text"] == "[7 chars]"
    assert "ValueError" in lines[2]["exception"] and "ValueError" in lines[3]["exception"]
    assert KEY not in json.dumps(lines) and BASE64[:40] not in json.dumps(lines)


def test_the_console_form_is_redacted_too(restored_logging, capsys):
    """For people, with the same rules."""
    configure_logging(LogSettings(level="debug", format="console"))
    structlog.get_logger("server.turns").debug("hello", token=KEY, reason="because")
    err = capsys.readouterr().err
    assert "hello" in err and "because" in err and KEY not in err
