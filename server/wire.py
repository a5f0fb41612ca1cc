"""PURE. The documented protocol: client frames, server events and the objects in them, as frozen dataclasses.

`codec.py` turns JSON into these (unknown fields and wrong types are refused) and events into JSON. Names follow OpenAI's
where one exists. Every event of a session carries `session_id` and `seq`; answers carry the client's `event_id`.
"""

from dataclasses import dataclass
from typing import Any, Literal

SUBPROTOCOL = "rekindle.v1"


# ---- content ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class InputText:
    text: str
    type: Literal["input_text"] = "input_text"


@dataclass(frozen=True, slots=True)
class InputImage:
    """Exactly one of image_url (a data: URL) and file_id (of POST /v1/files)."""

    image_url: str | None = None
    file_id: str | None = None
    type: Literal["input_image"] = "input_image"


@dataclass(frozen=True, slots=True)
class InputMessage:
    content: tuple[InputText | InputImage, ...]
    role: Literal["user"] = "user"
    type: Literal["message"] = "message"


@dataclass(frozen=True, slots=True)
class Budgets:
    """What a session asks for, within the server's limits. None: the server's own."""

    tokens: int | None = None
    turn_tokens: int | None = None
    images_per_message: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    storage_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SessionRequest:
    instructions: str = ""
    title: str = ""
    max_turns: int | None = None
    budgets: Budgets = Budgets()


# ---- client frames ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SessionCreate:
    session: SessionRequest = SessionRequest()
    event_id: str | None = None
    type: Literal["session.create"] = "session.create"


@dataclass(frozen=True, slots=True)
class SessionResume:
    """Attach to a session. Without epoch and last_seq: a snapshot, then live."""

    session_id: str
    epoch: int | None = None
    last_seq: int | None = None
    event_id: str | None = None
    type: Literal["session.resume"] = "session.resume"


@dataclass(frozen=True, slots=True)
class SessionUpdate:
    session_id: str
    title: str
    event_id: str | None = None
    type: Literal["session.update"] = "session.update"


@dataclass(frozen=True, slots=True)
class SessionClose:
    """End the session for good: its KV is dropped on every tier, its transcript stays readable."""

    session_id: str
    event_id: str | None = None
    type: Literal["session.close"] = "session.close"


@dataclass(frozen=True, slots=True)
class ResponseCreate:
    """One message and one turn. previous_response_id: answer after that turn (edit, regenerate), not after the last;
    "root" begins a new branch at the start."""

    session_id: str
    input: tuple[InputMessage, ...]
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    previous_response_id: str | None = None
    idempotency_key: str | None = None
    event_id: str | None = None
    type: Literal["response.create"] = "response.create"


@dataclass(frozen=True, slots=True)
class ResponseCancel:
    session_id: str
    response_id: str | None = None
    event_id: str | None = None
    type: Literal["response.cancel"] = "response.cancel"


@dataclass(frozen=True, slots=True)
class InputTyping:
    """The user is typing: a good moment to bring the session's pages back."""

    session_id: str
    event_id: str | None = None
    type: Literal["input.typing"] = "input.typing"


@dataclass(frozen=True, slots=True)
class Ping:
    event_id: str | None = None
    type: Literal["ping"] = "ping"


@dataclass(frozen=True, slots=True)
class Authenticate:
    """First frame of a browser that could not send a header: a one-time ticket of POST /v1/tickets."""

    ticket: str
    event_id: str | None = None
    type: Literal["authenticate"] = "authenticate"


ClientFrame = (SessionCreate | SessionResume | SessionUpdate | SessionClose | ResponseCreate | ResponseCancel
               | InputTyping | Ping | Authenticate)


# ---- objects in events -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class KvBytes:
    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class CachedTokens:
    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class ResponseUsage:
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_details: CachedTokens = CachedTokens()
    kv_bytes: KvBytes = KvBytes()
    queue_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputText:
    text: str
    type: Literal["output_text"] = "output_text"


@dataclass(frozen=True, slots=True)
class OutputMessage:
    content: tuple[OutputText, ...]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


@dataclass(frozen=True, slots=True)
class Response:
    """A turn as clients see it. status: in_progress, completed, incomplete, cancelled, failed."""

    id: str
    status: str
    previous_response_id: str | None = None
    output: tuple[OutputMessage, ...] = ()
    usage: ResponseUsage | None = None
    incomplete_reason: str | None = None
    receipt: dict[str, Any] | None = None
    """Of the restore this turn needed."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits in force: the session's own over the server's. None: no ceiling."""

    max_turns: int | None = None
    tokens_per_session: int | None = None
    tokens_per_turn: int | None = None
    images_per_message: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    storage_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SessionUse:
    turns: int = 0
    tokens: int = 0
    images: int = 0


@dataclass(frozen=True, slots=True)
class KvEntry:
    """Where the session's pages are. state: hot, warm, cold, restoring, lost, empty."""

    state: str = "empty"
    tokens: int = 0
    """Whole-page tokens of the conversation's KV."""
    device_tokens: int = 0
    device_exclusive_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    bytes: KvBytes = KvBytes()
    pinned_until: float | None = None


@dataclass(frozen=True, slots=True)
class SessionObject:
    id: str
    title: str
    instructions: str
    status: str
    limits: SessionLimits
    used: SessionUse
    kv: KvEntry
    created_at: float
    updated_at: float
    last_response_id: str | None = None
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One turn of the history: what the user sent, what was answered."""

    response_id: str
    previous_response_id: str | None
    status: str
    input: tuple[dict[str, Any], ...]
    """InputText dicts, and {"type": "input_image", "file_id", "width", "height", "tokens"}."""
    output_text: str
    created_at: float
    usage: ResponseUsage | None = None


@dataclass(frozen=True, slots=True)
class FileObject:
    """An accepted image. id: sha256 of what the model sees."""

    id: str
    width: int
    height: int
    tokens: int
    bytes: int
    media_type: str
    notes: tuple[str, ...] = ()
    """What normalisation did, for people: rotated by EXIF, first frame taken, ..."""


@dataclass(frozen=True, slots=True)
class ErrorObject:
    """type: invalid_request, authentication, not_found, conflict, limit_exceeded, overloaded, engine, server."""

    type: str
    code: str
    message: str
    param: str | None = None
    limit: int | None = None
    requested: int | None = None
    retryable: bool = False
    retry_after_ms: int | None = None
    offers: tuple[dict[str, Any], ...] = ()


# ---- server events: (type, payload) ----------------------------------------------------------------------------
SESSION_EVENTS: dict[str, str] = {
    "session.created": "session: SessionObject, epoch",
    "session.updated": "session: SessionObject",
    "session.state": "state, kv: KvEntry",
    "session.spilled": "receipt",
    "session.restored": "receipt",
    "session.closed": "",
    "response.created": "response: Response (in_progress), input: the message's parts as in Item.input",
    "response.progress": "response_id, stage (queued | restoring | prefilling)",
    "response.output_text.delta": "response_id, delta, from_seq (where adjacent deltas were laid together: they are from_seq..seq)",
    "response.completed": "response: Response",
    "response.incomplete": "response: Response",
    "response.failed": "response: Response, error: ErrorObject",
    "budget.warning": "name, limit, used (at 80%)",
    "budget.reached": "name, limit, used",
}
"""Numbered events of a session (seq, no gaps), kept for replay. A cancelled turn ends with response.incomplete,
incomplete_reason "cancelled"."""

CONNECTION_EVENTS: dict[str, str] = {
    "connection.ready": "limits {frame_bytes, ...SessionLimits, image_bytes, image_pixels}, heartbeat_s, engine {state, model}",
    "connection.authenticated": "tenant, role, token (short-lived bearer for REST, where the login was a ticket)",
    "session.resumed": "session_id, epoch, outcome (lossless | recovered | snapshot), from_seq, seq, reason, session, items (every turn), in_progress {response, input, output_text} or null (unless lossless)",
    "engine.state": "engine (starting | ready | restarting | failed), daemon (the same), detail",
    "error": "error: ErrorObject",
    "pong": "",
}
"""Events of one connection only: no seq, not replayed. An error about a session carries its session_id. A response.create
whose idempotency key was used is answered by response.created, .completed or .incomplete without a seq."""


# ---- close codes -----------------------------------------------------------------------------------------------
class Close:
    NORMAL, GOING_AWAY, BAD_UTF8, POLICY, TOO_BIG, RESTART, OVERLOAD = 1000, 1001, 1007, 1008, 1009, 1012, 1013
    SLOW_READER = 4001
    """Reconnect and resume by seq."""
    UNAUTHENTICATED = 4500
    """Do not reconnect with the same credentials."""


def event(type: str, /, **payload: Any) -> dict[str, Any]:
    """An event as a dict, ready for the codec; `seq`, `session_id` and `event_id` are laid on by whoever sends it."""
    if type not in SESSION_EVENTS and type not in CONNECTION_EVENTS:
        raise ValueError(f"{type} is not an event of the protocol")
    return {"type": type, **payload}
