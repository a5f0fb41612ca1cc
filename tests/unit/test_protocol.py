"""The connection's state machine: every transition, and that what is illegal changes nothing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import wire
from server.protocol import (
    AUTHENTICATE_WITHIN_S,
    MAX_ATTACHED_SESSIONS,
    TRANSITIONS,
    Announce,
    Attach,
    CheckTicket,
    Connection,
    Hangup,
    IllegalInput,
    Input,
    Run,
    Send,
    State,
)

MESSAGE = (wire.InputMessage((wire.InputText("hello"),)),)
FRAMES = [
    wire.SessionCreate(event_id="e"), wire.SessionResume("s_1", event_id="e"), wire.SessionUpdate("s_1", "t", event_id="e"),
    wire.SessionClose("s_1", event_id="e"), wire.ResponseCreate("s_1", MESSAGE, event_id="e"),
    wire.ResponseCancel("s_1", event_id="e"), wire.InputTyping("s_1", event_id="e"), wire.Ping(event_id="e"),
    wire.Authenticate("ticket", event_id="e"),
]
REFUSAL = wire.ErrorObject("authentication", "ticket_invalid", "no")


def opened(authenticated: bool = True) -> Connection:
    connection = Connection(frame_bytes=1024)
    connection.opened(authenticated=authenticated, now_s=100.0)
    return connection


def the_error(commands: list) -> wire.ErrorObject:
    assert isinstance(commands[0], Send) and commands[0].event["type"] == "error"
    return commands[0].event["error"]


def test_a_login_in_the_header_makes_it_ready_at_once() -> None:
    """With a login the limits are announced and there is no deadline."""
    connection = Connection(frame_bytes=1024)
    assert connection.opened(authenticated=True, now_s=0.0) == [Announce()]
    assert connection.state is State.READY and connection.deadline_s is None


def test_a_ticket_makes_it_ready() -> None:
    """Without a login: the ticket is checked, then authenticated and the limits are announced, in that order."""
    connection = opened(authenticated=False)
    assert connection.receive(wire.Authenticate("t1", event_id="e")) == [CheckTicket("t1", "e")]
    send, announce = connection.ticket_accepted(tenant="default", role="user", token="t", event_id="e")
    assert send.event == {"type": "connection.authenticated", "tenant": "default", "role": "user", "token": "t", "event_id": "e"}
    assert announce == Announce()
    assert connection.state is State.READY and connection.deadline_s is None


def test_a_refused_ticket_closes_without_a_retry() -> None:
    """A wrong ticket gives its error and a close code that says: do not reconnect with the same."""
    connection = opened(authenticated=False)
    commands = connection.ticket_refused(REFUSAL, "e")
    assert the_error(commands) is REFUSAL and commands[1].code == wire.Close.UNAUTHENTICATED
    assert connection.state is State.CLOSING


@pytest.mark.parametrize("frame", FRAMES[:-1], ids=lambda f: f.type)
def test_before_the_login_every_other_frame_is_refused(frame: wire.ClientFrame) -> None:
    """Nothing but authenticate works before the login; the refusal answers the frame and the socket stays."""
    connection = opened(authenticated=False)
    commands = connection.receive(frame)
    assert len(commands) == 1 and the_error(commands).code == "unauthenticated"
    assert commands[0].event["event_id"] == "e"
    assert connection.state is State.AWAITING_TICKET and connection.deadline_s == 100.0 + AUTHENTICATE_WITHIN_S


def test_the_deadline_closes_exactly_once_and_only_when_it_has_come() -> None:
    """A socket whose ticket does not come is closed at its deadline; afterwards nothing more happens."""
    connection = opened(authenticated=False)
    assert connection.tick(100.0 + AUTHENTICATE_WITHIN_S - 0.001) == []
    commands = connection.tick(100.0 + AUTHENTICATE_WITHIN_S)
    assert commands[-1].code == wire.Close.UNAUTHENTICATED
    assert connection.tick(1e9) == [] and connection.state is State.CLOSING


def test_ping_is_answered_by_the_core_alone() -> None:
    """ping gives pong with its event_id, and no command for the services."""
    assert opened().receive(wire.Ping(event_id="p")) == [Send({"type": "pong", "event_id": "p"})]


def test_a_turn_on_an_unwatched_session_attaches_first() -> None:
    """response.create attaches the socket before it runs, once."""
    connection = opened()
    frame = wire.ResponseCreate("s_1", MESSAGE)
    assert connection.receive(frame) == [Attach("s_1"), Run(frame)]
    connection.attached("s_1")
    assert connection.receive(frame) == [Run(frame)]


def test_a_second_login_is_refused_and_changes_nothing() -> None:
    """authenticate on a ready connection is an error event."""
    connection = opened()
    assert the_error(connection.receive(wire.Authenticate("t"))).code == "already_authenticated"
    assert connection.state is State.READY


def test_watching_too_many_sessions_is_refused_with_the_number() -> None:
    """One session more than a socket may watch is refused; those it watches go on."""
    connection = opened()
    for n in range(MAX_ATTACHED_SESSIONS):
        connection.attached(f"s_{n}")
    for frame in (wire.SessionCreate(), wire.SessionResume("s_new"), wire.ResponseCreate("s_new", MESSAGE)):
        error = the_error(connection.receive(frame))
        assert (error.code, error.limit) == ("too_many_sessions", MAX_ATTACHED_SESSIONS)
    frame = wire.ResponseCreate("s_1", MESSAGE)
    assert connection.receive(frame) == [Run(frame)]


def test_a_frame_above_the_limit_names_it_and_closes() -> None:
    """Too big: an error with limit and size, then 1009; no session is watched any more."""
    connection = opened()
    connection.attached("s_1")
    commands = connection.too_big(2048)
    error = the_error(commands)
    assert (error.param, error.limit, error.requested) == ("frame_bytes", 1024, 2048)
    assert commands[1] == Hangup(wire.Close.TOO_BIG, "a frame may have 1024 bytes")
    assert connection.attachments == set() and connection.receive(wire.Ping()) == []


def test_ends_are_idempotent() -> None:
    """A closing connection is not closed again for another reason, and may be lost at any time."""
    connection = opened()
    assert connection.slow_reader()[0].code == wire.Close.SLOW_READER
    assert connection.shutdown() == [] and connection.slow_reader() == []
    connection.lost()
    connection.lost()
    assert connection.state is State.CLOSED


@pytest.mark.parametrize(("state", "what"), [pair for pair in itertools.product(State, Input) if pair not in TRANSITIONS])
def test_what_the_table_does_not_have_raises_and_changes_nothing(state: State, what: Input) -> None:
    """Every (state, input) pair outside the table is refused."""
    connection = Connection(frame_bytes=1024, state=state, attachments={"s"}, deadline_s=1.0)
    with pytest.raises(IllegalInput):
        connection._step(what)
    assert (connection.state, connection.attachments, connection.deadline_s) == (state, {"s"}, 1.0)


@given(st.lists(st.sampled_from(FRAMES)), st.booleans())
def test_frames_alone_never_change_the_state(frames: list[wire.ClientFrame], authenticated: bool) -> None:
    """Whatever a client sends, the state moves only by what the shell reports back."""
    connection = opened(authenticated)
    before = (connection.state, connection.deadline_s, set(connection.attachments))
    for frame in frames:
        connection.receive(frame)
    assert (connection.state, connection.deadline_s, connection.attachments) == before
