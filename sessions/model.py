"""PURE. What a conversation is: frozen records, no behaviour beyond reading them.

A session is a tree of turns. Each turn holds only what it added to its parent: the new prompt tokens (template text,
user text, image placeholders) and the generated tokens. A branch's token sequence is the concatenation from the root.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class SessionStatus(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class TurnStatus(StrEnum):
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    """Ended by a length limit; the answer is kept."""
    CANCELLED = "cancelled"
    """Stopped by the user after at least one token; what was seen is kept, marked."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings of one session; None is no ceiling. Unit in the name."""

    max_turns: int | None = None
    tokens_per_session: int | None = None
    """Input and output tokens over all committed turns (each turn counts what it added)."""
    tokens_per_turn: int | None = None
    """Input added by the turn + the most it may answer."""
    images_per_message: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    storage_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """`start` is the image's first token, counted from the start of the branch's whole sequence."""

    digest: str
    width: int
    height: int
    grid: tuple[int, int, int]
    tokens: int
    start: int


Part = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Of one committed turn. input_tokens is the whole prompt; added_tokens what this turn added to it."""

    input_tokens: int = 0
    added_tokens: int = 0
    output_tokens: int = 0
    image_tokens: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    cached_storage_tokens: int = 0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One committed user input and its answer. Immutable."""

    id: str
    session_id: str
    parent_id: str | None
    index: int
    """0 for the first turn of its branch."""
    status: TurnStatus
    input: tuple[Part, ...]
    output_text: str
    input_ids: tuple[int, ...]
    """Tokens this turn appended to its parent's sequence before generating."""
    output_ids: tuple[int, ...]
    """Generated tokens, an end-of-turn token included where one was sampled."""
    usage: TurnUsage
    created_at: float
    """Unix time, seconds."""
    finished_at: float
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    tenant_id: str
    owner_id: str
    status: SessionStatus
    title: str
    instructions: str
    """The system message; empty: the model template's own."""
    limits: Limits
    """As asked at creation or set by an admin; the server's defaults are laid under it when it is enforced."""
    epoch: int
    """Of its event stream; rises when the stream starts anew."""
    generation: int
    """Incarnation of its KV; rises when the KV is dropped or the session closed, so that late results are told apart."""
    head_turn_id: str | None
    """The last turn of the current branch."""
    created_at: float
    updated_at: float
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the committed turns of a session."""

    turns: int = 0
    tokens: int = 0
    """added_tokens + output_tokens over all turns."""
    images: int = 0
