"""Branches of a session and the token sequence that each is."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sessions.errors import BrokenTree, TurnNotFound
from sessions.tree import branches, content, leaves, path
from tests.support.conversations import make_image, make_turn


@st.composite
def forests(draw):
    """Turns in the order of their commits, each after an earlier one or none, with images inside their own input."""
    turns, lengths = [], {None: 0}
    for n in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from([None, *turns]))
        start = at = lengths[parent.id if parent else None]
        spans = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=3))
        images = []
        for space, tokens in spans:
            images.append(make_image(at + space, tokens, digest=f"{n}.{len(images)}"))
            at += space + tokens
        input_ids = tuple(range(start, at + draw(st.integers(0, 2))))
        output_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=3)))
        turns.append(make_turn(f"r_{n}", parent, input_ids=input_ids, output_ids=output_ids, input=tuple(images)))
        lengths[turns[-1].id] = start + len(input_ids) + len(output_ids)
    return turns


@settings(deadline=None)
@given(forests())
def test_every_branch_is_the_concatenation_of_its_turns(turns):
    """Branches end in the turns nothing follows, cover all turns, and their content is token by token that of their turns."""
    found = branches(turns)
    assert [branch[-1] for branch in found] == list(leaves(turns))
    assert {turn.id for branch in found for turn in branch} == {turn.id for turn in turns}
    for branch in found:
        whole = content(branch)
        assert list(whole.token_ids) == [t for turn in branch for t in (*turn.input_ids, *turn.output_ids)]
        assert list(whole.images) == [image for turn in branch for image in turn.input]
        assert [image.start for image in whole.images] == sorted(image.start for image in whole.images)
        for turn in branch:
            part = content(path(turns, turn.id))
            assert whole.token_ids[: len(part.token_ids)] == part.token_ids


@pytest.mark.parametrize(("images", "numbers"), [
    ([make_image(5, 3)], r"3 tokens at 5 is not inside \[5, 7\)"),
    ([make_image(4, 2)], r"2 tokens at 4 is not inside \[5, 7\)"),
    ([make_image(5, 0)], r"0 tokens at 5"),
    ([make_image(-1, 1)], r"1 tokens at -1"),
    ([make_image(5, 2), make_image(6, 1)], r"1 tokens at 6 is not inside \[7, 7\)"),
    ([make_image(6, 1), make_image(5, 1)], r"1 tokens at 5 is not inside \[7, 7\)"),
])
def test_an_image_outside_its_turn_is_refused(images, numbers):
    """Images past the input, in another turn, empty, negative, overlapping or out of order: refused with the numbers."""
    first = make_turn("r_1", input_ids=(1, 2, 3), output_ids=(7, 8))
    with pytest.raises(BrokenTree, match=numbers):
        content([first, make_turn("r_2", first, input_ids=(4, 5), input=tuple(images))])
    good = make_turn("r_2", first, input_ids=(4, 5), input=(make_image(5, 2),))
    assert content([first, good]).token_ids == (1, 2, 3, 7, 8, 4, 5, 7, 8)


def test_turns_that_contradict_each_other_are_refused():
    """A wrong order, a missing parent, a wrong index, a circle and an unknown turn each raise."""
    first = make_turn("r_1")
    second = make_turn("r_2", first)
    for wrong in ([second], [second, first], [first, first], [replace(first, index=1)], [first, replace(second, index=0)]):
        with pytest.raises(BrokenTree):
            content(wrong)
    for turns in ([second], [replace(first, parent_id="r_2"), second]):
        with pytest.raises(BrokenTree):
            path(turns, "r_2")
    with pytest.raises(TurnNotFound):
        path([first, second], "r_3")
    assert content(path([second, first], "r_2")).token_ids == (1, 2, 3, 7, 8, 1, 2, 3, 7, 8)
