"""The outbox of one socket, and the client's cursor that reads what it lets out."""

from hypothesis import given
from hypothesis import strategies as st

from server.client.cursor import Cursor, Gap
from server.outbox import MAX_DELTA_CHARS, Outbox


def delta(seq: int, text: str = "x", session: str = "s", response: str = "r") -> dict:
    return {"type": "response.output_text.delta", "session_id": session, "seq": seq, "response_id": response, "delta": text}


def drain(outbox: Outbox) -> list[dict]:
    return [event for event in iter(outbox.pop, None)]


def test_below_half_full_every_event_stays_as_it_is() -> None:
    """A reader that keeps up sees each delta by itself."""
    outbox = Outbox(8)
    events = [delta(n) for n in range(1, 5)]
    assert all(outbox.put(e) for e in events)
    assert drain(outbox) == events


def test_beyond_half_full_adjacent_deltas_are_laid_together_with_their_range() -> None:
    """A merged delta has all text and says which numbers it holds."""
    outbox = Outbox(2)
    for n, text in enumerate(("a", "b", "c"), 1):
        assert outbox.put(delta(n, text))
    assert drain(outbox) == [{**delta(3, "abc"), "from_seq": 1}]


def test_deltas_of_different_responses_or_with_an_event_between_stay_apart() -> None:
    """Only neighbours of the same response in the same session merge."""
    outbox = Outbox(100)
    outbox._max_events = 2
    assert outbox.put(delta(1)) and outbox.put({"type": "session.state", "session_id": "s", "seq": 2})
    assert not outbox.put(delta(3))                 # full, and its neighbour is no delta
    outbox.clear()
    assert outbox.put(delta(1)) and outbox.put(delta(2, response="other"))
    assert not outbox.put(delta(3, session="other"))
    assert [e["seq"] for e in drain(outbox)] == [1, 2]


def test_a_full_outbox_refuses_and_keeps_what_it_has() -> None:
    """The refused event is not queued; after one is taken there is room again."""
    outbox = Outbox(2)
    states = [{"type": "session.state", "session_id": "s", "seq": n} for n in (1, 2, 3)]
    assert [outbox.put(e) for e in states] == [True, True, False]
    assert outbox.pop() == states[0]
    assert outbox.put(states[2]) and drain(outbox) == states[1:]


def test_a_replay_does_not_count_against_the_bound_and_is_not_merged() -> None:
    """A resume may bring back more than the bound without making the reader a slow one."""
    outbox = Outbox(4)
    outbox.replay([delta(n) for n in range(1, 11)])
    assert outbox.put(delta(11)) and outbox.put(delta(12)) and outbox.put(delta(13))
    assert [e.get("from_seq", e["seq"]) for e in drain(outbox)] == [*range(1, 12), 12]


def test_a_merged_delta_does_not_grow_without_end() -> None:
    """At the largest size another one is begun, or refused when there is no room."""
    outbox = Outbox(1)
    assert outbox.put(delta(1, "x" * MAX_DELTA_CHARS))
    assert not outbox.put(delta(2))


@given(st.integers(2, 6), st.lists(st.sampled_from("dse>"), max_size=60))
def test_whatever_is_let_out_can_be_read_without_gap_or_repetition(size: int, script: list[str]) -> None:
    """d: delta, s: a delta of another response, e: another event, >: the writer takes one. Text and order survive."""
    outbox, cursor, seq, sent, out = Outbox(size), Cursor(1, 0), 0, "", []
    for step in script:
        if step == ">":
            if (event := outbox.pop()) is not None:
                out.append(event)
            continue
        event = delta(seq + 1, str(seq % 10), response=step) if step in "ds" else {
            "type": "session.state", "session_id": "s", "seq": seq + 1}
        if not outbox.put(event):
            break
        seq, sent = seq + 1, sent + event.get("delta", "")
    out += drain(outbox)
    assert all(cursor.accept(event) for event in out)
    assert cursor.seq == seq and "".join(e.get("delta", "") for e in out) == sent


def test_the_cursor_drops_what_it_saw_and_stops_at_a_gap() -> None:
    """A repeated event is dropped; a gap raises and moves nothing."""
    cursor = Cursor(1, 5)
    assert not cursor.accept(delta(5)) and cursor.accept(delta(6))
    try:
        cursor.accept(delta(8))
    except Gap:
        assert cursor.seq == 6
    else:
        raise AssertionError("a gap was let through")
    assert cursor.accept({**delta(9), "from_seq": 7}) and cursor.seq == 9
