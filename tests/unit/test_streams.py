"""Streams of sessions in use: numbering, watchers, epochs."""

import time

from server.streams import Origin, Streams
from server.wire import event
from sessions.memory import MemoryStore
from sessions.model import Limits, Session, SessionStatus
from sessions.stream import Resume


class Ear:
    def __init__(self) -> None:
        self.heard: list[dict] = []

    def deliver(self, event: dict) -> None:
        self.heard.append(event)

    def replay(self, events: list[dict]) -> None:
        self.heard.extend(events)


async def session_in(store: MemoryStore, session_id: str = "s_1") -> Session:
    now = time.time()
    session = Session(session_id, "default", "me", SessionStatus.OPEN, "", "", Limits(), 1, 1, None, now, now)
    await store.create(session)
    return session


async def test_all_watchers_hear_the_same_numbers_and_only_the_asker_its_event_id() -> None:
    """event_id is laid on the copy of whoever asked; it is not in the log."""
    store = MemoryStore()
    streams = Streams(store, replay_events=10)
    streams.begin(await session_in(store))
    a, b = Ear(), Ear()
    streams.attach("s_1", a)
    streams.attach("s_1", b)
    streams.publish("s_1", event("session.closed"), Origin(a, "e1"))
    assert [e["seq"] for e in a.heard] == [e["seq"] for e in b.heard] == [1]
    assert a.heard[0]["event_id"] == "e1" and "event_id" not in b.heard[0]
    epoch, replay = await streams.replay("s_1", 1, 0)
    assert epoch == 1 and [n.event for n in replay.events] == b.heard


async def test_a_stream_begun_anew_has_a_higher_epoch() -> None:
    """After a restart an old position is answered by a snapshot, not by other events of the same number."""
    store = MemoryStore()
    session = await session_in(store)
    first = Streams(store, replay_events=10)
    first.begin(session)
    first.publish("s_1", event("session.closed"))
    restarted = Streams(store, replay_events=10)
    epoch, replay = await restarted.replay("s_1", 1, 1)
    assert epoch == 2 and replay.outcome is Resume.SNAPSHOT and (await store.get("s_1")).epoch == 2


async def test_who_watches_is_told_at_the_first_and_the_last() -> None:
    """`watched` fires on the edges only."""
    store = MemoryStore()
    streams = Streams(store, replay_events=10)
    streams.begin(await session_in(store))
    edges: list[tuple[str, bool]] = []
    streams.watched = lambda session_id, has: edges.append((session_id, has))
    a, b = Ear(), Ear()
    streams.attach("s_1", a)
    streams.attach("s_1", b)
    streams.detach("s_1", a)
    streams.detach("s_1", a)
    streams.detach("s_1", b)
    assert edges == [("s_1", True), ("s_1", False)]


async def test_unwatched_streams_are_forgotten_oldest_first_but_never_a_held_one() -> None:
    """Memory is bounded; a stream with a running turn stays."""
    store = MemoryStore()
    streams = Streams(store, replay_events=10, keep=2)
    for n in range(4):
        await session_in(store, f"s_{n}")
    await streams.hold("s_0")
    for n in range(1, 4):
        await streams.open(f"s_{n}")
    assert streams.publish("s_0", event("session.closed")) is not None
    assert streams.publish("s_1", event("session.closed")) is None
    assert streams.publish("s_3", event("session.closed")) is not None


async def test_nobody_to_tell_is_not_an_error() -> None:
    """An event of a session whose stream is not open is dropped: a later snapshot covers it."""
    assert Streams(MemoryStore(), replay_events=10).publish("s_9", event("session.closed")) is None
