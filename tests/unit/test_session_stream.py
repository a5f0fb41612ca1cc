"""The event stream: numbering, replay, and a reader that sees each event once whatever the wire does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.stream import EventLog, Gap, Merge, Numbered, Resume


def filled(count: int, capacity: int, epoch: int = 1) -> EventLog[str]:
    log: EventLog[str] = EventLog(epoch, capacity)
    for n in range(1, count + 1):
        assert log.append(f"e{n}") == Numbered(n, f"e{n}")
    return log


@pytest.mark.parametrize(("count", "capacity"), [(0, 1), (1, 1), (3, 4), (4, 4), (5, 4), (9, 4)])
@pytest.mark.parametrize("last_seq", range(-1, 11))
@pytest.mark.parametrize("epoch", [None, 0, 1, 2])
def test_replay_says_what_it_can_give(count, capacity, last_seq, epoch):
    """Lossless exactly when every missed event is kept; else no events, a reason, and the live stream goes on after seq."""
    log = filled(count, capacity)
    replay = log.replay(epoch, last_seq)
    assert (replay.seq, log.seq) == (count, count)
    if replay.outcome is Resume.LOSSLESS:
        assert [n.seq for n in replay.events] == list(range(last_seq + 1, count + 1))
        assert (replay.from_seq, replay.reason) == (last_seq + 1, "")
        assert epoch == 1 and count - last_seq <= capacity
    else:
        assert (replay.events, replay.from_seq) == ((), count + 1)
        ours = epoch == 1 and 0 <= last_seq <= count
        assert replay.outcome is (Resume.RECOVERED if ours else Resume.SNAPSHOT)
        assert not ours or last_seq < count - capacity
        assert replay.reason


@pytest.mark.parametrize(("epoch", "last_seq", "reason"), [
    (None, None, "no position was given"), (1, None, "no position was given"), (7, 3, "epoch 7 is over, this is 1"),
    (1, 11, "last_seq 11 was never sent, the last is 10"), (1, -1, "last_seq -1 was never sent, the last is 10"),
    (1, 4, "event 5 is no longer kept, the oldest is 7"),
])
def test_the_reason_has_the_numbers(epoch, last_seq, reason):
    """Each way to miss is told apart, with the position that refused."""
    assert filled(10, 4).replay(epoch, last_seq).reason == reason


def test_a_log_keeps_its_capacity():
    """Memory is bounded by the capacity, which is at least 1."""
    log = filled(1000, 3)
    assert [n.event for n in log.since(0)] == ["e998", "e999", "e1000"]
    assert log.first_seq == 998
    assert filled(0, 3).first_seq == 1
    with pytest.raises(ValueError, match="capacity is 0"):
        EventLog(1, 0)


def test_a_gap_stops_the_merge_and_is_named():
    """What is beyond a gap is not let through; another epoch is a gap of everything; a repeat is dropped."""
    log, merge = filled(6, 6), Merge[str](1)
    one, two, three, four, five, six = log.since(0)
    assert merge.take(1, [one, two, one]) == ((one, two), None)
    assert merge.take(1, [two, three, five, six]) == ((three,), Gap(4, 4))
    assert merge.take(2, [four]) == ((), Gap(4, 3))
    assert merge.take(1, [four, five]) == ((four, five), None)
    merge.restart(2, 40)
    assert merge.take(2, [Numbered(41, "x")]) == ((Numbered(41, "x"),), None)


actions = st.lists(st.one_of(
    st.tuples(st.just("append"), st.integers(1, 6)),
    st.tuples(st.just("deliver"), st.integers(0, 8)),  # of what is on the wire, that many, some twice, one perhaps lost
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.just("resume"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
), max_size=50)


@settings(deadline=None)
@given(st.integers(1, 10), actions)
def test_an_old_reader_plus_what_it_missed_is_a_fresh_one(capacity, actions):
    """Through losses, repeats, resumes and restarts of the stream: after a resume the reader has what a fresh one would."""
    truth: list[str] = []  # everything that ever happened: what a snapshot shows
    log, merge, seen = EventLog[str](1, capacity), Merge[str](1), []
    wire: list[tuple[int, Numbered[str]]] = []

    def receive(epoch, events):
        fresh, gap = merge.take(epoch, events)
        seen.extend(n.event for n in fresh)
        return gap

    def resume():
        replay = log.replay(merge.epoch, merge.last_seq)
        if replay.outcome is Resume.LOSSLESS:
            assert receive(log.epoch, replay.events) is None
        else:
            seen[:] = truth
            merge.restart(log.epoch, replay.seq)
        assert seen == truth

    for action, count in actions:
        if action == "append":
            for _ in range(count):
                truth.append(f"e{len(truth)}")
                wire.append((log.epoch, log.append(truth[-1])))
        elif action == "deliver":
            for epoch, numbered in wire[:count]:
                if receive(epoch, [numbered, numbered]) is not None:
                    resume()
            del wire[: count // 2]  # the rest comes again
        elif action == "lose":
            del wire[:count]
        elif action == "resume":
            resume()
        else:
            log = EventLog[str](log.epoch + 1, capacity)
        assert seen == truth[: len(seen)]
    resume()
