"""What is particular to the SQLite store: its file, its schema, other processes, a full disk."""

import asyncio
import resource
import sqlite3
import stat

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from sessions import migrations, tables
from sessions.errors import Conflict, SchemaTooNew, StoreUnavailable
from sessions.sqlite import SqliteStore
from tests.support.conversations import make_session, make_turn, peek


@pytest.fixture
async def store(tmp_path):
    made = SqliteStore(tmp_path / "deep" / "100%" / "s.db", busy_timeout_s=0.2)
    await made.open()
    await made.create(make_session())
    yield made
    await made.close()


async def test_connections_are_set_for_durability(store):
    """Each pooled connection, not only the first, has WAL, full sync and foreign keys; the file is private to its owner."""
    async with store._read() as one, store._read() as two:
        for connection in (one, two):
            values = [(await connection.exec_driver_sql(f"PRAGMA {p}")).scalar()
                      for p in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")]
            assert values == ["wal", 2, 1, 200]
        assert {stat.S_IMODE(f.stat().st_mode) for f in store.path.parent.iterdir()} == {0o600}


async def test_migrations_make_the_tables_and_take_them_back(tmp_path):
    """The scripts lead to exactly what tables.py says, and down again to nothing; a rolled back migration leaves nothing."""
    engine = sa.create_engine(f"sqlite:///{tmp_path}/m.db", connect_args={"isolation_level": None})
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with engine.connect() as connection:
        migrations.migrate(connection)
        connection.rollback()
        assert sa.inspect(connection).get_table_names() == []
        migrations.migrate(connection)
        connection.commit()
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
        settings = migrations.config()
        settings.attributes["connection"] = connection
        command.downgrade(settings, "base")
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
    engine.dispose()


async def test_a_newer_schema_is_refused(store):
    """A file from a later release is refused by name of both schemas, and not touched."""
    await store.close()
    with sqlite3.connect(store.path) as other:
        other.execute("UPDATE alembic_version SET version_num = '9999'")
    other.close()
    with pytest.raises(SchemaTooNew, match="schema 9999, this release knows 0001"):
        await store.open()
    assert peek(store.path, "s_1") is not None


async def test_opening_twice_at_once_migrates_once(tmp_path):
    """Two stores that open one new file at the same time both succeed."""
    stores = [SqliteStore(tmp_path / "s.db") for _ in range(2)]
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].create(make_session())
    assert await stores[1].get("s_1") == make_session()
    for store in stores:
        await store.close()


async def test_two_stores_on_one_file_agree_on_a_head(tmp_path):
    """Writers with connections of their own: each head is taken by one of them, and nothing is lost."""
    stores = [SqliteStore(tmp_path / "s.db") for _ in range(2)]
    await stores[0].open()
    await stores[0].create(make_session())
    head = None
    for n in range(5):
        parent = (await stores[0].turns("s_1") or [None])[-1]
        commits = (store.commit_turn(make_turn(f"r_{n}_{i}", parent), expected_head=head) for i, store in enumerate(stores))
        results = await asyncio.gather(*commits, return_exceptions=True)
        assert sorted(type(r).__name__ for r in results) == [Conflict.__name__, "Session"]
        head = (await stores[0].get("s_1")).head_turn_id
    assert len(peek(tmp_path / "s.db", "s_1").turns) == 5
    for store in stores:
        await store.close()


async def test_a_locked_file_is_a_retryable_refusal(store):
    """While another process holds the write lock: reads work, a write ends in StoreUnavailable; then the next one works."""
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked") as refused:
        await store.commit_turn(make_turn("r_1"), expected_head=None)
    assert refused.value.retryable
    assert await store.turns("s_1") == []
    other.execute("ROLLBACK")
    other.close()
    await store.commit_turn(make_turn("r_1"), expected_head=None)
    assert [t.id for t in peek(store.path, "s_1").turns] == ["r_1"]


async def test_a_full_disk_loses_nothing(store):
    """A commit that the disk has no room for ends in StoreUnavailable, is not there, and works when there is room."""
    first = make_turn("r_1")
    big = make_turn("r_2", first, input_ids=tuple(range(100_000)))
    await store.commit_turn(first, expected_head=None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(StoreUnavailable):
            await store.commit_turn(big, expected_head="r_1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await store.turns("s_1") == [first]
    await store.commit_turn(big, expected_head="r_1")
    assert [len(t.input_ids) for t in peek(store.path, "s_1").turns] == [3, 100_000]


async def test_a_session_of_5000_turns_is_read_and_deleted(store):
    """A branch much longer than SQLite's recursion of triggers (1000) reads whole and is deleted whole."""
    rows = [("s_1", f"r_{n}", f"r_{n - 1}" if n else None, n) for n in range(5000)]
    with sqlite3.connect(store.path) as other:
        other.executemany("INSERT INTO turns (session_id, id, parent_id, branch_index, status, created_at, finished_at, "
                          "counted_tokens, counted_images, usage, input, output_text, input_ids, output_ids) "
                          "VALUES (?, ?, ?, ?, 'completed', 1, 1, 5, 0, '{}', '[]', '', x'', x'')", rows)
    other.close()
    assert [t.index for t in await store.turns("s_1", head="r_4999")] == list(range(5000))
    await store.delete("s_1")
    assert peek(store.path, "s_1") is None
