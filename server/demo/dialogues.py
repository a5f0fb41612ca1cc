"""Conversations about drawn pictures: what is asked, in which order, and the only right answer to each question."""

import random
from dataclasses import dataclass, field

from PIL import Image

from server.demo.scenes import Question, Scene, scene
from server.demo.vocabulary import COUNTS, ORDINALS

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the chat template says when a conversation has no system message of its own."""
OTHER_SYSTEMS = ("You are a helpful assistant.", "You are a friendly assistant that answers questions about pictures.", "Answer briefly.")
DESCRIBE = (
    "Describe the image.", "What is in this picture?", "What do you see?", "What is in the image?", "Describe this picture.",
    "What does this image show?", "What is this?", "What is shown here?",
)  # fmt: skip
SHOWN = (("Here is an image.", "I see it."), ("Remember this image.", "I will remember it."), ("Look at this picture.", "I see it."))
"""Turns that show a picture and say nothing about it."""
ASIDES = (
    ("What is the capital of France?", "The capital of France is Paris."), ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."), ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."), ("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."), ("What is 2 plus 2?", "2 plus 2 is 4."),
    ("How many days are in a week?", "There are seven days in a week."), ("What do bees make?", "Bees make honey."),
    ("What is the largest planet?", "The largest planet is Jupiter."), ("What color is the sky?", "The sky is blue."), ("What do cows drink?", "Cows drink water."),
    ("Hello!", "Hello! How can I help you today?"), ("Thank you.", "You're welcome!"), ("Who are you?", "I am SmolLM, a helpful AI assistant."),
)  # fmt: skip
"""Turns that have nothing to do with any picture."""
LABELS = "ABCD"

Part = str | Image.Image


@dataclass(slots=True)
class Turn:
    parts: list[Part]
    answer: str
    category: str


@dataclass(slots=True)
class Dialogue:
    system: str = SYSTEM
    turns: list[Turn] = field(default_factory=list)
    scenes: list[Scene] = field(default_factory=list)
    """In the order in which the turns show them."""

    def ask(self, question: str, answer: str, category: str, image: Image.Image | None = None, first: bool = True) -> None:
        parts: list[Part] = [question] if image is None else [image, question] if first else [question, image]
        self.turns.append(Turn(parts, answer, category))


def dialogue(r: random.Random) -> Dialogue:
    """One conversation of 1 to 4 pictures, as training mixes them."""
    made = Dialogue(SYSTEM if r.random() < 0.85 else r.choice(OTHER_SYSTEMS))
    count = r.choices((1, 2, 3, 4), (40, 32, 18, 10))[0]
    made.scenes = [scene(r) for _ in range(count)]
    if count > 1 and r.random() < 0.15:
        _together(r, made)
    else:
        for shown in made.scenes:
            _show(r, made, shown)
            if r.random() < 0.08:
                made.ask(*r.choice(ASIDES), "aside")
    if count > 1:
        for _ in range(r.randint(1, 3)):
            recall(r, made)
    return made


def _show(r: random.Random, made: Dialogue, shown: Scene) -> None:
    """The picture with a question, then more questions about it: an image costs far more to process than a question."""
    way, first = r.random(), r.random() < 0.8
    if way < 0.25:
        made.ask(r.choice(DESCRIBE), f"The image shows {shown.phrase}.", "describe", shown.image, first)
    elif way < 0.45:
        made.ask(*r.choice(SHOWN), "shown", shown.image, first)
    else:
        question = r.choice(shown.questions)
        made.ask(question.text, question.answer, question.category, shown.image, first)
    for question in r.sample(shown.questions, min(len(shown.questions), r.choices((0, 1, 2, 3), (30, 30, 25, 15))[0])):
        made.ask(question.text, question.answer, question.category)


def _together(r: random.Random, made: Dialogue) -> None:
    """Several pictures in one message, with or without labels."""
    which = r.randrange(len(made.scenes))
    if r.random() < 0.5:
        parts: list[Part] = []
        for label, shown in zip(LABELS, made.scenes, strict=False):
            parts += [f"{label}: ", shown.image, " "]
        question = r.choice(made.scenes[which].questions)
        made.turns.append(Turn([*parts, f"About image {LABELS[which]}: {question.text}"], question.answer, question.category))
    else:
        parts = [shown.image for shown in made.scenes]
        name = ORDINALS[which]
        made.turns.append(Turn([*parts, f"What is in the {name} image?"], f"The {name} image shows {made.scenes[which].phrase}.", "together"))


def recall(r: random.Random, made: Dialogue, which: int | None = None) -> None:
    """A question about a picture shown earlier; the last one is `which` -1."""
    if which is None:
        which = r.choice([-1, *range(len(made.scenes))])
    shown, name = made.scenes[which], "last" if which == -1 else ORDINALS[which]
    way = r.random()
    if way < 0.62:
        text = r.choice((f"What was in the {name} image?", f"What was in the {name} picture?", f"Describe the {name} image."))
        made.ask(text, f"The {name} image shows {shown.phrase}.", f"recall_{name}")
    elif way < 0.9:
        question = r.choice(shown.questions)
        made.ask(f"About the {name} image: {question.text}", question.answer, f"recall_{name}")
    else:
        made.ask("How many images have I sent?", f"You have sent {COUNTS[len(made.scenes)]} images.", "sent")


def asked(r: random.Random, category: str, **which: object) -> Dialogue:
    """A conversation of one picture and one question of `category`: one row of the table of accuracy."""
    kinds = {
        "shape": ("one", "many"), "color": ("one", "many", "edge", "plain", "number", "letter"), "background": ("one", "two", "many"),
        "position": ("two",), "count": ("one", "two", "many", "plain"), "letter": ("letter",), "word": ("word",), "edge": ("edge",),
        "plain": ("plain", "gradient"),
    }  # fmt: skip
    kind = "number" if category.startswith("number_") else r.choice(kinds[category])
    digits = int(category[-1]) if kind == "number" and category.startswith("number_") else None
    shown = scene(r, kind, digits=digits, strings=False, word=which.get("word"))  # type: ignore[arg-type]
    question: Question = r.choice([q for q in shown.questions if q.category == category])
    made = Dialogue(scenes=[shown])
    made.ask(question.text, question.answer, category, shown.image)
    return made


def recalled(r: random.Random, which: int, named: bool) -> Dialogue:
    """2 to 4 pictures, then "what was in the ... image?". `named`: the history already says what each picture shows."""
    count = r.randint(max(2, which + 1), 4)
    made = Dialogue(scenes=[scene(r, strings=False) for _ in range(count)])
    for shown in made.scenes:
        if named:
            made.ask(r.choice(DESCRIBE), f"The image shows {shown.phrase}.", "describe", shown.image)
        else:
            made.ask(*r.choice(SHOWN), "shown", shown.image)
    name = "last" if which == -1 else ORDINALS[which]
    made.ask(f"What was in the {name} image?", f"The {name} image shows {made.scenes[which].phrase}.", f"recall_{name}_{'named' if named else 'unnamed'}")
    return made
