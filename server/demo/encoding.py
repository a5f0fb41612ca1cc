"""A conversation as the model gets it: token ids, positions, patches; and what the training compares its answers with.

Ids, resize and patch order are those of the chat template and of transformers' Qwen2-VL processor (tests compare them).
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from server.demo.dialogues import Dialogue
from server.demo.targets import cells, slots
from server.pixels import smart_resize

PATCH, MERGE = 14, 2
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 448 * 448
FILES = Path(__file__).parent / "files"
VISION_START, VISION_END, IMAGE_PAD = 49152, 49153, 49154


@lru_cache(1)
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FILES / "tokenizer.json"))


@lru_cache(20000)
def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


@dataclass(slots=True)
class Picture:
    patches: np.ndarray
    """uint8 (patches, 3 * 14 * 14), the 2 x 2 patches of a token together, channels first."""
    grid: tuple[int, int]
    """Rows and columns of patches."""
    slots: np.ndarray
    cells: np.ndarray
    """Targets of the probes: one row for the picture, one for each of its tokens."""

    @property
    def tokens(self) -> int:
        return len(self.patches) // MERGE**2


@dataclass(slots=True)
class Sample:
    ids: np.ndarray
    positions: np.ndarray
    """(3, tokens): time, row, column."""
    answers: np.ndarray
    """Where a token is part of an answer. bool."""
    pictures: list[Picture]


def seen(image: Image.Image) -> Image.Image:
    """The image after the processor's resize."""
    size = smart_resize(image.width, image.height, PATCH * MERGE, LEAST_PIXELS, MOST_PIXELS)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def patches(image: Image.Image) -> tuple[np.ndarray, tuple[int, int]]:
    pixels = np.asarray(image)
    rows, columns = image.height // PATCH, image.width // PATCH
    split = pixels.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * PATCH * PATCH), (rows, columns)


def encode(made: Dialogue) -> Sample:
    of_image = {id(shown.image): shown for shown in made.scenes}
    ids: list[int] = list(ids_of(f"<|im_start|>system\n{made.system}<|im_end|>\n"))
    answers, axes, pictures = [False] * len(ids), [np.arange(len(ids))[None].repeat(3, 0)], []
    place = len(ids)

    def text(piece: str, answer: bool = False) -> None:
        nonlocal place
        more = ids_of(piece)
        ids.extend(more)
        answers.extend([answer] * len(more))
        axes.append(np.arange(place, place + len(more))[None].repeat(3, 0))
        place += len(more)

    def picture(image: Image.Image) -> None:
        nonlocal place
        cut, (rows, columns) = patches(seen(image))
        shown = of_image[id(image)]
        height, width = rows // MERGE, columns // MERGE
        pictures.append(Picture(cut, (rows, columns), slots(shown), cells(shown, height, width)))
        text("<|vision_start|>")
        ids.extend([IMAGE_PAD] * (height * width))
        answers.extend([False] * (height * width))
        where = np.stack([np.zeros((height, width), int), *np.mgrid[:height, :width]]).reshape(3, -1)
        axes.append(where + place)
        place += max(height, width)
        text("<|vision_end|>")

    for turn in made.turns:
        written = "<|im_start|>user\n"
        for part in turn.parts:
            if isinstance(part, str):
                written += part
            else:
                text(written)
                written = ""
                picture(part)
        text(written + "<|im_end|>\n<|im_start|>assistant\n")
        text(turn.answer + "<|im_end|>", answer=True)
        text("\n")
    return Sample(np.array(ids, np.int32), np.concatenate(axes, 1).astype(np.int32), np.array(answers), pictures)
