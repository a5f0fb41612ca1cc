"""The port of durable storage. Contract suite: `tests/contract/test_session_store.py`, run on every implementation.

Every method is atomic: after a crash at any point its effect is whole or absent. A returned method is durable.
"""

from collections.abc import Sequence
from typing import Protocol

from .model import Limits, Session, Totals, Turn


class SessionStore(Protocol):
    async def open(self) -> None:
        """Create or migrate the schema. Idempotent."""

    async def close(self) -> None: ...

    async def create(self, session: Session) -> None:
        """Raises Conflict if the id exists."""

    async def get(self, session_id: str, *, tenant_id: str | None = None) -> Session:
        """Raises SessionNotFound; with tenant_id, also for another tenant's session."""

    async def list(self, *, tenant_id: str | None = None, limit: int = 100, before: float | None = None) -> Sequence[Session]:
        """Open sessions, most recently updated first; `before` pages by updated_at."""

    async def commit_turn(self, turn: Turn, *, expected_head: str | None) -> Session:
        """Append the turn and make it the head, in one transaction. Returns the session as it is now.

        Raises Conflict if the head is not `expected_head`, Duplicate if the idempotency key is used in the session,
        SessionNotFound if it is gone or closed. Nothing is written then.
        """

    async def turns(self, session_id: str, *, head: str | None = None) -> Sequence[Turn]:
        """The branch that ends in `head` (default: the session's head), first turn first."""

    async def totals(self, session_id: str) -> Totals:
        """Over every committed turn of the session, abandoned branches included."""

    async def find_by_key(self, session_id: str, idempotency_key: str) -> Turn | None: ...

    async def set_head(self, session_id: str, turn_id: str | None) -> Session:
        """Make another turn the head (fork, edit, regenerate). Raises TurnNotFound."""

    async def update(self, session_id: str, *, title: str | None = None, limits: Limits | None = None,
                     bump_epoch: bool = False, bump_generation: bool = False, close: bool = False) -> Session:
        """Change what is given, leave the rest."""

    async def delete(self, session_id: str) -> None:
        """Remove the session and its turns. Unknown ids are ignored."""

    async def put_key(self, key_hash: str, *, tenant_id: str, role: str, label: str) -> None:
        """Store an API key by its hash (never the key)."""

    async def find_key(self, key_hash: str) -> tuple[str, str, str] | None:
        """(tenant_id, role, label), or None."""

    async def has_keys(self) -> bool: ...
