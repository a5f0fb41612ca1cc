"""PURE. Where a client stands in a session's event stream, and what of a new event it has not seen yet."""

from dataclasses import dataclass
from typing import Any


class Gap(Exception):
    """Events are missing between what was seen and this one: resume."""


@dataclass(slots=True)
class Cursor:
    epoch: int
    seq: int

    def accept(self, event: dict[str, Any]) -> bool:
        """Whether the event is new; then the cursor moves past it. Raises Gap and does not move.

        A merged delta (`from_seq` .. `seq`) never reaches back over what was seen: the server merges only what it has not
        sent, and a resume starts a fresh outbox.
        """
        seq = event["seq"]
        if seq <= self.seq:
            return False
        if event.get("from_seq", seq) > self.seq + 1:
            raise Gap(f"after {self.seq} came {event.get('from_seq', seq)}")
        self.seq = seq
        return True

    def restart(self, epoch: int, seq: int) -> None:
        """A snapshot was taken over: the stream goes on from there."""
        self.epoch, self.seq = epoch, seq
