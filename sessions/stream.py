"""PURE. A session's numbered event stream: written once, replayable for a while, merged without loss or repetition.

A position is (epoch, seq). Within an epoch events are numbered 1, 2, 3, ... without gaps. Whoever starts a stream anew
(a restarted server, say) must raise the epoch first, durably: the same position must never mean two events.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

E = TypeVar("E")


class Resume(StrEnum):
    """How a reader catches up."""

    LOSSLESS = "lossless"
    """The missed events, each once, in order."""
    RECOVERED = "recovered"
    """What it has is right, but some missed events are gone: a snapshot bridges them."""
    SNAPSHOT = "snapshot"
    """What it has is not of this stream: forget it, take a snapshot."""


@dataclass(frozen=True, slots=True)
class Numbered(Generic[E]):
    seq: int
    event: E


@dataclass(frozen=True, slots=True)
class Replay(Generic[E]):
    outcome: Resume
    reason: str
    """Empty if lossless."""
    events: tuple[Numbered[E], ...]
    """Those missed, if lossless; else none: the snapshot stands for everything up to `seq`."""
    from_seq: int
    """The next seq that the reader gets."""
    seq: int
    """The last one written."""


class EventLog(Generic[E]):
    """The last `capacity` events of one stream."""

    def __init__(self, epoch: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, the least is 1")
        self.epoch, self.seq = epoch, 0
        self._kept: deque[Numbered[E]] = deque(maxlen=capacity)

    @property
    def first_seq(self) -> int:
        """The oldest event still kept; seq + 1 if there is none."""
        return self.seq - len(self._kept) + 1

    def append(self, event: E) -> Numbered[E]:
        self.seq += 1
        self._kept.append(Numbered(self.seq, event))
        return self._kept[-1]

    def since(self, seq: int) -> tuple[Numbered[E], ...]:
        """Those kept with a greater seq (to lay the events of a running turn over a snapshot, say)."""
        return tuple(e for e in self._kept if e.seq > seq)

    def replay(self, epoch: int | None, last_seq: int | None) -> Replay[E]:
        """Catch up a reader whose last event was (epoch, last_seq); (None, None): it has none. Changes nothing."""
        if epoch is None or last_seq is None:
            return self._snapshot(Resume.SNAPSHOT, "no position was given")
        if epoch != self.epoch:
            return self._snapshot(Resume.SNAPSHOT, f"epoch {epoch} is over, this is {self.epoch}")
        if not 0 <= last_seq <= self.seq:
            return self._snapshot(Resume.SNAPSHOT, f"last_seq {last_seq} was never sent, the last is {self.seq}")
        if last_seq + 1 < self.first_seq:
            return self._snapshot(Resume.RECOVERED, f"event {last_seq + 1} is no longer kept, the oldest is {self.first_seq}")
        return Replay(Resume.LOSSLESS, "", self.since(last_seq), last_seq + 1, self.seq)

    def _snapshot(self, outcome: Resume, reason: str) -> Replay[E]:
        return Replay(outcome, reason, (), self.seq + 1, self.seq)


@dataclass(frozen=True, slots=True)
class Gap:
    """Events [first, last] are missing: resume from first - 1. In another epoch nothing is comparable: first > last."""

    first: int
    last: int


class Merge(Generic[E]):
    """A reader's side: takes what arrives, in whatever overlap, and lets each event through once and in order."""

    def __init__(self, epoch: int, last_seq: int = 0) -> None:
        self.epoch, self.last_seq = epoch, last_seq

    def take(self, epoch: int, events: Iterable[Numbered[E]]) -> tuple[tuple[Numbered[E], ...], Gap | None]:
        """(new events, the gap that stopped it). Nothing beyond a gap is kept: the resume brings it again."""
        fresh: list[Numbered[E]] = []
        if epoch != self.epoch:
            return (), Gap(self.last_seq + 1, self.last_seq)
        for numbered in events:
            if numbered.seq <= self.last_seq:
                continue
            if numbered.seq > self.last_seq + 1:
                return tuple(fresh), Gap(self.last_seq + 1, numbered.seq - 1)
            fresh.append(numbered)
            self.last_seq = numbered.seq
        return tuple(fresh), None

    def restart(self, epoch: int, seq: int) -> None:
        """A snapshot as of that position was taken."""
        self.epoch, self.last_seq = epoch, seq
