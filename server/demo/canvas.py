"""The canvas of the training pictures: colours and their names, sizes, wear, shapes, printed text. Everything follows from one `random.Random`."""

import io
import math
import random
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Rgb = tuple[int, int, int]

COLORS: dict[str, tuple[Rgb, ...]] = {
    "red": ((220, 30, 30), (255, 0, 0)),
    "green": ((30, 160, 60), (0, 128, 0), (0, 200, 0)),
    "blue": ((40, 70, 220), (0, 0, 255)),
    "yellow": ((245, 220, 40), (255, 255, 0)),
    "orange": ((245, 140, 30), (255, 165, 0)),
    "purple": ((130, 50, 180), (128, 0, 128)),
    "pink": ((250, 140, 190), (255, 192, 203)),
    "brown": ((130, 80, 40), (139, 69, 19)),
    "black": ((15, 15, 15), (0, 0, 0)),
    "white": ((250, 250, 250), (255, 255, 255)),
    "gray": ((128, 128, 128),),
    "cyan": ((60, 210, 220), (0, 255, 255)),
}
"""A name's usual shade first, then what drawing programs give for the name."""
NAMES = tuple(COLORS)
FRAMES = ((1024, 768), (640, 480), (480, 640), (800, 600), (768, 1024), (1280, 720), (720, 1280), (600, 800))
PILLOW_FONT = "Aileron"
FONTS = (
    PILLOW_FONT, PILLOW_FONT, "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSansMono-Bold",
    "STIXGeneral", "STIXGeneralBol",
)  # fmt: skip
LEAST_CONTRAST = 140
"""Sum over red, green and blue of what tells the text from its background."""
LEAST_RADIUS_PX = 16
LEAST_EM_PX = 17
"""Smallest radius of a single shape and size of printed text, as the model sees them: after its processor's resize."""


class Box(NamedTuple):
    """Where a character or a shape is, as fractions of the picture. `order` counts characters from 1; 0 for a shape."""

    what: str
    order: int
    left: float
    top: float
    right: float
    bottom: float


@dataclass(slots=True)
class Canvas:
    image: Image.Image
    background: Rgb
    scale: float
    """Pixels of the model's view for each pixel drawn."""

    @property
    def draw(self) -> ImageDraw.ImageDraw:
        return ImageDraw.Draw(self.image)


# ---- colour, canvas, wear ---------------------------------------------------------------------------------------
def shade(r: random.Random, name: str, spread: int = 14) -> Rgb:
    base = COLORS[name][0] if r.random() < 0.7 else r.choice(COLORS[name])
    if r.random() < 0.15:
        return base
    red, green, blue = (min(255, max(0, value + r.randint(-spread, spread))) for value in base)
    return red, green, blue


def pair(r: random.Random) -> tuple[str, str]:
    """Two names whose shades nobody confuses."""
    first = r.choice(NAMES)
    close = {first} | ({"orange", "brown"} if first == "red" else {"red"} if first in ("orange", "brown") else set())
    return first, r.choice([name for name in NAMES if name not in close])


def size(r: random.Random, least: int) -> tuple[int, int]:
    """Width and height to draw: mostly what the model sees unchanged, some that its processor resizes. `least` in pixels."""
    way = r.random()
    if way < 0.12:
        return r.choice(FRAMES)
    if way < 0.24:
        return r.randint(max(64, least), 520), r.randint(max(64, least), 520)
    sides = [28 * n for n in ((2, 3, 3, 4) if way < 0.30 else (4, 5, 6, 7, 8, 8, 9, 10) if way < 0.84 else (10, 11, 12, 14, 16)) if 28 * n >= least] or [112, 140]
    width = r.choice(sides)
    return width, width if r.random() < 0.5 else r.choice(sides)


def blank(r: random.Random, color: str, least: int = 56) -> Canvas:
    width, height = size(r, least)
    background = shade(r, color)
    return Canvas(Image.new("RGB", (width, height), background), background, min(1.0, 448 / math.sqrt(width * height)))


@lru_cache(1)
def _grain() -> np.ndarray:
    return np.random.default_rng(7).integers(-12, 13, (2048, 1280, 3), dtype=np.int16)


def worn(r: random.Random, image: Image.Image) -> Image.Image:
    """Sometimes with a camera's grain, sometimes through JPEG."""
    if r.random() < 0.2:
        top, left = r.randrange(2048 - image.height), r.randrange(1281 - image.width)
        grain = _grain()[top : top + image.height, left : left + image.width]
        image = Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))
    if r.random() < 0.12:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=r.randint(70, 95))
        image = Image.open(file).convert("RGB")
    return image


# ---- shapes -----------------------------------------------------------------------------------------------------
def figure(canvas: Canvas, shape: str, x: float, y: float, radius: float, color: Rgb) -> Box:
    draw = canvas.draw

    def corners(count: int, start: float, radii: tuple[float, ...]) -> list[tuple[float, float]]:
        turns = [start + 2 * math.pi * i / count for i in range(count)]
        return [(x + radii[i % len(radii)] * math.cos(t), y + radii[i % len(radii)] * math.sin(t)) for i, t in enumerate(turns)]

    def around(half_width: float, half_height: float) -> list[float]:
        return [x - half_width, y - half_height, x + half_width, y + half_height]

    up = -math.pi / 2
    match shape:
        case "circle":
            draw.ellipse(around(radius, radius), fill=color)
        case "ring":
            draw.ellipse(around(radius, radius), fill=color)
            draw.ellipse(around(radius * 0.55, radius * 0.55), fill=canvas.background)
        case "square":
            draw.rectangle(around(radius * 0.88, radius * 0.88), fill=color)
        case "cross":
            draw.rectangle(around(radius, radius * 0.32), fill=color)
            draw.rectangle(around(radius * 0.32, radius), fill=color)
        case "triangle":
            draw.polygon(corners(3, up, (radius,)), fill=color)
        case "diamond":
            draw.polygon(corners(4, up, (radius,)), fill=color)
        case "hexagon":
            draw.polygon(corners(6, 0, (radius,)), fill=color)
        case "star":
            draw.polygon(corners(10, up, (radius, radius * 0.42)), fill=color)
    width, height = canvas.image.size
    return Box(shape, 0, (x - radius) / width, (y - radius) / height, (x + radius) / width, (y + radius) / height)


# ---- printed text -----------------------------------------------------------------------------------------------
@lru_cache(4096)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """`size` in pixels. Raises FileNotFoundError without matplotlib, whose wheel has the fonts besides Pillow's own."""
    if name == PILLOW_FONT:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont)
        return font
    spec = find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the fonts of the training pictures come with the Python package matplotlib (requirements/train.txt), which is not installed")
    return ImageFont.truetype(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / f"{name}.ttf", size)


def printed(r: random.Random, text: str) -> tuple[Image.Image, str, str, list[Box]]:
    """Picture, text colour, background colour, boxes. Drawn anew while it would be too small or too pale to read."""
    fore, back = r.choice((("black", "white"), ("white", "black"))) if r.random() < 0.4 else pair(r)
    while True:
        canvas, name = blank(r, back, 56 if len(text) < 3 else 84), r.choice(FONTS)
        width, height = canvas.image.size
        left, top, right, bottom = _font(name, 64).getbbox(text)
        em = int(min(height * r.uniform(0.3, 0.9), 60 * width / (right - left), 60 * height / (bottom - top))) // 2 * 2
        color = shade(r, fore)
        if em * canvas.scale >= LEAST_EM_PX and sum(abs(a - b) for a, b in zip(color, canvas.background, strict=True)) >= LEAST_CONTRAST:
            break
    font = _font(name, em)
    left, top, right, bottom = font.getbbox(text)
    x = r.uniform(0.02 * width, max(0.021 * width, 0.98 * width - (right - left))) - left
    y = r.uniform(0.02 * height, max(0.021 * height, 0.98 * height - (bottom - top))) - top
    canvas.draw.text((x, y), text, fill=color, font=font)
    edges = [x + font.getlength(text[:i]) for i in range(len(text) + 1)]
    boxes = [Box(c, i + 1, edges[i] / width, (y + top) / height, edges[i + 1] / width, (y + bottom) / height) for i, c in enumerate(text)]
    return canvas.image, fore, back, boxes


