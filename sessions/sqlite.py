"""The store in one SQLite file, for one server (other processes may read it, and write it briefly)."""

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from .sql import SqlStore

BUSY_TIMEOUT_S = 10.0
"""How long a transaction waits for another process's before it ends in StoreUnavailable."""

# WAL: readers never wait for the writer. A process that is killed loses nothing that it had handed to the system, whatever
# `synchronous` says; a machine that loses power does: in WAL mode NORMAL syncs at checkpoints only, so the last commits may
# be gone (the file stays sound). An acknowledged turn must outlive that too, so FULL: one sync a commit, which next to the
# seconds that a turn takes is nothing. foreign_keys is off in SQLite unless each connection asks.
def _pragmas(power_safe: bool) -> tuple[str, ...]:
    return ("PRAGMA journal_mode=WAL", f"PRAGMA synchronous={'FULL' if power_safe else 'NORMAL'}", "PRAGMA foreign_keys=ON")


def _patiently(cursor: Any, pragma: str, timeout_s: float) -> None:
    """A new file becomes a WAL file under a lock for which SQLite does not wait, whatever its busy timeout says."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            cursor.execute(pragma)
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.005)                        # the other connection has a thread of its own


def sqlite_engine(path: Path, *, busy_timeout_s: float = BUSY_TIMEOUT_S, power_safe: bool = True) -> AsyncEngine:
    """Connections to the file, with transactions that begin when they say so."""
    # Without isolation_level=None the driver begins transactions by itself, late: one that reads first and writes then can
    # find that another writer was in between, and fails at once instead of waiting.
    engine = create_async_engine(sa.URL.create("sqlite+aiosqlite", database=str(path)),
                                 connect_args={"isolation_level": None, "timeout": busy_timeout_s}, pool_size=4)

    @sa.event.listens_for(engine.sync_engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for pragma in _pragmas(power_safe):
            _patiently(cursor, pragma, busy_timeout_s)
        cursor.close()

    @sa.event.listens_for(engine.sync_engine, "begin")
    def begin(connection: sa.Connection) -> None:
        read_only = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


class SqliteStore(SqlStore):
    """`power_safe=False`: the last commits may be lost with the machine's power, though never by a kill; for tests, mostly."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, busy_timeout_s: float = BUSY_TIMEOUT_S,
                 power_safe: bool = True) -> None:
        super().__init__(sqlite_engine(path, busy_timeout_s=busy_timeout_s, power_safe=power_safe), clock=clock)
        self.path = path
        self._writer = asyncio.Lock()

    async def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Conversations are private: SQLite gives the files beside it (-wal, -shm) this one's permissions.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        await super().open()

    @asynccontextmanager
    async def _write(self) -> AsyncIterator[AsyncConnection]:
        # SQLite has one writer at a time and waits by polling; within the process a queue is fairer and quicker.
        async with self._writer, super()._write() as connection:
            yield connection
