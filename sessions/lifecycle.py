"""PURE. The life of a turn and of a session: one transition table each. An event that is not in the table is illegal.

    queued ──admitted──> admitted ──prefill_started──> prefilling ──token──> streaming ──finished──> committed
      │ refused           │    ^ restored                 │                     │
      │                restore_started                 cancel_requested      cancel_requested
      v                   v    │                          v                     v
    rolled_back        restoring ──cancel_requested──> cancelling ──finished──> committed
                                                       cancelling ──failed────> rolled_back
    Every state that is not terminal: failed -> rolled_back.

A turn is *committed* (in history, counted) or *rolled_back* (it never was), nothing between. A cancelled turn ends with
`finished` if the user saw a token of it, and with `failed` if not.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from .errors import IllegalEvent


class TurnState(StrEnum):
    QUEUED = "queued"
    ADMITTED = "admitted"
    """Its tokens are reserved; it waits for a restore or for the engine."""
    RESTORING = "restoring"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    CANCELLING = "cancelling"
    """The engine was told to stop and has not yet said that it did."""
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


class TurnEvent(StrEnum):
    ADMITTED = "admitted"
    REFUSED = "refused"
    RESTORE_STARTED = "restore_started"
    RESTORED = "restored"
    """The restore ended, whatever it brought: recomputing the rest is always legal."""
    PREFILL_STARTED = "prefill_started"
    TOKEN = "token"
    CANCEL_REQUESTED = "cancel_requested"
    FINISHED = "finished"
    FAILED = "failed"


class SessionState(StrEnum):
    OPEN = "open"
    CLOSING = "closing"
    """No new turns; those that run may end."""
    CLOSED = "closed"


class SessionEvent(StrEnum):
    TURN_STARTED = "turn_started"
    TURN_ENDED = "turn_ended"
    CLOSE_REQUESTED = "close_requested"
    DRAINED = "drained"
    """No turn runs any more."""


_T, _E = TurnState, TurnEvent
TURN: Mapping[tuple[TurnState, TurnEvent], TurnState] = {
    (_T.QUEUED, _E.ADMITTED): _T.ADMITTED,
    (_T.QUEUED, _E.REFUSED): _T.ROLLED_BACK,
    (_T.QUEUED, _E.CANCEL_REQUESTED): _T.ROLLED_BACK,
    (_T.QUEUED, _E.FAILED): _T.ROLLED_BACK,
    (_T.ADMITTED, _E.RESTORE_STARTED): _T.RESTORING,
    (_T.ADMITTED, _E.PREFILL_STARTED): _T.PREFILLING,
    (_T.ADMITTED, _E.CANCEL_REQUESTED): _T.ROLLED_BACK,
    (_T.ADMITTED, _E.FAILED): _T.ROLLED_BACK,
    (_T.RESTORING, _E.RESTORED): _T.ADMITTED,
    (_T.RESTORING, _E.CANCEL_REQUESTED): _T.CANCELLING,
    (_T.RESTORING, _E.FAILED): _T.ROLLED_BACK,
    (_T.PREFILLING, _E.TOKEN): _T.STREAMING,
    (_T.PREFILLING, _E.CANCEL_REQUESTED): _T.CANCELLING,
    (_T.PREFILLING, _E.FAILED): _T.ROLLED_BACK,
    (_T.STREAMING, _E.TOKEN): _T.STREAMING,
    (_T.STREAMING, _E.CANCEL_REQUESTED): _T.CANCELLING,
    (_T.STREAMING, _E.FINISHED): _T.COMMITTED,
    (_T.STREAMING, _E.FAILED): _T.ROLLED_BACK,
    # What was on its way when the stop was sent still arrives; a second stop is a person's impatience, not an error.
    (_T.CANCELLING, _E.RESTORED): _T.CANCELLING,
    (_T.CANCELLING, _E.TOKEN): _T.CANCELLING,
    (_T.CANCELLING, _E.CANCEL_REQUESTED): _T.CANCELLING,
    (_T.CANCELLING, _E.FINISHED): _T.COMMITTED,
    (_T.CANCELLING, _E.FAILED): _T.ROLLED_BACK,
}
TERMINAL = frozenset({TurnState.COMMITTED, TurnState.ROLLED_BACK})

_S, _V = SessionState, SessionEvent
SESSION: Mapping[tuple[SessionState, SessionEvent], SessionState] = {
    (_S.OPEN, _V.TURN_STARTED): _S.OPEN,
    (_S.OPEN, _V.TURN_ENDED): _S.OPEN,
    (_S.OPEN, _V.CLOSE_REQUESTED): _S.CLOSING,
    (_S.CLOSING, _V.TURN_ENDED): _S.CLOSING,
    (_S.CLOSING, _V.CLOSE_REQUESTED): _S.CLOSING,
    (_S.CLOSING, _V.DRAINED): _S.CLOSED,
}

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def step(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalEvent."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalEvent(f"{event} is not possible in the state {state}") from None


class Machine(Generic[State, Event]):
    """A table and where one thing is in it: `Machine(TURN, TurnState.QUEUED)`."""

    def __init__(self, table: Mapping[tuple[State, Event], State], state: State) -> None:
        self._table, self._state = table, state

    @property
    def state(self) -> State:
        return self._state

    def allows(self, event: Event) -> bool:
        return (self._state, event) in self._table

    def fire(self, event: Event) -> State:
        """Move, and return the new state. Raises IllegalEvent and stays."""
        self._state = step(self._table, self._state, event)
        return self._state
