"""PURE. A session's turns as a tree: branches, and the one token sequence that each of them is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import BrokenTree, TurnNotFound
from .model import ImagePart, Turn

TOKEN_ID_LIMIT = 1 << 32
"""Token ids are stored in 32 bits."""


@dataclass(frozen=True, slots=True)
class BranchContent:
    """What a branch's KV is the KV of."""

    token_ids: tuple[int, ...]
    images: tuple[ImagePart, ...]
    """In order; the span of each is [start, start + tokens)."""


def check_append(turn: Turn, parent_index: int | None) -> None:
    """May the turn follow that parent (None: it begins a branch)? Raises BrokenTree."""
    expected = 0 if parent_index is None else parent_index + 1
    if turn.index != expected:
        raise BrokenTree(f"{turn.id} has the index {turn.index}, its place is {expected}")
    for token_id in (*turn.input_ids, *turn.output_ids):
        if not 0 <= token_id < TOKEN_ID_LIMIT:
            raise BrokenTree(f"{turn.id} has the token id {token_id}, which is not below {TOKEN_ID_LIMIT}")


def content(branch: Sequence[Turn]) -> BranchContent:
    """Concatenate a branch, first turn first. Raises BrokenTree, naming the turn and the numbers that contradict.

    Every image lies whole in the input of the turn that brought it, and after the image before it.
    """
    token_ids: list[int] = []
    images: list[ImagePart] = []
    parent: Turn | None = None
    free = 0  # the first index that no image covers yet
    for turn in branch:
        if turn.parent_id != (parent.id if parent else None):
            raise BrokenTree(f"{turn.id} follows {turn.parent_id}, not {parent.id if parent else None}")
        check_append(turn, parent.index if parent else None)
        free = max(free, len(token_ids))
        token_ids += turn.input_ids
        for image in (part for part in turn.input if isinstance(part, ImagePart)):
            end = image.start + image.tokens
            if image.tokens < 1 or image.start < free or end > len(token_ids):
                raise BrokenTree(f"{turn.id}: an image of {image.tokens} tokens at {image.start} is not inside "
                                 f"[{free}, {len(token_ids)})")
            images.append(image)
            free = end
        token_ids += turn.output_ids
        parent = turn
    return BranchContent(tuple(token_ids), tuple(images))


def path(turns: Iterable[Turn], turn_id: str) -> tuple[Turn, ...]:
    """The branch that ends in that turn, first turn first. Raises TurnNotFound; BrokenTree if a parent is missing."""
    by_id = {turn.id: turn for turn in turns}
    if turn_id not in by_id:
        raise TurnNotFound(turn_id)
    found: dict[str, Turn] = {}
    at: str | None = turn_id
    while at is not None:
        if at in found or at not in by_id:
            raise BrokenTree(f"{turn_id} does not lead to a first turn: {at} is {'its own' if at in found else 'no'} ancestor")
        found[at] = by_id[at]
        at = by_id[at].parent_id
    return tuple(reversed(found.values()))


def leaves(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns that nothing follows, in the order given: each is the end of one branch."""
    parents = {turn.parent_id for turn in turns}
    return tuple(turn for turn in turns if turn.id not in parents)


def branches(turns: Sequence[Turn]) -> tuple[tuple[Turn, ...], ...]:
    """Every branch of a session, whole. Together they are all that the session's KV can be."""
    return tuple(path(turns, leaf.id) for leaf in leaves(turns))
