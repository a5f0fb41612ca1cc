"""PURE. The life of one WebSocket connection as a state machine without I/O: frames in, commands out.

The shell (`socket.py`) decodes frames, feeds them here and carries out the commands in order. Every transition is in
`TRANSITIONS`; an input that the table does not have in the present state is refused and changes nothing.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from . import wire
from .wire import Close, ErrorObject, event

AUTHENTICATE_WITHIN_S = 10.0
"""How long a socket without a login may stay open before its ticket must have come."""
UNAUTHENTICATED_FRAME_BYTES = 4096
"""A ticket fits; nothing else is read before the login."""
MAX_ATTACHED_SESSIONS = 256
"""Sessions that one socket may watch."""


class State(StrEnum):
    CONNECTING = "connecting"
    """Before the upgrade is answered."""
    AWAITING_TICKET = "awaiting_ticket"
    READY = "ready"
    CLOSING = "closing"
    """The close frame is on its way; nothing more is read."""
    CLOSED = "closed"


class Input(StrEnum):
    OPENED_WITH_LOGIN = "opened_with_login"
    OPENED_WITHOUT_LOGIN = "opened_without_login"
    REFUSED = "refused"
    TICKET_ACCEPTED = "ticket_accepted"
    TICKET_REFUSED = "ticket_refused"
    DEADLINE = "deadline"
    VIOLATION = "violation"
    """A frame above the limit, say: the connection cannot go on."""
    SLOW_READER = "slow_reader"
    SHUTDOWN = "shutdown"
    LOST = "lost"
    """The peer closed or the network did."""


S, I = State, Input
TRANSITIONS: dict[tuple[State, Input], State] = {
    (S.CONNECTING, I.OPENED_WITH_LOGIN): S.READY,
    (S.CONNECTING, I.OPENED_WITHOUT_LOGIN): S.AWAITING_TICKET,
    (S.CONNECTING, I.REFUSED): S.CLOSED,
    (S.CONNECTING, I.LOST): S.CLOSED,
    (S.AWAITING_TICKET, I.TICKET_ACCEPTED): S.READY,
    (S.AWAITING_TICKET, I.TICKET_REFUSED): S.CLOSING,
    (S.AWAITING_TICKET, I.DEADLINE): S.CLOSING,
    (S.AWAITING_TICKET, I.VIOLATION): S.CLOSING,
    (S.AWAITING_TICKET, I.SLOW_READER): S.CLOSING,
    (S.AWAITING_TICKET, I.SHUTDOWN): S.CLOSING,
    (S.AWAITING_TICKET, I.LOST): S.CLOSED,
    (S.READY, I.VIOLATION): S.CLOSING,
    (S.READY, I.SLOW_READER): S.CLOSING,
    (S.READY, I.SHUTDOWN): S.CLOSING,
    (S.READY, I.LOST): S.CLOSED,
    (S.CLOSING, I.LOST): S.CLOSED,
}


class IllegalInput(Exception):
    """The table has no such transition; nothing was changed."""


# ---- commands: what the shell is to do -------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Send:
    """Send this event on this connection."""

    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Announce:
    """Send connection.ready with the limits in force and the state of the engine."""


@dataclass(frozen=True, slots=True)
class CheckTicket:
    """Redeem the ticket, then call `ticket_accepted` or `ticket_refused`."""

    ticket: str
    event_id: str | None


@dataclass(frozen=True, slots=True)
class Attach:
    """Watch the session from now on (after checking whose it is), then call `attached`."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Run:
    """Hand the frame to the services. If an earlier command of the same frame failed, it is not run."""

    frame: wire.ClientFrame


@dataclass(frozen=True, slots=True)
class Hangup:
    """Send what is queued, then close with this code."""

    code: int
    reason: str


Command = Send | Announce | CheckTicket | Attach | Run | Hangup


def error_event(error: ErrorObject, *, event_id: str | None = None, session_id: str | None = None) -> dict[str, Any]:
    """An error of this connection, answering `event_id`; with session_id where it is about a session."""
    out = event("error", error=error)
    if event_id is not None:
        out["event_id"] = event_id
    if session_id is not None:
        out["session_id"] = session_id
    return out


@dataclass(slots=True)
class Connection:
    """State of one socket. `now_s` is any monotonic clock; the caller passes it in."""

    frame_bytes: int
    state: State = State.CONNECTING
    attachments: set[str] = field(default_factory=set)
    """Sessions whose events go to this socket."""
    deadline_s: float | None = None
    """When an unauthenticated socket is closed; None once it is authenticated."""

    @property
    def frame_limit_bytes(self) -> int:
        """The largest frame that is read now."""
        return min(self.frame_bytes, UNAUTHENTICATED_FRAME_BYTES) if self.state is State.AWAITING_TICKET else self.frame_bytes

    def _step(self, what: Input) -> None:
        try:
            self.state = TRANSITIONS[self.state, what]
        except KeyError:
            raise IllegalInput(f"{what} in state {self.state}") from None
        if self.state is not State.AWAITING_TICKET:
            self.deadline_s = None
        if self.state in (State.CLOSING, State.CLOSED):
            self.attachments.clear()

    # ---- opening and login
    def opened(self, *, authenticated: bool, now_s: float) -> list[Command]:
        """The upgrade was accepted."""
        if authenticated:
            self._step(Input.OPENED_WITH_LOGIN)
            return [Announce()]
        self._step(Input.OPENED_WITHOUT_LOGIN)
        self.deadline_s = now_s + AUTHENTICATE_WITHIN_S
        return []

    def refused(self) -> None:
        """The upgrade was answered with an HTTP error."""
        self._step(Input.REFUSED)

    def ticket_accepted(self, *, tenant: str, role: str, token: str, event_id: str | None) -> list[Command]:
        """`token`: what the client shows to REST from now on."""
        self._step(Input.TICKET_ACCEPTED)
        accepted = event("connection.authenticated", tenant=tenant, role=role, token=token)
        return [Send(_answer(accepted, event_id)), Announce()]

    def ticket_refused(self, error: ErrorObject, event_id: str | None) -> list[Command]:
        self._step(Input.TICKET_REFUSED)
        return [Send(error_event(error, event_id=event_id)), Hangup(Close.UNAUTHENTICATED, "the ticket was refused")]

    def tick(self, now_s: float) -> list[Command]:
        """Closes a socket whose ticket did not come in time; before the deadline, and after login, nothing."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        self._step(Input.DEADLINE)
        return [Send(error_event(_unauthenticated(f"no ticket came within {AUTHENTICATE_WITHIN_S:g} s"))),
                Hangup(Close.UNAUTHENTICATED, "not authenticated in time")]

    # ---- frames
    def receive(self, frame: wire.ClientFrame) -> list[Command]:
        """One decoded frame. A frame that is illegal now gives an error event and changes nothing."""
        if self.state is State.AWAITING_TICKET:
            if isinstance(frame, wire.Authenticate):
                return [CheckTicket(frame.ticket, frame.event_id)]
            return [Send(error_event(_unauthenticated("the first frame must be authenticate, with a ticket"),
                                     event_id=frame.event_id))]
        if self.state is not State.READY:
            return []
        match frame:
            case wire.Ping():
                return [Send(_answer(event("pong"), frame.event_id))]
            case wire.Authenticate():
                return [_refuse(frame, "already_authenticated", "this connection is authenticated already")]
            case wire.SessionCreate() | wire.SessionResume() | wire.ResponseCreate() if self._is_full(frame):
                return [_refuse(frame, "too_many_sessions", "this connection watches as many sessions as it may",
                                limit=MAX_ATTACHED_SESSIONS)]
            case wire.ResponseCreate() if frame.session_id not in self.attachments:
                return [Attach(frame.session_id), Run(frame)]
        return [Run(frame)]

    def refuse(self, error: ErrorObject, event_id: str | None = None) -> list[Command]:
        """A frame that could not be decoded, or a binary one: the connection goes on."""
        return [Send(error_event(error, event_id=event_id))] if self.state in (S.AWAITING_TICKET, S.READY) else []

    def too_big(self, size_bytes: int) -> list[Command]:
        """A frame above the announced limit."""
        limit, when = self.frame_limit_bytes, "" if self.state is State.READY else " before the login"
        self._step(Input.VIOLATION)
        error = ErrorObject("limit_exceeded", "frame_too_big", f"a frame may have {limit} bytes{when}, this one has {size_bytes}",
                            param="frame_bytes", limit=limit, requested=size_bytes)
        return [Send(error_event(error)), Hangup(Close.TOO_BIG, f"a frame may have {limit} bytes{when}")]

    # ---- attachments
    def attached(self, session_id: str) -> None:
        """The shell put this socket among the session's watchers."""
        if self.state is not State.READY:
            raise IllegalInput(f"attach in state {self.state}")
        self.attachments.add(session_id)

    def _is_full(self, frame: wire.SessionCreate | wire.SessionResume | wire.ResponseCreate) -> bool:
        known = not isinstance(frame, wire.SessionCreate) and frame.session_id in self.attachments
        return not known and len(self.attachments) >= MAX_ATTACHED_SESSIONS

    # ---- ends
    def slow_reader(self) -> list[Command]:
        """Its outbox is full. It may come back and resume by seq."""
        return self._hang_up(Input.SLOW_READER, Close.SLOW_READER, "the reader is too slow; resume by seq")

    def shutdown(self) -> list[Command]:
        return self._hang_up(Input.SHUTDOWN, Close.RESTART, "the server is restarting")

    def _hang_up(self, what: Input, code: int, reason: str) -> list[Command]:
        if (self.state, what) not in TRANSITIONS:
            return []                                # it is closing for another reason already
        self._step(what)
        return [Hangup(code, reason)]

    def lost(self) -> None:
        """The socket is gone, whichever side closed it."""
        if self.state is not State.CLOSED:
            self._step(Input.LOST)


def _answer(out: dict[str, Any], event_id: str | None) -> dict[str, Any]:
    return out if event_id is None else {**out, "event_id": event_id}


def _unauthenticated(message: str) -> ErrorObject:
    return ErrorObject("authentication", "unauthenticated", message)


def _refuse(frame: wire.ClientFrame, code: str, message: str, *, limit: int | None = None) -> Send:
    error = ErrorObject("invalid_request" if limit is None else "limit_exceeded", code, message, limit=limit,
                        requested=None if limit is None else limit + 1)
    return Send(error_event(error, event_id=frame.event_id, session_id=getattr(frame, "session_id", None)))
