"""Bytes of an image file -> what the model sees: 8-bit RGB, upright, on white; its identity and its price in tokens.

Bytes decide the type, never the label. Size and shape are checked from the header, before anything is decoded. No state, no
I/O; CPU-heavy, so callers run it in a worker thread.
"""

import hashlib
import io
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

from PIL import Image

MAX_RATIO = 200
"""Longer by shorter side; the model's own processor refuses more."""

# Our own cap is checked from the header instead. Pillow's only warns below 179 million pixels, and is one for the process.
Image.MAX_IMAGE_PIXELS = None


class ImageRefused(Exception):
    """This image is not accepted. `limit` and `requested` are set where a number refused, `param` where it was one of several."""

    param: str | None = None

    def __init__(self, code: str, message: str, limit: int | None = None, requested: int | None = None) -> None:
        super().__init__(message)
        self.code, self.limit, self.requested = code, limit, requested


# ---- the price: exactly the rule of transformers' Qwen2-VL processors ------------------------------------------
def smart_resize(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size (width, height) that the model sees: multiples of `factor`, pixels within the limits where they can be.

    Raises ImageRefused above MAX_RATIO. Halves round to even, as in the model's own processor: 126 x 126 -> 112 x 112.
    """
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_RATIO:
        raise ImageRefused("image_ratio", f"an image of {width} x {height} is {ratio:.4g} times as long as wide; the most is {MAX_RATIO}",
                           MAX_RATIO, math.ceil(ratio))
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    if new_width * new_height > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
    elif new_width * new_height < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_width = math.ceil(width * beta / factor) * factor
        new_height = math.ceil(height * beta / factor) * factor
    return new_width, new_height


@dataclass(frozen=True, slots=True)
class ImageRules:
    """How a model cuts images: pixels of a patch's side, patches of a token's side, pixel limits after the resize."""

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Patches: time, rows, columns. Raises ImageRefused."""
        new_width, new_height = smart_resize(width, height, self.patch * self.merge, self.min_pixels, self.max_pixels)
        return 1, new_height // self.patch, new_width // self.patch

    def tokens(self, width: int, height: int) -> int:
        """Image tokens, without the markers around them. Width and height may be exchanged. Raises ImageRefused."""
        return math.prod(self.grid(width, height)) // self.merge ** 2


# ---- the header ------------------------------------------------------------------------------------------------
class Header(NamedTuple):
    media_type: str
    width: int
    height: int
    """As stored, before any rotation."""


_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF", "image/bmp": "BMP", "image/tiff": "TIFF"}
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF87a", "image/gif"), (b"GIF89a", "image/gif"),
          (b"BM", "image/bmp"), (b"II*\0", "image/tiff"), (b"MM\0*", "image/tiff"))


def media_type(data: bytes) -> str:
    """By the first bytes. Raises ImageRefused for everything that is not accepted."""
    for magic, found in _MAGIC:
        if data.startswith(magic):
            return found
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    name = "this file"
    if data[4:8] == b"ftyp":
        name = "AVIF" if data[8:12] in (b"avif", b"avis") else "HEIC or a video"
    elif data[:5] == b"%PDF-":
        name = "PDF"
    elif data[:256].lstrip()[:4].lower() in (b"<svg", b"<?xm"):
        name = "SVG"
    raise ImageRefused("image_type_unsupported", f"{name} is not an accepted image; accepted are PNG, JPEG, WebP, GIF, BMP and TIFF")


def read_header(data: bytes, max_bytes: int, max_pixels: int) -> Header:
    """Type and size, checked against the caps. Decodes nothing. Raises ImageRefused."""
    if not data:
        raise ImageRefused("image_empty", "the image has no bytes")
    if len(data) > max_bytes:
        raise ImageRefused("image_too_many_bytes", f"the image has {len(data)} bytes; the most is {max_bytes}", max_bytes, len(data))
    kind = media_type(data)
    if kind == "image/webp":
        width, height = _webp_size(data)                    # Pillow's reader sets up whole frames before it tells the size
        _check_pixels(width, height, max_pixels)
    image = _open(data, kind)
    _check_pixels(image.width, image.height, max_pixels)
    return Header(kind, image.width, image.height)


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ImageRefused("image_too_many_pixels", f"the image is {width} x {height}, {width * height} pixels; the most is {max_pixels}",
                           max_pixels, width * height)
    if min(width, height) < 1:
        raise ImageRefused("image_unreadable", f"the image says that it is {width} x {height}")


def _webp_size(data: bytes) -> tuple[int, int]:
    chunk = data[12:16]
    if len(data) >= 30 and chunk == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if len(data) >= 30 and chunk == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    if len(data) >= 25 and chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise _unreadable("image/webp")


def _open(data: bytes, kind: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=[_FORMATS[kind], "MPO"] if kind == "image/jpeg" else [_FORMATS[kind]])
    except Exception as error:                              # hostile bytes raise anything from SyntaxError to struct.error
        raise _unreadable(kind) from error


def _unreadable(kind: str) -> ImageRefused:
    return ImageRefused("image_unreadable", f"the bytes begin as {_FORMATS[kind]}, but the image is damaged or cut off")


# ---- the picture -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded image as the model sees it."""

    image: Image.Image
    """Mode RGB, upright."""
    digest: str
    """sha256 (hex) over "rgb8", width, height and the pixels."""
    notes: tuple[str, ...]
    """What normalisation did, for people."""


_UPRIGHT = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90}
_HIGH_BYTE = [value >> 8 for value in range(1 << 16)]
_ORIENTATION = 0x0112
_BROKEN_EXIF = (SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, OSError, struct.error)


def decode(data: bytes, max_bytes: int, max_pixels: int) -> Picture:
    """Raises ImageRefused. Colour profiles are ignored; of an animation the first frame is taken."""
    kind = read_header(data, max_bytes, max_pixels).media_type
    image = _open(data, kind)
    try:
        image.load()
        upright = _UPRIGHT.get(_orientation(image))
        notes = ["first frame taken"] if getattr(image, "is_animated", False) and kind != "image/jpeg" else []
        rgb = _to_rgb(image, notes)
        if upright is not None:
            rgb = rgb.transpose(upright)
            notes.append("rotated by EXIF")
    except ImageRefused:
        raise
    except Exception as error:                              # as in _open: Pillow has no common error for bad bytes
        raise _unreadable(kind) from error
    head = b"rgb8" + struct.pack(">II", rgb.width, rgb.height)
    return Picture(rgb, hashlib.sha256(head + rgb.tobytes()).hexdigest(), tuple(notes))


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except _BROKEN_EXIF:                                    # around good pixels: there is no rotation to follow
        return 1


def _to_rgb(image: Image.Image, notes: list[str]) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        image = _from_16_bit(image, notes)
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        if rgba.getchannel("A").getextrema() != (255, 255):
            notes.append("transparency laid on white")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        white.alpha_composite(rgba)
        return white.convert("RGB")
    if image.mode == "RGB":
        return image
    if image.mode not in ("1", "L", "P"):
        notes.append(f"{image.mode} converted to RGB")
    return image.convert("RGB")


def _from_16_bit(image: Image.Image, notes: list[str]) -> Image.Image:
    """Grey of 16 bits -> L, or LA where one value is marked transparent. The high byte counts, as Pillow does for 16-bit RGB."""
    if image.mode == "F":
        raise ImageRefused("image_mode_unsupported", "images of floating-point pixels are not accepted: they have no white")
    wide = image.convert("I")
    low, high = map(int, wide.getextrema())  # type: ignore[arg-type]  # of one band: two numbers
    if low < 0 or high > 0xFFFF:
        raise ImageRefused("image_mode_unsupported", "images of 32-bit pixels are not accepted", 0xFFFF, high)
    notes.append("16 bits reduced to 8")
    grey = wide.point(_HIGH_BYTE, "L")
    clear = image.info.get("transparency")
    if not isinstance(clear, int):
        return grey
    return Image.merge("LA", (grey, wide.point([0 if value == clear else 255 for value in range(1 << 16)], "L")))
