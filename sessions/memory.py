"""The reference store: dicts. What it does is what every other store must do, durability apart."""

import time
from collections.abc import Callable, Sequence

from . import tree
from .changes import changed, check_commit, committed, open_only, page_size, with_head
from .errors import Conflict, SessionNotFound, TurnNotFound
from .model import Limits, Session, SessionStatus, Totals, Turn
from .rows import counted


class MemoryStore:
    """No method awaits anything, so each is atomic."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._turns: dict[str, dict[str, Turn]] = {}
        self._keys: dict[str, tuple[str, str, str]] = {}

    async def open(self) -> None:
        """Nothing to migrate."""

    async def close(self) -> None:
        """Keeps everything: it may be opened again."""

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise SessionNotFound(session_id)
        return self._sessions[session_id]

    def _save(self, session: Session) -> Session:
        self._sessions[session.id] = session
        return session

    async def create(self, session: Session) -> None:
        if session.id in self._sessions:
            raise Conflict(f"{session.id} exists")
        self._save(session)
        self._turns[session.id] = {}

    async def get(self, session_id: str, *, tenant_id: str | None = None) -> Session:
        session = self._session(session_id)
        if tenant_id not in (None, session.tenant_id):
            raise SessionNotFound(session_id)
        return session

    async def list(self, *, tenant_id: str | None = None, limit: int = 100, before: float | None = None) -> Sequence[Session]:
        found = [s for s in self._sessions.values() if s.status is SessionStatus.OPEN and tenant_id in (None, s.tenant_id)
                 and (before is None or s.updated_at < before)]
        found.sort(key=lambda s: (-s.updated_at, s.id))
        page = found[:page_size(limit)]
        return page + [s for s in found[limit:] if s.updated_at == page[-1].updated_at]

    async def update(self, session_id: str, *, title: str | None = None, limits: Limits | None = None,
                     bump_epoch: bool = False, bump_generation: bool = False, close: bool = False) -> Session:
        return self._save(changed(self._session(session_id), self._clock(), title=title, limits=limits, bump_epoch=bump_epoch,
                                  bump_generation=bump_generation, close=close))

    async def delete(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._turns.pop(session_id, None)

    async def commit_turn(self, turn: Turn, *, expected_head: str | None) -> Session:
        session = self._session(turn.session_id)
        stored = self._turns[session.id]
        same_key = None if turn.idempotency_key is None else await self.find_by_key(session.id, turn.idempotency_key)
        check_commit(session, turn, expected_head=expected_head, indexes={t.id: t.index for t in stored.values()},
                     key_owner=same_key.id if same_key else None)
        stored[turn.id] = turn
        return self._save(committed(session, turn))

    async def turns(self, session_id: str, *, head: str | None = None) -> Sequence[Turn]:
        session = self._session(session_id)
        end = session.head_turn_id if head is None else head
        return [] if end is None else list(tree.path(await self.all_turns(session_id), end))

    async def all_turns(self, session_id: str) -> Sequence[Turn]:
        self._session(session_id)
        return list(self._turns[session_id].values())

    async def totals(self, session_id: str) -> Totals:
        counts = [counted(turn) for turn in await self.all_turns(session_id)]
        return Totals(len(counts), sum(c.tokens for c in counts), sum(c.images for c in counts))

    async def find_by_key(self, session_id: str, idempotency_key: str) -> Turn | None:
        stored = self._turns.get(session_id, {}).values()
        return next((turn for turn in stored if turn.idempotency_key == idempotency_key), None)

    async def set_head(self, session_id: str, turn_id: str | None) -> Session:
        session = open_only(self._session(session_id))
        if turn_id is not None and turn_id not in self._turns[session_id]:
            raise TurnNotFound(turn_id)
        return self._save(with_head(session, turn_id, self._clock()))

    async def put_key(self, key_hash: str, *, tenant_id: str, role: str, label: str) -> None:
        self._keys[key_hash] = (tenant_id, role, label)

    async def find_key(self, key_hash: str) -> tuple[str, str, str] | None:
        return self._keys.get(key_hash)

    async def has_keys(self) -> bool:
        return bool(self._keys)
