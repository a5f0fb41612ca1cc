"""PURE. What a spill, restore or other KV verb did: one type for frames, REST, CLI, logs and tests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class KvVerb(StrEnum):
    SPILL = "spill"
    """Copy down, then free the upper copy."""
    RESTORE = "restore"
    """Copy up for a waiting turn."""
    PREFETCH = "prefetch"
    """The same, ahead of need."""
    DEMOTE = "demote"
    """Host to storage."""
    DROP = "drop"
    """Forget the KV on every tier; the conversation stays."""
    PIN = "pin"
    """Keep on the device until a time."""


class Outcome(StrEnum):
    DONE = "done"
    PARTIAL = "partial"
    """Less was moved than asked; `reason` says why."""
    NOTHING = "nothing"
    """There was nothing to move."""
    REFUSED = "refused"
    """The state did not allow it (a turn is running, say); nothing was changed."""
    FAILED = "failed"
    """It was tried, and rolled back."""


@dataclass(frozen=True, slots=True)
class Receipt:
    id: str
    verb: KvVerb
    session_id: str
    generation: int
    source: Mapping[str, int] = field(default_factory=dict)
    """Tier -> tokens that came from it. On the wire: `from`."""
    target: str | None = None
    """The tier that they went to; None where they went nowhere (drop). On the wire: `to`."""
    tokens: int = 0
    """Tokens moved (for a spill: freed on the upper tier)."""
    pages: int = 0
    bytes: int = 0
    shared_kept_tokens: int = 0
    """Tokens of this session that stayed, because another session uses them too."""
    ms: float = 0.0
    digest: str = ""
    """Names the content: a chained hash of the tokens (images by their digest) and the fingerprint."""
    outcome: Outcome = Outcome.DONE
    reason: str = ""

    def to_wire(self) -> dict:
        """The documented JSON form."""
        return {
            "id": self.id, "verb": str(self.verb), "session_id": self.session_id, "generation": self.generation,
            "from": dict(self.source), "to": self.target, "tokens": self.tokens, "pages": self.pages, "bytes": self.bytes,
            "shared_kept_tokens": self.shared_kept_tokens, "ms": round(self.ms, 2), "digest": self.digest,
            "outcome": str(self.outcome), "reason": self.reason,
        }
