"""What the model sees of an image file, what it costs, and what is refused before anything is decoded."""

import ast
import importlib.util
import io
import math
import random
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from server.pixels import ImageRefused, ImageRules, decode, media_type, read_header, smart_resize

QWEN = ImageRules(patch=14, merge=2, min_pixels=3136, max_pixels=12_845_056)
DEMO = ImageRules(patch=14, merge=2, min_pixels=3136, max_pixels=448 * 448)
CAPS = (12 << 20, 50_000_000)
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)


def file(image, form="PNG", **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def flat(size=(56, 56), colour=RED, mode="RGB"):
    return Image.new(mode, size, colour)


def see(data):
    return decode(data, *CAPS)


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width, height, depth=8, colour=2):
    """A PNG that says its size and has next to no pixels."""
    body = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


# ---- the price -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def reference():
    """transformers' own smart_resize(height, width, ...), taken out of its source: importing the module needs torchvision."""
    folder = Path(importlib.util.find_spec("transformers").submodule_search_locations[0])
    tree = ast.parse((folder / "models/qwen2_vl/image_processing_qwen2_vl.py").read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "smart_resize"]
    scope = {"math": math}
    exec(compile(ast.Module([function], []), "smart_resize", "exec"), scope)  # noqa: S102  (transformers' own text)
    return scope["smart_resize"]


@pytest.mark.parametrize("limits", [(3136, 12_845_056), (3136, 448 * 448), (3136, 1_003_520), (200_704, 401_408)])
def test_the_resize_is_transformers_own(reference, limits):
    """Equal to the model's processor over thousands of sizes, all small ones among them."""
    chance = random.Random(7)
    sizes = [(w, h) for w in range(1, 64) for h in range(1, 64)]
    sizes += [(chance.randint(1, 9000), chance.randint(1, 9000)) for _ in range(5000)]
    sizes += [(28 * chance.randint(1, 99) + 14, 28 * chance.randint(1, 99) + 14) for _ in range(1000)]
    for width, height in sizes:
        if max(width, height) <= 200 * min(width, height):
            assert smart_resize(width, height, 28, *limits) == reference(height, width, 28, *limits)[::-1], (width, height)


@pytest.mark.parametrize(("size", "tokens"), [
    ((4032, 3024), 15_552), ((800, 600), 609), ((560, 560), 400), ((2048, 2048), 5329), ((126, 126), 16), ((98, 98), 16),
    ((19, 19), 9), ((38, 38), 9), ((2000, 10), 29), ((10, 2000), 29), ((1, 1), 4), ((3, 3), 4), ((22, 3), 6), ((3, 22), 6),
    ((26, 28), 6), ((332, 27), 12), ((120, 80), 12), ((80, 120), 12), ((360, 80), 39),
])
def test_known_prices(size, tokens):
    """Sizes that other servers got wrong: exact halves, tiny sides, ratio exactly 200."""
    assert QWEN.tokens(*size) == tokens
    grid = QWEN.grid(*size)
    assert math.prod(grid) == tokens * 4 and grid[0] == 1


@pytest.mark.parametrize(("size", "tokens"), [((560, 560), 256), ((4032, 3024), 234), ((800, 600), 234), ((600, 800), 234)])
def test_prices_follow_the_models_own_limits(size, tokens):
    """A model with a lower pixel limit has lower prices."""
    assert DEMO.tokens(*size) == tokens


@pytest.mark.parametrize("size", [(1093, 5), (5, 1093), (2001, 10), (201, 1)])
def test_a_ratio_above_200_is_refused_with_the_number(size):
    """200 is allowed, 200.1 is not; the refusal names limit and ratio."""
    with pytest.raises(ImageRefused) as refused:
        QWEN.tokens(*size)
    assert (refused.value.code, refused.value.limit) == ("image_ratio", 200) and refused.value.requested > 200
    assert QWEN.tokens(200, 1) > 0


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_the_price_is_symmetric_and_within_the_limits(width, height):
    """Rotation never changes the price, and no accepted image costs more than the pixel limit allows."""
    if max(width, height) <= 200 * min(width, height):
        tokens = QWEN.tokens(width, height)
        assert tokens == QWEN.tokens(height, width)
        assert 1 <= tokens <= 12_845_056 // 784 + 100


# ---- what the model sees ---------------------------------------------------------------------------------------
def edges():
    """Upright 64x48 with a red top edge."""
    image = flat((64, 48), BLUE)
    image.paste(RED, (0, 0, 64, 8))
    return image


INVERSE = {1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
           5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270}


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_seen_upright(form, orientation):
    """All eight EXIF orientations, in every format that carries them, give the picture and size that its maker saw."""
    stored = edges() if INVERSE[orientation] is None else edges().transpose(INVERSE[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if form == "WEBP" else {"quality": 95} if form == "JPEG" else {}
    picture = see(file(stored, form, exif=exif, **options))
    assert picture.image.size == (64, 48)
    top, bottom = picture.image.getpixel((32, 2)), picture.image.getpixel((32, 44))
    assert top[0] > 200 and top[2] < 60 and bottom[2] > 200 and bottom[0] < 60
    assert ("rotated by EXIF" in picture.notes) == (orientation > 1 and form != "TIFF")
    if form == "PNG":
        assert picture.digest == see(file(edges())).digest


def test_broken_exif_does_not_lose_the_picture():
    """Unreadable EXIF around good pixels means no rotation."""
    data = file(edges(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\xff\xff" + bytes(4))
    assert see(data).image.size == (64, 48)


def letter(mode):
    """A black square on transparent ground that hides noise."""
    image = Image.new("RGBA", (56, 56))
    image.putdata([(random.Random(i).randrange(256), i % 256, 7, 0) for i in range(56 * 56)])
    image.paste((0, 0, 0, 255), (20, 20, 36, 36))
    return image.convert(mode)


@pytest.mark.parametrize("data", [
    file(letter("RGBA")), file(letter("LA")), file(letter("RGBA"), "WEBP", lossless=True), file(letter("RGBA"), "TIFF"),
    file(letter("LA").convert("RGBA").quantize(4)),
], ids=["rgba", "la", "webp", "tiff", "palette"])
def test_transparency_is_white(data):
    """Hidden colours under transparent pixels are never seen: exactly black on white remains."""
    picture = see(data)
    assert {colour for _, colour in picture.image.getcolors(9999)} == {(0, 0, 0), WHITE}
    assert picture.notes == ("transparency laid on white",)


@pytest.mark.parametrize("image", [flat((8, 8), 0, "L"), flat((8, 8), RED), flat((8, 8), 0, "1")], ids=["L", "RGB", "1"])
def test_a_colour_marked_transparent_is_white(image):
    """PNG's tRNS on grey, RGB and one-bit images counts as transparency."""
    key = image.getpixel((0, 0))
    image.putpixel((0, 0), WHITE if image.mode == "RGB" else 255)
    assert {c for _, c in see(file(image, transparency=key)).image.getcolors()} == {WHITE}


def grey16(value, transparent=None):
    image = Image.new("I;16", (8, 8))
    image.putdata([value] * 64)
    data = file(image)
    if transparent is not None:
        data = data[:33] + chunk(b"tRNS", struct.pack(">H", transparent)) + data[33:]
    return data


@pytest.mark.parametrize(("data", "colour"), [
    (grey16(0x8000), (128,) * 3), (grey16(0xFFFF), WHITE), (grey16(0x00FF), (0, 0, 0)), (grey16(0x1234, 0x1234), WHITE),
    (grey16(0x1234, 0x1235), (0x12,) * 3), (file(flat((8, 8), (0, 0, 255, 0), "CMYK"), "TIFF"), (255, 255, 0)),
    (file(flat((8, 8), 77, "L")), (77,) * 3), (file(flat((8, 8), 1, "1")), WHITE),
    (file(flat((8, 8), BLUE).quantize(2)), BLUE), (file(flat((8, 8), BLUE), "BMP"), BLUE), (file(flat((8, 8), BLUE), "GIF"), BLUE),
], ids=["16", "16max", "16low", "16clear", "16other", "cmyk", "grey", "bit", "palette", "bmp", "gif"])
def test_every_pixel_format_becomes_8_bit_rgb(data, colour):
    """16-bit, CMYK, grey, one-bit and palette images are seen in their colours."""
    image = see(data).image
    assert image.mode == "RGB" and {c for _, c in image.getcolors()} == {colour}


@pytest.mark.parametrize("image", [Image.new("F", (8, 8), 0.5), Image.new("I", (8, 8), 1 << 20)], ids=["float", "32 bit"])
def test_pixels_without_a_defined_white_are_refused(image):
    """Floating-point and real 32-bit pixels are refused by name."""
    with pytest.raises(ImageRefused) as refused:
        see(file(image, "TIFF"))
    assert refused.value.code == "image_mode_unsupported"


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_the_first_frame_of_an_animation_is_seen(form):
    """Rule: the first frame, with a note."""
    options = {"lossless": True} if form == "WEBP" else {}
    data = file(flat(), form, save_all=True, append_images=[flat(colour=GREEN), flat(colour=BLUE)], duration=10, **options)
    picture = see(data)
    assert {c for _, c in picture.image.getcolors()} == {RED} and picture.notes == ("first frame taken",)


def test_the_identity_is_what_the_model_sees():
    """Other container, same digest; same bytes in another shape or mode, another digest."""
    image = edges()
    same = {see(file(image, form, **o)).digest for form, o in (("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}))}
    assert len(same) == 1
    raw = bytes(random.Random(3).randbytes(120 * 80 * 3))
    shapes = [Image.frombytes("RGB", (120, 80), raw), Image.frombytes("RGB", (80, 120), raw), Image.frombytes("L", (360, 80), raw)]
    assert len({see(file(shape)).digest for shape in shapes}) == 3
    changed = image.copy()
    changed.putpixel((63, 47), (0, 0, 254))
    assert see(file(changed)).digest not in same


# ---- what is refused -------------------------------------------------------------------------------------------
GOOD_JPEG = file(Image.frombytes("RGB", (64, 64), random.Random(1).randbytes(64 * 64 * 3)), "JPEG")
GOOD_PNG = file(Image.frombytes("RGB", (64, 64), random.Random(2).randbytes(64 * 64 * 3)))


@pytest.mark.parametrize(("data", "code"), [
    (b"", "image_empty"), (GOOD_JPEG[:-128], "image_unreadable"), (GOOD_PNG[:len(GOOD_PNG) // 2], "image_unreadable"),
    (GOOD_PNG[:20], "image_unreadable"), (random.Random(4).randbytes(6_000_000), "image_type_unsupported"),
    (b"\x89PNG\r\n\x1a\n" + random.Random(5).randbytes(6_000_000), "image_unreadable"),
    (b"\xff\xd8\xff", "image_unreadable"), (b"BM", "image_unreadable"), (b"II*\0", "image_unreadable"), (b"GIF89a", "image_unreadable"),
    (b"RIFF\x10\0\0\0WEBPVP8X", "image_unreadable"), (b"RIFF\xff\0\0\0WEBPVP8L" + bytes(30), "image_unreadable"),
    (b"\0\0\0\x18ftypheic" + bytes(40), "image_type_unsupported"), (b"<svg xmlns=''/>", "image_type_unsupported"),
    (b"%PDF-1.7", "image_type_unsupported"), (b"hello", "image_type_unsupported"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_no_whole_image_is_refused_by_name(data, code):
    """Empty, cut, random and foreign bytes each get their code, and the next good image is seen."""
    with pytest.raises(ImageRefused) as refused:
        see(data)
    assert refused.value.code == code
    assert see(GOOD_PNG).image.size == (64, 64)


def webp_claim(width, height):
    body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


@pytest.mark.parametrize(("data", "pixels"), [
    (png_header(60_000, 60_000), 3_600_000_000), (png_header(12_000, 12_000, colour=0), 144_000_000),
    (png_header(20_000, 20_000, depth=1, colour=0), 400_000_000), (png_header(10_000, 5001), 50_010_000),
    (webp_claim(16_000, 16_000), 256_000_000), (webp_claim(1 << 24, 255), 255 << 24),
    (b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\0;", 65535 ** 2),
], ids=["60000", "grey", "bit", "just above", "webp", "webp wide", "gif"])
def test_a_small_file_of_a_huge_picture_is_refused_from_its_header(data, pixels, monkeypatch):
    """The refusal names cap and pixels, and no pixel is decoded for it."""
    from PIL import ImageFile

    def load(self):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    assert len(data) < 1000
    with pytest.raises(ImageRefused) as refused:
        see(data)
    assert (refused.value.code, refused.value.limit, refused.value.requested) == ("image_too_many_pixels", 50_000_000, pixels)


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"lossless": True, "exif": b"Exif\0\0"}], ids=["VP8L", "VP8", "VP8X"])
def test_a_webp_header_says_its_size(options):
    """All three kinds of WebP header are read like Pillow does."""
    from server.pixels import _webp_size

    data = file(flat((301, 77)), "WEBP", **options)
    assert _webp_size(data) == Image.open(io.BytesIO(data)).size == (301, 77)


def test_the_byte_cap_is_exact():
    """A file of exactly the cap is accepted, one byte more is refused with both numbers."""
    size = len(GOOD_PNG)
    assert decode(GOOD_PNG, size, CAPS[1]).image.size == (64, 64)
    with pytest.raises(ImageRefused) as refused:
        decode(GOOD_PNG, size - 1, CAPS[1])
    assert (refused.value.code, refused.value.limit, refused.value.requested) == ("image_too_many_bytes", size - 1, size)


def test_the_pixel_cap_is_exact():
    """Exactly the cap is accepted."""
    assert read_header(GOOD_PNG, CAPS[0], 64 * 64).width == 64
    with pytest.raises(ImageRefused):
        read_header(GOOD_PNG, CAPS[0], 64 * 64 - 1)


@pytest.mark.parametrize(("form", "kind"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("GIF", "image/gif"),
                                            ("BMP", "image/bmp"), ("TIFF", "image/tiff")])
def test_bytes_decide_the_type(form, kind):
    """Each accepted format is known by its first bytes."""
    assert media_type(file(flat(), form)) == kind


@given(st.sampled_from([GOOD_PNG, GOOD_JPEG, file(edges(), "GIF"), file(edges(), "WEBP"), file(edges(), "BMP"), file(edges(), "TIFF"),
                        file(edges(), "TIFF", compression="tiff_lzw")]),
       st.data())
def test_damaged_files_are_seen_or_refused_and_nothing_else(data, draw):
    """Any flipped bytes and cuts end in a picture or an ImageRefused, never in another exception."""
    damaged = bytearray(data)
    for at in draw.draw(st.lists(st.integers(0, len(data) - 1), max_size=6)):
        damaged[at] = draw.draw(st.integers(0, 255))
    try:
        picture = decode(bytes(damaged[:draw.draw(st.integers(0, len(data)))]), 1 << 20, 1_000_000)
    except ImageRefused:
        return
    assert picture.image.mode == "RGB"
