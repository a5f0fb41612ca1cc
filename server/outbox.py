"""PURE. What waits to be sent on one socket: bounded, with adjacent deltas of one response laid together.

Laying together never loses a number: the merged delta carries `from_seq`, the first seq that it holds, beside `seq`,
the last. The engine never waits for a socket: what does not fit makes the reader a slow one.
"""

from collections import deque
from typing import Any

_DELTA = "response.output_text.delta"
MAX_DELTA_CHARS = 64 << 10
"""A merged delta does not grow beyond this."""


class Outbox:
    def __init__(self, max_events: int) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._max_events = max_events

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: dict[str, Any]) -> bool:
        """Queue the event. False: there is no room, and it was not queued."""
        if self._events and _can_merge(self._events[-1], event):
            self._events[-1] = _merge(self._events[-1], event)
            return True
        if len(self._events) >= self._max_events:
            return False
        self._events.append(event)
        return True

    def pop(self) -> dict[str, Any] | None:
        """The oldest event, or None."""
        return self._events.popleft() if self._events else None

    def clear(self) -> None:
        self._events.clear()


def _can_merge(last: dict[str, Any], new: dict[str, Any]) -> bool:
    return (last["type"] == new["type"] == _DELTA and last["session_id"] == new["session_id"]
            and last["response_id"] == new["response_id"] and new["seq"] == last["seq"] + 1
            and len(last["delta"]) + len(new["delta"]) <= MAX_DELTA_CHARS)


def _merge(last: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {**last, "delta": last["delta"] + new["delta"], "seq": new["seq"],
            "from_seq": last.get("from_seq", last["seq"])}
