"""The contract of SessionStore, run on every implementation. `Bench.stored` reads behind the store's back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from sessions.errors import BrokenTree, Conflict, Duplicate, SessionNotFound, TurnNotFound
from sessions.memory import MemoryStore
from sessions.model import Limits, SessionStatus, TextPart, Totals, TurnStatus, TurnUsage
from sessions.sqlite import SqliteStore
from sessions.store import SessionStore
from tests.support.conversations import StoredSession, StoredTurn, make_image, make_session, make_turn, peek


@dataclass
class Bench:
    store: SessionStore
    stored: Callable[[str], StoredSession | None]
    now: float = 1000.0


def _in_memory(store: MemoryStore, session_id: str) -> StoredSession | None:
    if session_id not in store._sessions:
        assert session_id not in store._turns
        return None
    turns = [StoredTurn(t.id, t.parent_id, t.input_ids, t.output_ids, []) for t in store._turns[session_id].values()]
    return StoredSession(store._sessions[session_id].head_turn_id, turns)


@pytest.fixture(params=["memory", "sqlite"])
async def bench(request, tmp_path) -> AsyncIterator[Bench]:
    if request.param == "memory":
        memory = MemoryStore(clock=lambda: made.now)
        made = Bench(memory, lambda session_id: _in_memory(memory, session_id))
    else:
        made = Bench(SqliteStore(tmp_path / "s.db", clock=lambda: made.now, power_safe=False),
                     lambda session_id: peek(tmp_path / "s.db", session_id))
    await made.store.open()
    yield made
    await made.store.close()


async def test_what_was_committed_comes_back_equal(bench):
    """A turn with text, image, odd characters, 32-bit ids and every usage figure is read back equal, and is in the file."""
    turn = make_turn("r_1", input_ids=(0, 5, 5, 2**32 - 1), output_ids=(9,), input=(TextPart("é \x00 \u2028 😀"), make_image(1, 2)),
                     usage=TurnUsage(4, 4, 1, 2, 1, 2, 3, 1.5, 2.25), status=TurnStatus.CANCELLED, idempotency_key="k")
    await bench.store.create(make_session())
    session = await bench.store.commit_turn(turn, expected_head=None)
    assert session == make_session(head_turn_id="r_1", updated_at=102.0) == await bench.store.get("s_1")
    assert await bench.store.turns("s_1") == [turn] == [await bench.store.find_by_key("s_1", "k")]
    stored = bench.stored("s_1")
    assert stored.head_turn_id == "r_1"
    assert [(t.input_ids, t.output_ids) for t in stored.turns] == [((0, 5, 5, 2**32 - 1), (9,))]


async def test_branches_share_their_beginning(bench):
    """Two turns after one parent make two branches; each reads back alone, all_turns and totals cover both."""
    store, first = bench.store, make_turn("r_1")
    left, right = make_turn("r_2", first), make_turn("r_3", first, input=(make_image(5, 1), make_image(6, 1)))
    await store.create(make_session())
    await store.commit_turn(first, expected_head=None)
    await store.commit_turn(left, expected_head="r_1")
    await store.commit_turn(right, expected_head="r_2")
    assert await store.turns("s_1") == [first, right]
    assert await store.turns("s_1", head="r_2") == [first, left]
    assert await store.all_turns("s_1") == [first, left, right]
    assert await store.totals("s_1") == Totals(turns=3, tokens=15, images=2)
    assert (await store.set_head("s_1", "r_2")).updated_at == bench.now
    assert await store.turns("s_1") == [first, left]
    await store.set_head("s_1", None)
    assert await store.turns("s_1") == []
    assert await store.totals("s_1") == Totals(turns=3, tokens=15, images=2)


REFUSALS = {
    "unknown session": (SessionNotFound, make_turn("r_9", session_id="s_9"), None),
    "closed session": (SessionNotFound, make_turn("r_9", session_id="s_closed"), None),
    "stale head": (Conflict, make_turn("r_9", make_turn("r_1")), None),
    "taken id": (Conflict, make_turn("r_1", make_turn("r_1")), "r_1"),
    "used key": (Duplicate, make_turn("r_9", make_turn("r_1"), idempotency_key="used"), "r_1"),
    "used key and stale head": (Duplicate, make_turn("r_9", idempotency_key="used"), None),
    "unknown parent": (TurnNotFound, make_turn("r_9", make_turn("r_8")), "r_1"),
    "parent of another session": (TurnNotFound, make_turn("r_9", make_turn("r_other")), "r_1"),
    "wrong index": (BrokenTree, make_turn("r_9", make_turn("r_1"), index=2), "r_1"),
    "root with an index": (BrokenTree, make_turn("r_9", index=1), "r_1"),
    "token id too large": (BrokenTree, make_turn("r_9", make_turn("r_1"), output_ids=(2**32,)), "r_1"),
    "negative token id": (BrokenTree, make_turn("r_9", make_turn("r_1"), input_ids=(-1,)), "r_1"),
}


@pytest.mark.parametrize("why", REFUSALS)
async def test_a_refused_commit_changes_nothing(bench, why):
    """Each refusal raises its own error, leaves file and totals as they were, and the next good turn works."""
    error, turn, expected_head = REFUSALS[why]
    store, first = bench.store, make_turn("r_1", idempotency_key="used")
    for session_id in ("s_1", "s_2", "s_closed"):
        await store.create(make_session(session_id))
    await store.update("s_closed", close=True)
    await store.commit_turn(first, expected_head=None)
    await store.commit_turn(make_turn("r_other", session_id="s_2"), expected_head=None)
    before = [bench.stored(s) for s in ("s_1", "s_2", "s_closed")], await store.get("s_1"), await store.totals("s_1")
    with pytest.raises(error) as refused:
        await store.commit_turn(turn, expected_head=expected_head)
    if error is Duplicate:
        assert refused.value.turn_id == "r_1"
    assert before == ([bench.stored(s) for s in ("s_1", "s_2", "s_closed")], await store.get("s_1"), await store.totals("s_1"))
    await store.commit_turn(make_turn("r_good", first, idempotency_key="other"), expected_head="r_1")
    assert [t.id for t in bench.stored("s_1").turns] == ["r_1", "r_good"]


async def test_of_many_writers_one_wins(bench):
    """Of 20 commits at once on one head exactly one is stored; the others get Conflict; a key runs once likewise."""
    await bench.store.create(make_session())
    commits = [bench.store.commit_turn(make_turn(f"r_{n}"), expected_head=None) for n in range(20)]
    results = await asyncio.gather(*commits, return_exceptions=True)
    assert sum(isinstance(r, Conflict) for r in results) == 19
    stored = bench.stored("s_1")
    assert [t.id for t in stored.turns] == [stored.head_turn_id]
    same = [bench.store.commit_turn(make_turn(f"k_{n}", idempotency_key="k"), expected_head=stored.head_turn_id) for n in range(20)]
    results = await asyncio.gather(*same, return_exceptions=True)
    assert sum(isinstance(r, Duplicate) for r in results) == 19
    assert (await bench.store.totals("s_1")).turns == 2


async def test_keys_and_turn_ids_belong_to_their_session(bench):
    """The same turn id and idempotency key in another session are other things."""
    for session_id in ("s_1", "s_2"):
        await bench.store.create(make_session(session_id))
        await bench.store.commit_turn(make_turn("r_1", session_id=session_id, idempotency_key="k"), expected_head=None)
    assert (await bench.store.find_by_key("s_2", "k")).session_id == "s_2"
    assert await bench.store.find_by_key("s_1", "other") is None is await bench.store.find_by_key("s_9", "k")


async def test_unknown_sessions_and_turns_are_said_to_be(bench):
    """Reading or changing what is not there raises; another tenant's session looks the same; delete of it is silent."""
    store = bench.store
    await store.create(make_session())
    for call in (lambda: store.get("s_9"), lambda: store.get("s_1", tenant_id="other"), lambda: store.turns("s_9"),
                 lambda: store.turns("s_9", head="r_1"), lambda: store.all_turns("s_9"), lambda: store.totals("s_9"),
                 lambda: store.set_head("s_9", None), lambda: store.update("s_9", title="x")):
        with pytest.raises(SessionNotFound):
            await call()
    for call in (lambda: store.turns("s_1", head="r_9"), lambda: store.turns("s_1", head=""), lambda: store.set_head("s_1", "r_9")):
        with pytest.raises(TurnNotFound):
            await call()
    with pytest.raises(Conflict):
        await store.create(make_session(title="second"))
    await store.delete("s_9")
    assert await store.get("s_1", tenant_id="default") == make_session()


async def test_update_changes_what_is_given(bench):
    """Each field changes alone; counters do not move updated_at; closing raises the generation once and for good."""
    store = bench.store
    await store.create(make_session())
    assert await store.update("s_1", bump_epoch=True, bump_generation=True) == make_session(epoch=2, generation=2)
    assert await store.update("s_1", title="") == make_session(epoch=2, generation=2, title="", updated_at=1000.0)
    limits = Limits(tokens_per_session=10, host_bytes=5)
    assert (await store.update("s_1", limits=limits)).limits == limits == (await store.get("s_1")).limits
    for _ in range(2):
        closed = await store.update("s_1", close=True)
        assert (closed.status, closed.generation, closed.limits) == (SessionStatus.CLOSED, 3, limits)
    with pytest.raises(SessionNotFound):
        await store.set_head("s_1", None)
    assert (await store.get("s_1")).status is SessionStatus.CLOSED
    assert await store.list() == []


async def test_list_pages_without_loss(bench):
    """Open sessions of a tenant, newest first, in pages of 2; those that tie with a page's last come with it."""
    times = {"a": 5.0, "b": 4.0, "c": 4.0, "d": 4.0, "e": 3.0, "f": 2.0}
    for session_id, updated_at in times.items():
        await bench.store.create(make_session(session_id, updated_at=updated_at))
    await bench.store.create(make_session("z", tenant_id="other", updated_at=9.0))
    pages, before = [], None
    while page := await bench.store.list(tenant_id="default", limit=2, before=before):
        pages.append([s.id for s in page])
        before = page[-1].updated_at
    assert pages == [["a", "b", "c", "d"], ["e", "f"]]
    assert [s.id for s in await bench.store.list(limit=1)] == ["z"]
    with pytest.raises(ValueError, match="limit is 0"):
        await bench.store.list(limit=0)


async def test_delete_removes_session_and_turns(bench):
    """After a delete nothing of the session is stored, its neighbour is whole, and its id can be used anew."""
    for session_id in ("s_1", "s_2"):
        await bench.store.create(make_session(session_id))
        first = make_turn("r_1", session_id=session_id)
        await bench.store.commit_turn(first, expected_head=None)
        await bench.store.commit_turn(make_turn("r_2", first, session_id=session_id), expected_head="r_1")
    await bench.store.delete("s_1")
    assert bench.stored("s_1") is None
    assert [t.id for t in bench.stored("s_2").turns] == ["r_1", "r_2"]
    await bench.store.create(make_session())
    assert await bench.store.totals("s_1") == Totals()


async def test_api_keys(bench):
    """A key is found by its hash and by nothing else; the same hash again replaces it."""
    assert not await bench.store.has_keys()
    await bench.store.put_key("h1", tenant_id="default", role="user", label="laptop")
    await bench.store.put_key("h1", tenant_id="default", role="admin", label="first key")
    assert await bench.store.find_key("h1") == ("default", "admin", "first key")
    assert await bench.store.find_key("h2") is None
    assert await bench.store.has_keys()


async def test_a_cancelled_commit_is_whole_or_absent(bench):
    """Commits cancelled after any number of steps leave whole turns or none, and never block the next one."""
    await bench.store.create(make_session())
    parent, head = None, None
    for steps in range(0, 40, 2):
        turn = make_turn(f"r_{steps}", parent, input_ids=tuple(range(50)))
        task = asyncio.ensure_future(bench.store.commit_turn(turn, expected_head=head))
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        task.cancel()
        await asyncio.wait([task])
        parent = (await bench.store.turns("s_1") or [None])[-1]
        head = parent.id if parent else None
    last = make_turn("r_last", parent)
    await bench.store.commit_turn(last, expected_head=head)
    stored = bench.stored("s_1")
    assert (stored.head_turn_id, stored.turns[-1].id) == ("r_last", "r_last")
    assert all(t.input_ids == tuple(range(50)) and t.output_ids == (7, 8) for t in stored.turns[:-1])
    assert (await bench.store.totals("s_1")).turns == len(stored.turns)
