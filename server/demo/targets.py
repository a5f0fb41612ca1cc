"""What the probes are asked about a picture: a few facts of the whole, and what each of its tokens covers."""

import numpy as np

from server.demo.canvas import NAMES
from server.demo.scenes import CHARACTERS, KINDS, SIDES, Scene
from server.demo.vocabulary import SHAPES

MOST_CHARACTERS = 5
_THINGS = tuple(f"{color} {shape}" for color in NAMES for shape in SHAPES)
SLOTS: dict[str, tuple[str, ...]] = {
    "kind": KINDS, "fg": NAMES, "bg": NAMES, "shape": SHAPES, "count": tuple("012345"), "edge": SIDES,
    **{side: _THINGS for side in SIDES},
    **{f"character_{i}": ("", *CHARACTERS) for i in range(MOST_CHARACTERS)},
}  # fmt: skip
CELL_CLASSES = (1 + len(CHARACTERS) + len(SHAPES), 1 + MOST_CHARACTERS)
"""What is at a token's centre, 0 for nothing; which character of the text it is, from 1."""
IGNORED = -100

_NUMBER = {slot: {value: i for i, value in enumerate(values)} for slot, values in SLOTS.items()}
_WHAT = {what: i + 1 for i, what in enumerate((*CHARACTERS, *SHAPES))}


def slots(shown: Scene) -> np.ndarray:
    """One class for each of SLOTS, IGNORED where the picture has no such thing."""
    facts = {"kind": shown.kind} | shown.facts
    text = facts.pop("text", None)
    if text is not None:
        facts |= {f"character_{i}": text[i : i + 1] for i in range(MOST_CHARACTERS)}
    return np.array([_NUMBER[slot][facts[slot]] if slot in facts else IGNORED for slot in SLOTS], np.int16)


def cells(shown: Scene, rows: int, columns: int) -> np.ndarray:
    """(rows * columns, 2): the classes of CELL_CLASSES."""
    grid = np.zeros((rows, columns, 2), np.int16)
    for box in shown.boxes:
        top, bottom = _span(box.top, box.bottom, rows)
        left, right = _span(box.left, box.right, columns)
        grid[top:bottom, left:right] = _WHAT[box.what], box.order
    return grid.reshape(-1, 2)


def _span(low: float, high: float, cells_: int) -> tuple[int, int]:
    """The cells whose centres lie between, and at least the cell in the middle."""
    first, last = int(np.ceil(low * cells_ - 0.5)), int(np.ceil(high * cells_ - 0.5))
    if first >= last:
        first = min(cells_ - 1, max(0, int((low + high) / 2 * cells_)))
        last = first + 1
    return max(0, first), min(cells_, last)
