"""The planner: what it never touches, when it acts, and where it stops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.geometry import Tier
from kvstore.ledger import Entry
from kvstore.planner import DemoteOwner, PlanPolicy, Pressure, SpillTo, plan
from kvstore.receipt import KvVerb

PAGE = 4
POLICY = PlanPolicy(to_host_s=100, to_storage_s=500, high=0.9, low=0.5, page_tokens=PAGE)
NOW_S = 10_000.0


@st.composite
def books(draw: st.DrawFn) -> tuple[list[Entry], Pressure]:
    """Entries with what fits of their exclusive pages in the pool, and the pool they are in."""
    entries = []
    for n in range(draw(st.integers(0, 8))):
        exclusive = draw(st.integers(0, 12)) * PAGE
        shared = draw(st.integers(0, 3)) * PAGE
        entries.append(Entry(
            f"s{n}", generation=n, total_tokens=exclusive + shared, device_tokens=exclusive + shared,
            device_exclusive_tokens=exclusive, host_tokens=draw(st.sampled_from([0, exclusive])),
            last_used_s=NOW_S - draw(st.sampled_from([0, 50, 99, 100, 101, 300, 500, 900])),
            pinned_until_s=draw(st.sampled_from([None, NOW_S - 1, NOW_S + 1])),
            turns=draw(st.integers(0, 1)), verb=draw(st.sampled_from([None, None, None, KvVerb.SPILL]))))
    used = sum(e.device_exclusive_tokens for e in entries) // PAGE + draw(st.integers(0, 10))
    in_flight, free = draw(st.integers(0, 5)), draw(st.integers(0, 60))
    return entries, Pressure(free, used, in_flight, max(1, free + used + in_flight))


def protected(entry: Entry) -> bool:
    return entry.busy or entry.verb is not None or (entry.pinned_until_s or 0) > NOW_S


@given(books())
def test_never_touches_the_protected(case):
    """No action names an owner with a running turn, a verb in flight or a live pin, and none names one twice."""
    entries, pressure = case
    owners = [action.owner for action in plan(entries, pressure, POLICY, NOW_S)]
    assert len(owners) == len(set(owners))
    assert not {e.owner for e in entries if protected(e)} & set(owners)


@given(books())
def test_idleness_alone_decides_below_the_high_mark(case):
    """Below the high mark exactly the owners that are idle long enough, and have something to move, are moved."""
    entries, pressure = case
    if pressure.occupied >= POLICY.high:
        pressure = Pressure(pressure.total_pages, 0, 0, pressure.total_pages)
    expected = {}
    for e in entries:
        idle_s = NOW_S - e.last_used_s
        if not protected(e) and idle_s >= 500 and (e.device_exclusive_tokens or e.host_tokens):
            expected[e.owner] = Tier.STORAGE
        elif not protected(e) and 100 <= idle_s < 500 and e.device_exclusive_tokens:
            expected[e.owner] = Tier.HOST
    actions = plan(entries, pressure, POLICY, NOW_S)
    assert {a.owner: a.to if isinstance(a, SpillTo) else Tier.STORAGE for a in actions} == expected
    assert plan(entries, None, POLICY, NOW_S) == actions


@given(books())
def test_stops_at_the_low_mark(case):
    """Under pressure it spills the coldest first, enough to reach the low mark if that can be, and not one owner more."""
    entries, pressure = case
    if pressure.occupied < POLICY.high:
        return
    by_owner = {e.owner: e for e in entries}
    actions = plan(entries, pressure, POLICY, NOW_S)
    for_pressure = [a for a in actions if isinstance(a, SpillTo) and "in use" in a.reason]
    freed = sum(by_owner[a.owner].device_exclusive_tokens // PAGE for a in actions if isinstance(a, SpillTo))
    left = pressure.relieved(freed)
    if for_pressure:
        last = by_owner[for_pressure[-1].owner]
        assert pressure.relieved(freed - last.device_exclusive_tokens // PAGE).occupied > POLICY.low
        order = [(by_owner[a.owner].last_used_s, a.owner) for a in for_pressure]
        assert order == sorted(order)
        assert all(a.to is Tier.HOST for a in for_pressure)
    spilled = {a.owner for a in actions if isinstance(a, SpillTo)}
    could = [e for e in entries if not protected(e) and e.device_exclusive_tokens and e.owner not in spilled]
    assert left.occupied <= POLICY.low or not could


@given(books(), st.randoms())
def test_the_same_books_give_the_same_plan(case, dice):
    """The plan does not depend on the order in which the entries come."""
    entries, pressure = case
    shuffled = list(entries)
    dice.shuffle(shuffled)
    assert plan(shuffled, pressure, POLICY, NOW_S) == plan(entries, pressure, POLICY, NOW_S)


def test_between_the_marks_nothing_happens():
    """A pool above the low mark and below the high one is left alone."""
    entry = Entry("s", 1, total_tokens=40, device_tokens=40, device_exclusive_tokens=40, last_used_s=NOW_S - 10)
    assert plan([entry], Pressure(15, 85, 0, 100), POLICY, NOW_S) == ()
    assert plan([entry], Pressure(10, 85, 5, 100), POLICY, NOW_S) == (SpillTo("s", Tier.HOST, "90% of the device pool is in use"),)


def test_what_left_the_device_is_demoted_in_time():
    """An owner that is on the host only goes to storage when its time has come, and without a time it never does."""
    entry = Entry("s", 1, total_tokens=40, host_tokens=40, reachable_tokens=40, last_used_s=NOW_S - 500)
    assert plan([entry], None, POLICY, NOW_S) == (DemoteOwner("s", "idle for 500 s"),)
    never = PlanPolicy(to_host_s=None, to_storage_s=None, high=0.9, low=0.5, page_tokens=PAGE)
    assert plan([entry], None, never, NOW_S) == ()


@pytest.mark.parametrize("wrong", [{"low": 0.95}, {"high": 1.1}, {"to_storage_s": 50}])
def test_a_policy_that_cannot_be_is_refused(wrong):
    """Marks and times out of order are refused with their values."""
    good = {"to_host_s": 100, "to_storage_s": 500, "high": 0.9, "low": 0.5, "page_tokens": PAGE}
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        PlanPolicy(**(good | wrong))
