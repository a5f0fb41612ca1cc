"""The questions that judge the demo model, on pictures from a seed that training never uses; a row of the table for each category."""

import random
from typing import NamedTuple

from server.demo.dialogues import Dialogue, asked, recalled
from server.demo.vocabulary import UNSEEN_WORDS

CATEGORIES = ("color", "shape", "background", "position", "count", "letter", "number_1", "number_2", "number_3", "number_4", "word", "edge", "plain")
PLACES = {"first": 0, "second": 1, "third": 2, "last": -1}


class Case(NamedTuple):
    row: str
    dialogue: Dialogue
    """The last turn is the question; the turns before it have their right answers."""


def cases(seed: int, each: int) -> list[Case]:
    """`each` cases for every category and every kind of recall, and as many with words that training never printed."""
    made = []
    for row in CATEGORIES:
        r = random.Random(f"{seed} {row}")
        made += [Case(row, asked(r, row)) for _ in range(each)]
    for name, place in PLACES.items():
        for named in (True, False):
            row = f"recall_{name}_{'named' if named else 'unnamed'}"
            r = random.Random(f"{seed} {row}")
            made += [Case(row, recalled(r, place, named)) for _ in range(each)]
    r = random.Random(f"{seed} unseen")
    return made + [Case("word_unseen", asked(r, "word", word=r.choice(UNSEEN_WORDS))) for _ in range(each)]
