"""One running turn: what is known of it from claim to end, its timers, and what can go wrong with it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sessions.budgets import Book
from sessions.lifecycle import TURN, Machine, TurnEvent, TurnState
from sessions.model import Session, Turn

from . import views, wire
from .engines import channel
from .streams import Origin

if TYPE_CHECKING:
    from .preparing import Prepared


class SessionClosed(Exception):
    """The session takes no more turns; its transcript stays readable."""

    code = "session_closed"


class NotRunning(Exception):
    """There is nothing to cancel."""

    code = "response_not_in_progress"


class TurnCancelled(Exception):
    """Stopped before anything of the answer was shown: it never was."""

    code = "response_cancelled"


class EngineFailure(Exception):
    """The engine ended the turn without an answer. Nothing was kept."""

    def __init__(self, code: str, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.code, self.retryable = code, retryable


@dataclass(slots=True, eq=False)
class Run:
    """A turn between claim and end. `accepted` ends with response.created or with what refused it; `done` with the final
    response (status failed or cancelled included), or with what refused it."""

    session: Session
    frame: wire.ResponseCreate
    id: str
    origin: Origin | None
    claimed_at: float
    """Unix time, seconds, like the other times."""
    machine: Machine[TurnState, TurnEvent] = field(default_factory=lambda: Machine(TURN, TurnState.QUEUED))
    accepted: asyncio.Future[wire.Response] = field(default_factory=lambda: _future())
    done: asyncio.Future[wire.Response] = field(default_factory=lambda: _future())
    response: wire.Response | None = None
    """As last announced; None until it is admitted."""
    error: Exception | None = None
    prepared: "Prepared | None" = None
    book: Book | None = None
    reserved: bool = False
    held: bool = False
    """The session's stream is kept for this turn."""
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    """What was shown."""
    sent_at: float = 0.0
    first_text_at: float | None = None
    finished: channel.Finished | None = None
    cancel_reason: str | None = None
    committing: bool = False
    task: "asyncio.Task[None] | None" = None
    aborting: "asyncio.Task[None] | None" = None
    progress: "asyncio.Task[None] | None" = None
    _grace: asyncio.TimerHandle | None = None

    @property
    def longest_tokens(self) -> int:
        """Prompt and longest answer; 0 until it is admitted."""
        return self.prepared.longest_tokens if self.prepared is not None else 0

    @property
    def receipt(self) -> dict[str, Any] | None:
        """Of the restore that this turn needed."""
        return self.finished.receipt.to_wire() if self.finished is not None and self.finished.receipt is not None else None

    def usage(self, turn: Turn, kv_bytes: wire.KvBytes) -> wire.ResponseUsage:
        timings = self.finished.timings if self.finished is not None else channel.Timings()
        return views.usage(turn.usage, kv_bytes, restore_ms=timings.restore_ms, prefill_ms=timings.prefill_ms,
                           queue_ms=timings.queue_ms + (self.sent_at - self.claimed_at) * 1e3)

    def interrupt(self) -> None:
        """Wake the turn's task with a cancellation; not in the middle of a commit, which ends by itself."""
        if self.task is not None and not self.committing:
            self.task.cancel()

    def uninterrupt(self) -> None:
        """The interruption was taken note of; the task goes on."""
        if self.task is not None:
            self.task.uncancel()

    def expire(self, after_s: float, act: Callable[[], None]) -> None:
        self.keep()
        self._grace = asyncio.get_running_loop().call_later(after_s, act)

    def keep(self) -> None:
        """Somebody watches again."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def stop_progress(self) -> None:
        if self.progress is not None:
            self.progress.cancel()

    def stop_timers(self) -> None:
        self.keep()
        self.stop_progress()
        if self.aborting is not None:
            self.aborting.cancel()


@dataclass(frozen=True, slots=True)
class Answered:
    """The idempotency key was used: the response it belongs to, and the turn if it still runs."""

    response: wire.Response | None
    run: Run | None = None


def _future() -> "asyncio.Future[wire.Response]":
    future: asyncio.Future[wire.Response] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda f: f.cancelled() or f.exception())      # a refusal may find nobody waiting
    return future
