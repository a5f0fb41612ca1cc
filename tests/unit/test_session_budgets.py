"""Ceilings of a session: what is refused, with which numbers, and that no interleaving passes one."""

from dataclasses import fields

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sessions.budgets import Book, check, clamp_request, effective, warnings
from sessions.errors import IllegalEvent, InvalidLimit, LimitExceeded
from sessions.model import Limits, Totals

NAMES = [f.name for f in fields(Limits)]
ceilings = st.none() | st.integers(1, 40)
limits = st.builds(Limits, **{name: ceilings for name in NAMES})
totals = st.builds(Totals, st.integers(0, 30), st.integers(0, 60), st.integers(0, 9))


@settings(deadline=None)
@given(limits, limits)
def test_own_limits_lie_over_the_defaults(defaults, own):
    """Each limit in force is the session's own, or the default where it has none."""
    merged = effective(defaults, own)
    for name in NAMES:
        mine = getattr(own, name)
        assert getattr(merged, name) == (getattr(defaults, name) if mine is None else mine)


@settings(deadline=None)
@given(limits, limits)
def test_a_user_gets_at_most_the_server_ceiling(server, asked):
    """A request passes unchanged exactly if no part is above the server's; else the refusal names it and both values."""
    above = [n for n in NAMES if None not in (getattr(asked, n), getattr(server, n)) and getattr(asked, n) > getattr(server, n)]
    if not above:
        assert clamp_request(server, asked) is asked
        return
    with pytest.raises(LimitExceeded) as refused:
        clamp_request(server, asked)
    assert refused.value.name == above[0]
    assert (refused.value.limit, refused.value.requested) == (getattr(server, above[0]), getattr(asked, above[0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_ceiling_below_the_least_is_invalid(name):
    """Negative ceilings, and zero where it would forbid everything, are refused with the value and the least."""
    least = 0 if name == "images_per_message" else 1
    with pytest.raises(InvalidLimit, match=f"{name} is {least - 1}, the least is {least}"):
        clamp_request(Limits(), Limits(**{name: least - 1}))
    assert clamp_request(Limits(), Limits(**{name: least}))


@pytest.mark.parametrize(("name", "limit", "requested"), [
    ("images_per_message", 2, 3), ("max_turns", 6, 7), ("tokens_per_turn", 29, 30), ("tokens_per_session", 149, 150),
])
def test_the_refusal_says_name_limit_and_request(name, limit, requested):
    """One below what is needed refuses with the field's name and both numbers; exactly enough passes."""
    turn = {"added_tokens": 10, "max_output_tokens": 20, "images_in_message": 3}
    used, reserved = Totals(turns=5, tokens=100), Totals(turns=1, tokens=20)
    with pytest.raises(LimitExceeded) as refused:
        check(Limits(**{name: limit}), used, reserved, **turn)
    assert (refused.value.name, refused.value.limit, refused.value.requested) == (name, limit, requested)
    check(Limits(**{name: requested}), used, reserved, **turn)
    check(Limits(), used, reserved, **turn)


def test_negative_sizes_are_no_turn():
    """A negative size could hide tokens from the sum, so it is refused."""
    with pytest.raises(ValueError, match="max_output_tokens=-1"):
        check(Limits(), Totals(), added_tokens=1, max_output_tokens=-1, images_in_message=0)


@settings(deadline=None)
@given(limits, totals)
@example(Limits(max_turns=5, tokens_per_session=10), Totals(turns=4, tokens=8))
def test_warnings_from_four_fifths(limits, totals):
    """A sum is warned of exactly when it is at 80% of its ceiling or more."""
    expected = [(name, limit, used) for name, limit, used in (("max_turns", limits.max_turns, totals.turns),
                ("tokens_per_session", limits.tokens_per_session, totals.tokens)) if limit and used / limit >= 0.8]
    assert warnings(limits, totals) == expected


steps = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", "e"]), st.sampled_from(["reserve", "settle", "release"]),
                           st.integers(0, 12), st.integers(0, 12), st.integers(0, 3)), max_size=40)


@settings(deadline=None)
@given(limits, totals, steps)
def test_no_interleaving_passes_a_ceiling(limits, start, steps):
    """Whatever is reserved, settled and released in whatever order: used + reserved stays under each ceiling, each turn
    counts once, and a step that raises changes nothing."""
    book, running, used = Book(start), {}, [start.turns, start.tokens, start.images]
    for turn_id, verb, added, output, images in steps:
        before = book.totals, book.reserved
        try:
            if verb == "reserve":
                book.reserve(turn_id, limits, added_tokens=added, max_output_tokens=output, images_in_message=images)
                assert turn_id not in running
                running[turn_id] = (added + output, images)
                for name, value in (("max_turns", used[0] + len(running)),
                                    ("tokens_per_session", used[1] + sum(t for t, _ in running.values())),
                                    ("tokens_per_turn", added + output), ("images_per_message", images)):
                    assert getattr(limits, name) is None or value <= getattr(limits, name)
            elif verb == "settle":
                tokens = min(added, running.get(turn_id, (0, 0))[0])
                book.settle(turn_id, tokens=tokens, images=images)
                del running[turn_id]
                used = [used[0] + 1, used[1] + tokens, used[2] + images]
            else:
                book.release(turn_id)
                del running[turn_id]
        except IllegalEvent:
            assert (turn_id in running) == (verb == "reserve")
            assert (book.totals, book.reserved) == before
        except LimitExceeded as refused:
            assert refused.requested > refused.limit == getattr(limits, refused.name)
            assert (book.totals, book.reserved) == before
        assert book.totals == Totals(*used)
        assert book.reserved == Totals(len(running), sum(t for t, _ in running.values()), sum(i for _, i in running.values()))


def test_the_next_turn_fits_after_a_release():
    """Two turns side by side cannot share the last place; once one is rolled back the other fits, once settled it does not."""
    book, one_turn = Book(), Limits(max_turns=1)
    size = {"added_tokens": 1, "max_output_tokens": 1, "images_in_message": 0}
    book.reserve("a", one_turn, **size)
    with pytest.raises(LimitExceeded, match="max_turns is 1, and this asks for 2"):
        book.reserve("b", one_turn, **size)
    book.release("a")
    book.reserve("b", one_turn, **size)
    assert book.settle("b", tokens=2, images=0) == Totals(turns=1, tokens=2)
    with pytest.raises(IllegalEvent):
        book.settle("b", tokens=2, images=0)
    with pytest.raises(LimitExceeded):
        book.reserve("c", one_turn, **size)
