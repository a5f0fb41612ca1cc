"""The port of durable storage. Contract suite: `tests/contract/test_session_store.py`, run on every implementation.

Every method is atomic: after a crash at any point its effect is whole or absent. A returned method is durable; a cancelled
one may or may not have happened (find_by_key tells). Those that take a session id raise SessionNotFound where not said
otherwise; any may raise StoreUnavailable, having changed nothing.
"""

from collections.abc import Sequence
from typing import Protocol

from .model import Limits, Session, Totals, Turn


class SessionStore(Protocol):
    async def open(self) -> None:
        """Create or migrate the schema. Idempotent. Raises SchemaTooNew, and changes nothing then."""

    async def close(self) -> None: ...

    async def create(self, session: Session) -> None:
        """Raises Conflict if the id exists."""

    async def get(self, session_id: str, *, tenant_id: str | None = None) -> Session:
        """Raises SessionNotFound; with tenant_id, also for another tenant's session."""

    async def list(self, *, tenant_id: str | None = None, limit: int = 100, before: float | None = None) -> Sequence[Session]:
        """Open sessions, most recently updated first; `before` pages by updated_at.

        Sessions that tie with the last one of the page come with it, beyond `limit`, so that paging loses none.
        """

    async def commit_turn(self, turn: Turn, *, expected_head: str | None) -> Session:
        """Append the turn to its parent and make it the head, in one transaction. Returns the session as it is now.

        The parent need not be the head (another branch may have been committed meanwhile). Raises, in this order:
        SessionNotFound if the session is gone or closed, Duplicate if the idempotency key is used in it, Conflict if the
        head is not `expected_head` or the turn's id is taken, TurnNotFound for the parent, BrokenTree. Nothing is written then.
        """

    async def turns(self, session_id: str, *, head: str | None = None) -> Sequence[Turn]:
        """The branch that ends in `head` (default: the session's head), first turn first. Raises TurnNotFound."""

    async def all_turns(self, session_id: str) -> Sequence[Turn]:
        """Every committed turn, abandoned branches included, in the order of the commits (for `tree`)."""

    async def totals(self, session_id: str) -> Totals:
        """Over every committed turn of the session, abandoned branches included."""

    async def find_by_key(self, session_id: str, idempotency_key: str) -> Turn | None:
        """The turn that was committed with the key; None also where the session is unknown."""

    async def set_head(self, session_id: str, turn_id: str | None) -> Session:
        """Make another turn the head (fork, edit, regenerate); None: begin anew. Raises TurnNotFound; closed: SessionNotFound."""

    async def update(self, session_id: str, *, title: str | None = None, limits: Limits | None = None,
                     bump_epoch: bool = False, bump_generation: bool = False, close: bool = False) -> Session:
        """Change what is given, leave the rest. Closing also raises the generation, once; it is not undone."""

    async def delete(self, session_id: str) -> None:
        """Remove the session and its turns. Unknown ids are ignored."""

    async def put_key(self, key_hash: str, *, tenant_id: str, role: str, label: str) -> None:
        """Store an API key by its hash (never the key). The same hash again replaces what was said of it."""

    async def find_key(self, key_hash: str) -> tuple[str, str, str] | None:
        """(tenant_id, role, label), or None."""

    async def has_keys(self) -> bool: ...
