"""The generator of the demo model's training pictures and conversations."""

import hashlib
import random

import numpy as np
import pytest

from server.demo.canvas import COLORS
from server.demo.cases import CATEGORIES, PLACES, cases
from server.demo.dialogues import DESCRIBE, SHOWN, asked, dialogue, recalled
from server.demo.encoding import IMAGE_PAD, encode, seen, tokenizer
from server.demo.packing import Replay, Shape, pack
from server.demo.scenes import KINDS, scene
from server.demo.targets import IGNORED, SLOTS, cells, slots
from server.demo.vocabulary import SHAPES, TRAINED_WORDS, UNSEEN_WORDS


def fingerprint(seed: int) -> str:
    made, digest = dialogue(random.Random(seed)), hashlib.sha256()
    for turn in made.turns:
        for part in turn.parts:
            digest.update(part.encode() if isinstance(part, str) else part.tobytes())
        digest.update(turn.answer.encode())
    return digest.hexdigest()


def test_the_same_seed_gives_the_same_pixels_questions_and_answers() -> None:
    """Twelve conversations are equal when drawn again, and no two of them are equal to each other."""
    drawn = [fingerprint(seed) for seed in range(12)]
    assert drawn == [fingerprint(seed) for seed in range(12)]
    assert len(set(drawn)) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_answers_say_what_is_drawn(kind: str) -> None:
    """Every answer about a colour, a shape or a text names the one that the picture's facts have."""
    for seed in range(8):
        shown = scene(random.Random(seed), kind)
        assert shown.kind == kind and shown.questions and shown.phrase
        for question in shown.questions:
            if question.category == "background":
                assert question.answer == f"The background is {shown.facts['bg']}."
            if question.category == "color" and "fg" in shown.facts:
                assert question.answer.endswith(f" {shown.facts['fg']}.")
            if question.category in ("word", "letter") or question.category.startswith("number_"):
                assert shown.facts["text"] in question.answer


def test_a_plain_shape_has_the_colours_that_its_answers_name() -> None:
    """The middle of a single full shape and the picture's corners are near a shade of the named colours."""
    checked = 0
    for seed in range(60):
        shown = scene(random.Random(seed), "one")
        if shown.facts["shape"] in ("ring", "star", "triangle"):
            continue
        box, pixels = shown.boxes[0], np.asarray(shown.image).astype(int)
        x, y = int((box.left + box.right) / 2 * shown.image.width), int((box.top + box.bottom) / 2 * shown.image.height)
        near = min(abs(pixels[y, x] - np.array(shade)).max() for shade in COLORS[shown.facts["fg"]])
        assert near <= 45, (seed, shown.facts)
        checked += 1
    assert checked > 20


@pytest.mark.parametrize("category", CATEGORIES)
def test_each_category_asks_its_own_question(category: str) -> None:
    """A case holds one picture and one question of its category; a number has the digits that its category says."""
    for seed in range(5):
        made = asked(random.Random(seed), category)
        assert [turn.category for turn in made.turns] == [category] and len(made.scenes) == 1
        if category.startswith("number_"):
            assert len(made.scenes[0].facts["text"]) == int(category[-1])


@pytest.mark.parametrize(("name", "place"), PLACES.items())
@pytest.mark.parametrize("named", [True, False])
def test_recall_asks_for_the_picture_at_that_place(name: str, place: int, named: bool) -> None:
    """The last answer describes that picture; the turns before name it only where they are meant to."""
    for seed in range(5):
        made = recalled(random.Random(seed), place, named)
        *before, last = made.turns
        assert last.answer == f"The {name} image shows {made.scenes[place].phrase}."
        assert (made.scenes[place].phrase in " ".join(turn.answer for turn in before)) is named
        assert {turn.parts[-1] for turn in before} <= set(DESCRIBE if named else [text for text, _ in SHOWN])


def test_cases_cover_every_row_evenly_and_repeat_for_their_seed() -> None:
    """Each category, each kind of recall and the unseen words have as many cases as asked for."""
    made = cases(5, 2)
    assert len(made) == 2 * (len(CATEGORIES) + 2 * len(PLACES) + 1)
    assert [case.dialogue.turns[-1].answer for case in made] == [case.dialogue.turns[-1].answer for case in cases(5, 2)]


def test_words_for_evaluation_are_not_in_the_training_list() -> None:
    """The list of unseen words shares none with the list that training draws from."""
    assert not set(TRAINED_WORDS) & set(UNSEEN_WORDS)


def test_encoding_counts_one_token_for_each_square_of_28_pixels_and_marks_answers_only() -> None:
    """Image tokens are those of the resized picture; what is marked as answer decodes to the answers and their ends."""
    made = dialogue(random.Random(4))
    sample = encode(made)
    sizes = [seen(shown.image).size for shown in made.scenes]
    assert int((sample.ids == IMAGE_PAD).sum()) == sum(width // 28 * (height // 28) for width, height in sizes)
    text = tokenizer().decode(sample.ids[sample.answers].tolist(), skip_special_tokens=False)
    assert text == "".join(turn.answer + "<|im_end|>" for turn in made.turns)


def test_a_pack_keeps_conversations_apart_and_refuses_too_many() -> None:
    """Starts and places point at each conversation's own tokens; texts of the base model follow; one too many is an error."""
    samples = [encode(asked(random.Random(seed), "shape")) for seed in range(3)]
    tokens, patches = sum(len(s.ids) for s in samples), sum(len(p.patches) for s in samples for p in s.pictures)
    replay = Replay(np.arange(100, 140, dtype=np.int32), np.array([0, 20, 40]), np.array([5, 8]))
    made = pack(samples, Shape(tokens + 90, patches + 40, 60), replay, random.Random(1))
    assert made.starts[:4].tolist() == [0, *np.cumsum([len(s.ids) for s in samples])] and made.starts[-1] == tokens + 90
    assert (made.ids[made.image_places[: patches // 4]] == IMAGE_PAD).all() and (made.image_places[patches // 4 :] == tokens + 90).all()
    assert (made.ids[made.replay_places] == replay.ids[made.replay_rows]).all() and len(made.replay_places) > 0
    with pytest.raises(ValueError, match="3 conversations"):
        pack(samples, Shape(tokens - 1, patches, 0))


def test_probe_targets_name_what_a_token_covers() -> None:
    """Every character and shape has at least one cell, and a fact that a kind of picture lacks is not asked."""
    for seed in range(12):
        shown = scene(random.Random(seed))
        grid = cells(shown, 6, 6)
        assert (grid[:, 0] > 0).any() == bool(shown.boxes)
        asked_slots = dict(zip(SLOTS, slots(shown).tolist(), strict=True))
        assert (asked_slots["character_0"] == IGNORED) == ("text" not in shown.facts)
        assert asked_slots["kind"] == KINDS.index(shown.kind)
        if "shape" in shown.facts:
            assert asked_slots["shape"] == SHAPES.index(shown.facts["shape"])
