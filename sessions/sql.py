"""The store over SQLAlchemy Core, for any database that it speaks to. What is particular to one is in a subclass."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from . import migrations, tables
from .changes import changed, check_commit, committed, open_only, page_size, with_head
from .errors import Conflict, SessionNotFound, StoreUnavailable, TurnNotFound
from .model import Limits, Session, SessionStatus, Totals, Turn
from .rows import session_from_row, session_to_row, turn_from_row, turn_to_row

_S, _T, _K = tables.sessions.c, tables.turns.c, tables.api_keys.c


class SqlStore:
    """`clock` gives Unix time in seconds, for `updated_at` where the caller brings no time of its own."""

    def __init__(self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time) -> None:
        self._engine, self._clock = engine, clock
        self._reader = engine.execution_options(read_only=True)

    @asynccontextmanager
    async def _transaction(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        try:
            async with engine.begin() as connection:
                yield connection
        except OperationalError as error:
            raise StoreUnavailable(str(error.orig)) from error

    def _read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that sees one state of the database throughout."""
        return self._transaction(self._reader)

    def _write(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that is committed at its end and rolled back by any exception."""
        return self._transaction(self._engine)

    async def open(self) -> None:
        async with self._write() as connection:
            await connection.run_sync(migrations.migrate)

    async def close(self) -> None:
        await self._engine.dispose()

    # ---- sessions ----------------------------------------------------------------------------------------------
    async def create(self, session: Session) -> None:
        try:
            async with self._write() as connection:
                await connection.execute(tables.sessions.insert().values(session_to_row(session)))
        except IntegrityError as error:
            raise Conflict(f"{session.id} exists") from error

    async def get(self, session_id: str, *, tenant_id: str | None = None) -> Session:
        async with self._read() as connection:
            session = await _session(connection, session_id)
        if tenant_id not in (None, session.tenant_id):
            raise SessionNotFound(session_id)
        return session

    async def list(self, *, tenant_id: str | None = None, limit: int = 100, before: float | None = None) -> Sequence[Session]:
        found = [_S.status == str(SessionStatus.OPEN)]
        if tenant_id is not None:
            found.append(_S.tenant_id == tenant_id)
        if before is not None:
            found.append(_S.updated_at < before)
        page = sa.select(_S.updated_at).where(*found).order_by(_S.updated_at.desc()).limit(page_size(limit)).subquery()
        last = sa.select(sa.func.min(page.c.updated_at)).scalar_subquery()
        query = sa.select(tables.sessions).where(*found, _S.updated_at >= last).order_by(_S.updated_at.desc(), _S.id)
        async with self._read() as connection:
            return [session_from_row(row._asdict()) for row in await connection.execute(query)]

    async def update(self, session_id: str, *, title: str | None = None, limits: Limits | None = None,
                     bump_epoch: bool = False, bump_generation: bool = False, close: bool = False) -> Session:
        async with self._write() as connection:
            session = await _session(connection, session_id, lock=True)
            return await _save(connection, changed(session, self._clock(), title=title, limits=limits, bump_epoch=bump_epoch,
                                                   bump_generation=bump_generation, close=close))

    async def delete(self, session_id: str) -> None:
        # The turns go with it: their foreign key cascades.
        async with self._write() as connection:
            await connection.execute(tables.sessions.delete().where(_S.id == session_id))

    # ---- turns -------------------------------------------------------------------------------------------------
    async def commit_turn(self, turn: Turn, *, expected_head: str | None) -> Session:
        async with self._write() as connection:
            session = await _session(connection, turn.session_id, lock=True)
            check_commit(session, turn, expected_head=expected_head, indexes=await _indexes(connection, turn),
                         key_owner=await _key_owner(connection, turn))
            await connection.execute(tables.turns.insert().values(turn_to_row(turn)))
            return await _save(connection, committed(session, turn))

    async def turns(self, session_id: str, *, head: str | None = None) -> Sequence[Turn]:
        async with self._read() as connection:
            session = await _session(connection, session_id)
            end = session.head_turn_id if head is None else head
            if end is None:
                return []
            link = sa.select(_T.seq, _T.parent_id).where(_T.session_id == session_id, _T.id == end).cte("branch", recursive=True)
            link = link.union_all(sa.select(_T.seq, _T.parent_id).where(_T.session_id == session_id, _T.id == link.c.parent_id))
            found = await _turns(connection, _T.seq.in_(sa.select(link.c.seq)))
            if not found:
                raise TurnNotFound(end)
            return found

    async def all_turns(self, session_id: str) -> Sequence[Turn]:
        async with self._read() as connection:
            await _session(connection, session_id)
            return await _turns(connection, _T.session_id == session_id)

    async def totals(self, session_id: str) -> Totals:
        sums = (sa.func.coalesce(sa.func.sum(column), 0) for column in (_T.counted_tokens, _T.counted_images))
        async with self._read() as connection:
            await _session(connection, session_id)
            row = (await connection.execute(sa.select(sa.func.count(), *sums).where(_T.session_id == session_id))).one()
        return Totals(*(int(value) for value in row))

    async def find_by_key(self, session_id: str, idempotency_key: str) -> Turn | None:
        async with self._read() as connection:
            found = await _turns(connection, _T.session_id == session_id, _T.idempotency_key == idempotency_key)
        return found[0] if found else None

    async def set_head(self, session_id: str, turn_id: str | None) -> Session:
        async with self._write() as connection:
            session = open_only(await _session(connection, session_id, lock=True))
            if turn_id is not None:
                query = sa.select(_T.seq).where(_T.session_id == session_id, _T.id == turn_id)
                if (await connection.execute(query)).first() is None:
                    raise TurnNotFound(turn_id)
            return await _save(connection, with_head(session, turn_id, self._clock()))

    # ---- API keys ----------------------------------------------------------------------------------------------
    async def put_key(self, key_hash: str, *, tenant_id: str, role: str, label: str) -> None:
        row = {"key_hash": key_hash, "tenant_id": tenant_id, "role": role, "label": label}
        async with self._write() as connection:
            await connection.execute(tables.api_keys.delete().where(_K.key_hash == key_hash))
            await connection.execute(tables.api_keys.insert().values(row))

    async def find_key(self, key_hash: str) -> tuple[str, str, str] | None:
        query = sa.select(_K.tenant_id, _K.role, _K.label).where(_K.key_hash == key_hash)
        async with self._read() as connection:
            row = (await connection.execute(query)).first()
        return (row.tenant_id, row.role, row.label) if row else None

    async def has_keys(self) -> bool:
        async with self._read() as connection:
            return (await connection.execute(sa.select(_K.key_hash).limit(1))).first() is not None


async def _session(connection: AsyncConnection, session_id: str, *, lock: bool = False) -> Session:
    """Raises SessionNotFound. `lock` keeps other writers off the row, where the database has row locks."""
    query = sa.select(tables.sessions).where(_S.id == session_id)
    row = (await connection.execute(query.with_for_update() if lock else query)).first()
    if row is None:
        raise SessionNotFound(session_id)
    return session_from_row(row._asdict())


async def _save(connection: AsyncConnection, session: Session) -> Session:
    await connection.execute(tables.sessions.update().where(_S.id == session.id).values(session_to_row(session)))
    return session


async def _indexes(connection: AsyncConnection, turn: Turn) -> dict[str, int]:
    """Of the turn itself and its parent, so far as they are stored."""
    ids = [turn_id for turn_id in (turn.id, turn.parent_id) if turn_id is not None]
    query = sa.select(_T.id, _T.branch_index).where(_T.session_id == turn.session_id, _T.id.in_(ids))
    return {row.id: row.branch_index for row in await connection.execute(query)}


async def _key_owner(connection: AsyncConnection, turn: Turn) -> str | None:
    """The id of the turn that has the same idempotency key."""
    if turn.idempotency_key is None:
        return None
    query = sa.select(_T.id).where(_T.session_id == turn.session_id, _T.idempotency_key == turn.idempotency_key)
    return (await connection.execute(query)).scalar()


async def _turns(connection: AsyncConnection, *where: Any) -> Sequence[Turn]:
    """In the order of their commits; a parent is always before what follows it."""
    query = sa.select(tables.turns).where(*where).order_by(_T.seq)
    return [turn_from_row(row._asdict()) for row in await connection.execute(query)]
