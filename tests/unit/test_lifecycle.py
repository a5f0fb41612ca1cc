"""The lifecycle tables, looked at whole: they are small enough to check every state and event."""

import pytest

from sessions.errors import IllegalEvent
from sessions.lifecycle import (
    SESSION,
    TERMINAL,
    TURN,
    Machine,
    SessionEvent,
    SessionState,
    TurnEvent,
    TurnState,
    step,
)

T, E = TurnState, TurnEvent
TABLES = [(TURN, TurnState, TurnEvent, TurnState.QUEUED, TERMINAL),
          (SESSION, SessionState, SessionEvent, SessionState.OPEN, {SessionState.CLOSED})]


@pytest.mark.parametrize(("table", "states", "events", "first", "terminal"), TABLES)
def test_every_event_moves_as_the_table_says_or_raises_and_stays(table, states, events, first, terminal):
    """In every state each event either moves as the table says, or raises IllegalEvent and the state is kept."""
    for state in states:
        for event in events:
            machine = Machine(table, state)
            if (state, event) in table:
                assert machine.allows(event)
                assert machine.fire(event) is table[state, event] is machine.state
            else:
                assert not machine.allows(event)
                with pytest.raises(IllegalEvent, match=f"{event} .* {state}"):
                    machine.fire(event)
                assert machine.state is state


@pytest.mark.parametrize(("table", "states", "events", "first", "terminal"), TABLES)
def test_every_state_is_reached_and_left_for_an_end(table, states, events, first, terminal):
    """From the first state all others are reached; from each an end is reached; an end is never left."""
    after = {state: {to for (at, _), to in table.items() if at is state} for state in states}

    def reach(start):
        found, todo = {start}, [start]
        while todo:
            new = after[todo.pop()] - found
            found |= new
            todo += new
        return found

    assert reach(first) == set(states)
    assert all(reach(state) & terminal for state in states)
    assert {state for state in states if not after[state]} == terminal


def test_any_turn_that_lives_can_fail_and_be_cancelled():
    """Whatever a turn is doing, a failure rolls it back and a cancel is taken."""
    for state in set(TurnState) - TERMINAL:
        assert step(TURN, state, E.FAILED) is T.ROLLED_BACK
        assert step(TURN, state, E.CANCEL_REQUESTED) in (T.ROLLED_BACK, T.CANCELLING)


@pytest.mark.parametrize(("events", "end"), [
    ([E.ADMITTED, E.PREFILL_STARTED, E.TOKEN, E.TOKEN, E.FINISHED], T.COMMITTED),
    ([E.ADMITTED, E.RESTORE_STARTED, E.RESTORED, E.PREFILL_STARTED, E.TOKEN, E.FINISHED], T.COMMITTED),
    ([E.REFUSED], T.ROLLED_BACK),
    ([E.ADMITTED, E.RESTORE_STARTED, E.CANCEL_REQUESTED, E.RESTORED, E.FAILED], T.ROLLED_BACK),
    ([E.ADMITTED, E.PREFILL_STARTED, E.TOKEN, E.CANCEL_REQUESTED, E.TOKEN, E.CANCEL_REQUESTED, E.FINISHED], T.COMMITTED),
])
def test_lives_of_turns(events, end):
    """Whole lives: plain, with a restore, refused, cancelled before the first token and after."""
    machine = Machine(TURN, TurnState.QUEUED)
    assert [machine.fire(event) for event in events][-1] is end


def test_nothing_is_committed_without_a_token():
    """A turn is only committed from states that have shown a token or were told to stop."""
    assert {at for (at, _), to in TURN.items() if to is T.COMMITTED} == {T.STREAMING, T.CANCELLING}


def test_a_closing_session_starts_no_turn():
    """Once close is asked for, running turns may end and none may start."""
    machine = Machine(SESSION, SessionState.OPEN)
    machine.fire(SessionEvent.TURN_STARTED)
    machine.fire(SessionEvent.CLOSE_REQUESTED)
    with pytest.raises(IllegalEvent):
        machine.fire(SessionEvent.TURN_STARTED)
    machine.fire(SessionEvent.TURN_ENDED)
    assert machine.fire(SessionEvent.DRAINED) is SessionState.CLOSED
