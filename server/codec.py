"""JSON <-> the dataclasses of `wire.py`. Whatever comes in is a frame or a BadFrame; nothing is coerced, nothing is ignored.

Refusals name the field and what it should be; they never repeat what was sent.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from . import wire

MAX_DEPTH = 32
MAX_INTEGER = 2**53 - 1
"""What every JSON reader holds exactly."""
MAX_VALUES = 10_000
"""Members of all lists and objects in one frame or body: far above what a message needs, and read in no time."""
MAX_ID_CHARS = 256
MAX_TITLE_CHARS = 500


class BadFrame(Exception):
    """The client's text is not what the protocol asks for; nothing was changed. `param` is the path of the field."""

    def __init__(self, code: str, message: str, param: str | None = None, event_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param, self.event_id = code, param, event_id


class BadUtf8(BadFrame):
    """Not text at all: the connection cannot go on."""


# ---- bodies of REST calls that are not frames ------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Rename:
    title: str


@dataclass(frozen=True, slots=True)
class RestResponse:
    """response.create without its session id; `input` may be plain text."""

    input: str | tuple[wire.InputMessage, ...]
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    previous_response_id: str | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class SpillBody:
    to: Literal["host", "storage"] = "host"


@dataclass(frozen=True, slots=True)
class PinBody:
    seconds: float


# ---- in --------------------------------------------------------------------------------------------------------
def decode_frame(text: str | bytes) -> wire.ClientFrame:
    """One WebSocket message. Raises BadFrame (with the frame's own event_id where it can be read)."""
    return decode(text, wire.ClientFrame)


def decode(text: str | bytes, kind: Any) -> Any:
    """JSON as that type: a dataclass, a union of frames, or a plain type. Raises BadFrame."""
    text = _text(text)
    tree = _parse(text)
    event_id = tree.get("event_id")
    event_id = event_id if isinstance(event_id, str) and len(event_id) <= MAX_ID_CHARS else None
    try:
        _check_tree(tree)
        value = _adapter(kind).validate_json(text)
        _check_meaning(value)
    except ValidationError as error:
        raise _explain(error, event_id) from None           # pydantic's own text repeats the input
    except BadFrame as error:
        error.event_id = event_id
        raise
    return value


def _text(text: str | bytes) -> str:
    if isinstance(text, bytes | bytearray):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise BadUtf8("invalid_utf8", f"the bytes are not UTF-8 from byte {error.start} on") from None
    return text


_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def _parse(text: str) -> dict[str, Any]:
    """With the standard library, which tells of repeated keys; the typed parse follows."""
    values = 1 + _STRINGS.sub("", text).count(",")
    if values > MAX_VALUES:
        raise BadFrame("too_many_values", f"{values} values in one body; the most is {MAX_VALUES}")
    try:
        tree = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except BadFrame:
        raise
    except RecursionError:
        raise BadFrame("too_deep", f"nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise BadFrame("invalid_json", f"not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:                                      # an integer of thousands of digits
        raise BadFrame("invalid_value", "a number is too large") from None
    if not isinstance(tree, dict):
        raise BadFrame("invalid_json", "a JSON object is expected")
    return tree


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise BadFrame("duplicate_field", "a field stands twice in one object", _name(twice))
    return out


def _no_constant(name: str) -> Any:
    raise BadFrame("invalid_json", f"{name} is not JSON")


def _check_tree(tree: Any) -> None:
    """Depth, numbers and characters, without recursion."""
    stack: list[tuple[Any, int]] = [(tree, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise BadFrame("too_deep", f"nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            stack += ((v, depth + 1) for pair in value.items() for v in pair)
        elif isinstance(value, list):
            stack += ((v, depth + 1) for v in value)
        elif isinstance(value, str):
            if not value.isascii() and _has_surrogate(value):
                raise BadFrame("invalid_value", "a text holds half a surrogate pair")
        elif isinstance(value, float) and not math.isfinite(value):
            raise BadFrame("invalid_value", "a number is too large")
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise BadFrame("invalid_value", f"an integer is beyond {MAX_INTEGER}")


def _has_surrogate(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


_STRICT = ConfigDict(extra="forbid", strict=True)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind is wire.ClientFrame:
        return TypeAdapter(Annotated[kind, Field(discriminator="type")], config=_STRICT)
    # With None, which _parse has excluded: pydantic takes no config beside a bare dataclass.
    return TypeAdapter(kind | None, config=_STRICT)


def _explain(error: ValidationError, event_id: str | None) -> BadFrame:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # A part whose `type` fits one branch of a union is judged by that branch alone.
    others = dict.fromkeys(e["loc"][:-1] for e in errors if e["type"] == "literal_error" and e["loc"][-1] == "type")
    fitting = [e for e in errors if not any(e["loc"][:end] in others for end in range(len(e["loc"]) + 1))]
    if not fitting:
        part = ".".join((*_path(next(iter(others))[:-1]), "type"))
        return BadFrame("unknown_type", f"{part} is not one that the protocol knows", part, event_id)
    first = fitting[0]
    path = ".".join(_path(first["loc"])) or None
    match first["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return BadFrame("unknown_field", f"there is no field {path}", path, event_id)
        case "missing":
            return BadFrame("missing_field", f"{path} is missing", path, event_id)
        case "union_tag_invalid" | "union_tag_not_found":
            tag = ".".join((*_path(first["loc"]), "type"))
            return BadFrame("unknown_type", f"{tag} is not one that the protocol knows", tag, event_id)
        case kind:
            expected = kind.removesuffix("_type").removesuffix("_parsing").replace("_", " ")
            return BadFrame("wrong_type", f"{path or 'the body'} is not of the right type (expected: {expected})", path, event_id)


_UNION_BRANCH = re.compile(r"[a-z]+\.[a-z._]+|ping|authenticate|str|tuple\[.*|[A-Z][A-Za-z]+")


def _path(loc: tuple[str | int, ...]) -> Iterator[str]:
    """Field names and positions. pydantic puts the names of a union's branches between them."""
    for step in loc:
        if isinstance(step, int):
            yield str(step)
        elif not _UNION_BRANCH.fullmatch(step):
            yield _name(step)


def _name(key: str) -> str:
    """A field's name as the client wrote it, if it looks like one."""
    return key if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,39}", key) else "(a name that is none)"


# ---- what types alone do not say -------------------------------------------------------------------------------
_LEAST = {"max_output_tokens": 1, "max_turns": 1, "temperature": 0, "seed": 0, "seconds": 0, "last_seq": 0, "epoch": 0,
          "tokens": 1, "turn_tokens": 1, "images_per_message": 0, "device_bytes": 1, "host_bytes": 1, "storage_bytes": 1}
_MOST = {"temperature": 100, "top_p": 1}
_CHARS = {"event_id": MAX_ID_CHARS, "session_id": MAX_ID_CHARS, "response_id": MAX_ID_CHARS, "previous_response_id": MAX_ID_CHARS,
          "idempotency_key": MAX_ID_CHARS, "file_id": MAX_ID_CHARS, "ticket": MAX_ID_CHARS, "title": MAX_TITLE_CHARS}


def _check_meaning(value: Any, path: str = "") -> None:
    """Ranges, lengths, and what a message must hold. Raises BadFrame."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            _check_meaning(part, f"{path}.{i}")
        return
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is None:
        return
    for name in fields:
        here = f"{path}.{name}".removeprefix(".")
        field = getattr(value, name)
        if isinstance(field, int | float) and not isinstance(field, bool):
            _check_range(here, name, field)
        elif isinstance(field, str) and len(field) > _CHARS.get(name, len(field)):
            raise BadFrame("invalid_value", f"{here} has {len(field)} characters; the most is {_CHARS[name]}", here)
        else:
            _check_meaning(field, here)
    if isinstance(value, wire.InputImage) and (value.image_url is None) == (value.file_id is None):
        raise BadFrame("invalid_value", f"{path} needs exactly one of image_url and file_id", path)
    if isinstance(value, wire.InputMessage) and not value.content:
        raise BadFrame("invalid_value", f"{path}.content is empty", f"{path}.content")
    if isinstance(value, wire.ResponseCreate | RestResponse) and isinstance(value.input, tuple) and len(value.input) != 1:
        raise BadFrame("invalid_value", f"input holds {len(value.input)} messages; a turn is exactly one", "input")


def _check_range(path: str, name: str, number: float) -> None:
    least, most = _LEAST.get(name), _MOST.get(name)
    if (least is not None and number < least) or (most is not None and number > most) or (name == "top_p" and number <= 0):
        bounds = "above 0, at most 1" if name == "top_p" else f"at least {least}" + (f", at most {most}" if most is not None else "")
        raise BadFrame("invalid_value", f"{path} must be {bounds}", path)


# ---- out -------------------------------------------------------------------------------------------------------
def encode(value: Any) -> bytes:
    """Dataclasses, dicts, lists and what JSON knows. None stays null."""
    return orjson.dumps(value)


def encode_event(event: dict[str, Any]) -> str:
    """An event as the text of one WebSocket message."""
    return orjson.dumps(event).decode()


def plain(value: Any) -> Any:
    """A dataclass as the JSON tree that `encode` makes of it."""
    return orjson.loads(orjson.dumps(value))
