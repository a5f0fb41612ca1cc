"""The event streams of the sessions in use: numbers events, keeps them for replay, hands them to whoever watches.

A stream lives in memory. When a session's stream is begun anew (after a restart, or because it was not used for long), its
epoch is raised in the store first, so that one position never means two events.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sessions.model import Session
from sessions.store import SessionStore
from sessions.stream import EventLog, Replay

Event = dict[str, Any]


class Watcher(Protocol):
    """A socket, or a REST call that waits for an answer."""

    def deliver(self, event: Event) -> None:
        """Called on the event loop; must neither block nor raise."""

    def replay(self, events: list[Event]) -> None:
        """Events missed, before any that is delivered live."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who caused an event: its copy of the event carries the event_id it asked with; the others' do not."""

    watcher: Watcher
    event_id: str | None


@dataclass(slots=True)
class Stream:
    log: EventLog[Event]
    watchers: set[Watcher] = field(default_factory=set)
    held: int = 0
    """Running turns: a held stream is not forgotten."""


class Streams:
    """`keep`: streams kept in memory without anybody watching. `watched`: told when a session gets its first watcher
    (True) or loses its last (False)."""

    def __init__(self, store: SessionStore, *, replay_events: int, keep: int = 1000) -> None:
        self._store, self._replay_events, self._keep = store, replay_events, keep
        self._streams: OrderedDict[str, Stream] = OrderedDict()
        self._opening = asyncio.Lock()
        self.watched: Callable[[str, bool], None] = lambda _session_id, _has: None

    def begin(self, session: Session) -> Stream:
        """The stream of a session that was just created."""
        stream = self._streams[session.id] = Stream(EventLog(session.epoch, self._replay_events))
        self._forget_oldest()
        return stream

    async def open(self, session_id: str) -> Stream:
        """The stream as it runs, or a new one with a higher epoch. Raises SessionNotFound, StoreUnavailable."""
        async with self._opening:
            stream = self._streams.get(session_id)
            if stream is None:
                stream = self.begin(await self._store.update(session_id, bump_epoch=True))
        self._streams.move_to_end(session_id)
        return stream

    def publish(self, session_id: str, event: Event, origin: Origin | None = None) -> Event | None:
        """Number the event and hand it out. A session whose stream is not open has nobody to tell: None."""
        stream = self._streams.get(session_id)
        if stream is None:
            return None
        numbered = {"type": event["type"], "session_id": session_id, "seq": stream.log.seq + 1, **event}
        stream.log.append(numbered)
        for watcher in tuple(stream.watchers):
            if origin is not None and origin.event_id is not None and watcher is origin.watcher:
                watcher.deliver({**numbered, "event_id": origin.event_id})
            else:
                watcher.deliver(numbered)
        return numbered

    async def hold(self, session_id: str) -> Stream:
        """Open it and keep it until `release`, watched or not."""
        stream = await self.open(session_id)
        stream.held += 1
        return stream

    def release(self, session_id: str) -> None:
        if session_id in self._streams:
            self._streams[session_id].held -= 1
            self._forget_oldest()

    def attach(self, session_id: str, watcher: Watcher) -> None:
        """From now on the watcher gets every event of the (open) stream."""
        stream = self._streams[session_id]
        stream.watchers.add(watcher)
        if len(stream.watchers) == 1:
            self.watched(session_id, True)

    def detach(self, session_id: str, watcher: Watcher) -> None:
        """Not attached: nothing happens."""
        stream = self._streams.get(session_id)
        if stream is None or watcher not in stream.watchers:
            return
        stream.watchers.discard(watcher)
        if not stream.watchers:
            self.watched(session_id, False)
        self._forget_oldest()

    def is_watched(self, session_id: str) -> bool:
        return session_id in self._streams and bool(self._streams[session_id].watchers)

    async def replay(self, session_id: str, epoch: int | None, last_seq: int | None) -> tuple[int, Replay[Event]]:
        """(epoch of the stream, what a reader at that position missed)."""
        stream = await self.open(session_id)
        return stream.log.epoch, stream.log.replay(epoch, last_seq)

    def forget(self, session_id: str) -> None:
        """The session is gone; its watchers hear nothing more."""
        self._streams.pop(session_id, None)

    def _forget_oldest(self) -> None:
        idle = [sid for sid, s in self._streams.items() if not s.watchers and not s.held] if len(
            self._streams) > self._keep else []
        for session_id in idle[:len(self._streams) - self._keep]:
            del self._streams[session_id]
