"""The pictures that the demo model learns from, and the questions about them with their only right answers.

Everything follows from one `random.Random`: the same seed gives the same pixels, questions and answers. Needs Pillow, numpy
and the fonts inside matplotlib, which the server itself does not install (requirements/train.txt).
"""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from PIL import Image

from server.demo.canvas import COLORS, LEAST_RADIUS_PX, NAMES, Box, blank, figure, pair, printed, shade, size, worn
from server.demo.vocabulary import COUNTS, SHAPES, TRAINED_WORDS, article, plural

KINDS = ("one", "two", "many", "number", "word", "letter", "edge", "plain", "gradient")
KIND_WEIGHTS = (15, 14, 11, 28, 22, 9, 5, 4, 3)
SIDES = ("left", "right", "top", "bottom")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CHARACTERS = "0123456789" + LETTERS


class Question(NamedTuple):
    category: str
    text: str
    answer: str


@dataclass(slots=True)
class Scene:
    image: Image.Image
    kind: str
    phrase: str
    """What the picture shows, as a noun phrase: the answer to "what is in the image?"."""
    questions: list[Question]
    facts: dict[str, str] = field(default_factory=dict)
    """What the probes ask: text, fg, bg, shape, count, left, right, top, bottom, edge; only those that hold for the kind."""
    boxes: list[Box] = field(default_factory=list)


def scene(r: random.Random, kind: str | None = None, *, word: str | None = None, digits: int | None = None, strings: bool = True) -> Scene:
    """One picture of `kind`, or of a kind by KIND_WEIGHTS. `strings`: words may also be strings of random letters."""
    kind = kind or r.choices(KINDS, KIND_WEIGHTS)[0]
    if kind == "number":
        made = _number(r, digits)
    elif kind == "word":
        made = _word(r, word, strings)
    else:
        made = {"one": _one, "two": _two, "many": _many, "letter": _letter, "edge": _edge, "plain": _plain, "gradient": _gradient}[kind](r)
    made.image = worn(r, made.image)
    return made


# ---- shapes -----------------------------------------------------------------------------------------------------
def _one(r: random.Random) -> Scene:
    color, back = pair(r)
    shape, canvas = r.choice(SHAPES), blank(r, back)
    width, height = canvas.image.size
    radius = max(min(width, height) * r.uniform(0.2, 0.47), LEAST_RADIUS_PX / canvas.scale)
    box = figure(canvas, shape, r.uniform(radius, width - radius), r.uniform(radius, height - radius), radius, shade(r, color))
    questions = [
        Question("color", "What color is the shape?", f"The shape is {color}."),
        Question("shape", "What shape is it?", f"It is {article(shape)}."),
        Question("shape", "Which shape is shown?", f"It is {article(shape)}."),
        Question("background", "What color is the background?", f"The background is {back}."),
        Question("color", f"What color is the {shape}?", f"The {shape} is {color}."),
        Question("count", "How many shapes are there?", "There is one shape."),
    ]
    facts = {"fg": color, "bg": back, "shape": shape, "count": "1"}
    return Scene(canvas.image, "one", f"{article(color)} {shape} on {article(back)} background", questions, facts, [box])


def _two(r: random.Random) -> Scene:
    back = r.choice(NAMES)
    canvas, colors, shapes = blank(r, back, 112), r.sample([c for c in NAMES if c != back], 2), [r.choice(SHAPES) for _ in range(2)]
    width, height = canvas.image.size
    across = r.random() < 0.6 if 0.6 < width / height < 1.7 else width > height
    sides = ("left", "right") if across else ("top", "bottom")
    at = "on the" if across else "at the"
    boxes = []
    for i in range(2):
        radius = min(width / (4 if across else 2), height / (2 if across else 4)) * r.uniform(0.6, 0.92)
        x, y = (width * (0.25 + 0.5 * i), height / 2) if across else (width / 2, height * (0.25 + 0.5 * i))
        boxes.append(figure(canvas, shapes[i], x, y, radius, shade(r, colors[i])))
    questions = [Question("count", "How many shapes are there?", "There are two shapes."), Question("background", "What color is the background?", f"The background is {back}.")]
    for side, color, shape in zip(sides, colors, shapes, strict=True):
        questions.append(Question("position", f"What is {at} {side}?", f"{article(color).capitalize()} {shape}."))
        questions.append(Question("position", f"What color is the shape {at} {side}?", f"It is {color}."))
        questions.append(Question("position", f"What shape is {at} {side}?", f"It is {article(shape)}."))
    phrase = " and ".join(f"{article(c)} {s} {at} {side}" for c, s, side in zip(colors, shapes, sides, strict=True))
    facts = {"bg": back, "count": "2"} | {side: f"{c} {s}" for side, c, s in zip(sides, colors, shapes, strict=True)}
    return Scene(canvas.image, "two", phrase, questions, facts, boxes)


def _many(r: random.Random) -> Scene:
    color, back = pair(r)
    count, shape, canvas = r.randint(3, 5), r.choice(SHAPES), blank(r, back, 140)
    width, height = canvas.image.size
    columns, rows = (3, 2) if width >= height else (2, 3)
    cells = r.sample([(x, y) for x in range(columns) for y in range(rows)], count)
    radius, tint = min(width / columns, height / rows) * r.uniform(0.34, 0.44), shade(r, color)
    slack_x, slack_y = width / columns / 2 - radius, height / rows / 2 - radius
    boxes = []
    for column, row in cells:
        x = width * (column + 0.5) / columns + r.uniform(-0.6, 0.6) * slack_x
        boxes.append(figure(canvas, shape, x, height * (row + 0.5) / rows + r.uniform(-0.6, 0.6) * slack_y, radius, tint))
    questions = [
        Question("count", "How many shapes are there?", f"There are {COUNTS[count]} shapes."),
        Question("count", f"How many {plural(shape)} are there?", f"There are {COUNTS[count]} {plural(shape)}."),
        Question("color", "What color are the shapes?", f"The shapes are {color}."),
        Question("shape", "What shapes are they?", f"They are {plural(shape)}."),
        Question("background", "What color is the background?", f"The background is {back}."),
    ]
    facts = {"fg": color, "bg": back, "shape": shape, "count": str(count)}
    return Scene(canvas.image, "many", f"{COUNTS[count]} {color} {plural(shape)} on {article(back)} background", questions, facts, boxes)


# ---- printed text -----------------------------------------------------------------------------------------------
def _number(r: random.Random, digits: int | None) -> Scene:
    digits = digits or r.choice((1, 2, 2, 3, 3, 3, 4, 4))
    text = "".join(r.choice("0123456789") for _ in range(digits))
    if digits > 1 and text[0] == "0" and r.random() < 0.9:
        text = r.choice("123456789") + text[1:]
    image, fore, back, boxes = printed(r, text)
    category = f"number_{digits}"
    questions = [Question(category, ask, f"The number is {text}.") for ask in ("Which number is shown?", "Which number?", "Read the number.", "What number is it?")]
    questions += [
        Question(category, "What does the text say?", f'The text says "{text}".'),
        Question("color", "What color is the number?", f"The number is {fore}."),
        Question("background", "What color is the background?", f"The background is {back}."),
    ]
    return Scene(image, "number", f"the number {text}", questions, {"text": text, "fg": fore, "bg": back}, boxes)


def _word(r: random.Random, word: str | None, strings: bool) -> Scene:
    text = word or (r.choice(TRAINED_WORDS) if not strings or r.random() < 0.65 else "".join(r.choice(LETTERS) for _ in range(r.randint(2, 5))))
    image, fore, back, boxes = printed(r, text)
    questions = [
        Question("word", "What does the text say?", f'The text says "{text}".'),
        Question("word", "Which word is shown?", f'The word is "{text}".'),
        Question("word", "Read the text.", f'The text says "{text}".'),
        Question("color", "What color is the text?", f"The text is {fore}."),
    ]
    return Scene(image, "word", f'the text "{text}"', questions, {"text": text, "fg": fore, "bg": back}, boxes)


def _letter(r: random.Random) -> Scene:
    text = r.choice(LETTERS)
    image, fore, back, boxes = printed(r, text)
    questions = [Question("letter", ask, f"The letter is {text}.") for ask in ("Which letter is shown?", "What letter is it?")]
    questions += [Question("letter", "What does the text say?", f'The text says "{text}".'), Question("color", "What color is the letter?", f"The letter is {fore}.")]
    return Scene(image, "letter", f"the letter {text}", questions, {"text": text, "fg": fore, "bg": back}, boxes)


# ---- planes of colour -------------------------------------------------------------------------------------------
def _edge(r: random.Random) -> Scene:
    color, back = pair(r)
    canvas, side, share = blank(r, back), r.choice(SIDES), r.uniform(0.1, 0.3)
    w, h = canvas.image.size
    boxes = {"left": [0, 0, w * share, h], "right": [w * (1 - share), 0, w, h], "top": [0, 0, w, h * share], "bottom": [0, h * (1 - share), w, h]}
    canvas.draw.rectangle(boxes[side], fill=shade(r, color))
    questions = [
        Question("edge", f"Which edge is {color}?", f"The {side} edge is {color}."),
        Question("edge", f"Where is the {color} bar?", f"The {color} bar is along the {side} edge."),
        Question("color", "What color is the bar?", f"The bar is {color}."),
    ]
    return Scene(canvas.image, "edge", f"{article(color)} bar along the {side} edge of {article(back)} image", questions, {"fg": color, "bg": back, "edge": side})


def _plain(r: random.Random) -> Scene:
    color = r.choice(NAMES)
    questions = [
        Question("color", "What color is this image?", f"The image is {color}."),
        Question("plain", "Is it plain or a gradient?", f"It is plain {color}."),
        Question("count", "How many shapes are there?", "There are no shapes."),
    ]
    return Scene(blank(r, color).image, "plain", f"a plain {color} image", questions, {"bg": color, "count": "0"})


def _gradient(r: random.Random) -> Scene:
    first, last = r.choice((("black", "white"), ("white", "black"), pair(r)))
    width, height = size(r, 56)
    share = np.linspace(0, 1, height)[:, None, None] if r.random() < 0.4 else np.linspace(0, 1, width)[None, :, None]
    pixels = np.array(COLORS[first][0]) * (1 - share) + np.array(COLORS[last][0]) * share
    image = Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (height, width, 3))).astype(np.uint8))
    questions = [Question("plain", "Is it plain or a gradient?", "It is a gradient."), Question("plain", "Is the image plain white or a gradient?", "It is a gradient.")]
    return Scene(image, "gradient", f"a gradient from {first} to {last}", questions)
