"""PURE. What waits to be sent on one socket: bounded, and once it is half full with adjacent deltas of one response laid
together.

Laying together never loses a number: the merged delta carries `from_seq`, the first seq that it holds, beside `seq`,
the last. The engine never waits for a socket: what does not fit makes the reader a slow one.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

_DELTA = "response.output_text.delta"
MAX_DELTA_CHARS = 64 << 10
"""A merged delta does not grow beyond this."""


class Outbox:
    def __init__(self, max_events: int) -> None:
        self._events: deque[tuple[dict[str, Any], bool]] = deque()
        self._max_events = max_events
        self._live = 0
        """Queued events that count against the bound."""

    @property
    def replaying(self) -> int:
        """Queued events of replays."""
        return len(self._events) - self._live

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: dict[str, Any]) -> bool:
        """Queue a live event. False: there is no room, and it was not queued."""
        if self._live * 2 >= self._max_events and self._events:
            last, live = self._events[-1]
            if live and _can_merge(last, event):
                self._events[-1] = (_merge(last, event), True)
                return True
        if self._live >= self._max_events:
            return False
        self._events.append((event, True))
        self._live += 1
        return True

    def replay(self, events: Iterable[dict[str, Any]]) -> None:
        """Queue events that a resume brings back. The replay buffer bounds them, so they do not count here;
        whoever calls waits until the replay before is gone."""
        self._events.extend((event, False) for event in events)

    def pop(self) -> dict[str, Any] | None:
        """The oldest event, or None."""
        if not self._events:
            return None
        event, live = self._events.popleft()
        self._live -= live
        return event

    def clear(self) -> None:
        self._events.clear()
        self._live = 0


def _can_merge(last: dict[str, Any], new: dict[str, Any]) -> bool:
    return (last["type"] == new["type"] == _DELTA and last["session_id"] == new["session_id"]
            and last["response_id"] == new["response_id"] and new["seq"] == last["seq"] + 1
            and len(last["delta"]) + len(new["delta"]) <= MAX_DELTA_CHARS)


def _merge(last: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {**last, "delta": last["delta"] + new["delta"], "seq": new["seq"],
            "from_seq": last.get("from_seq", last["seq"])}
