"""Image records: whole keys, right positions, and files that are whole or not there."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.sglang import stubs
from kvstore.sglang.images import PAD_BASE, ImageRecord, ImagesMissing, VisionFiles, attach, padded, pads, positions

MERGE = 2


def digest(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def record(n: int, rows: int, columns: int, start: int) -> ImageRecord:
    return ImageRecord(digest(n), (1, rows * MERGE, columns * MERGE), rows * columns, start)


layouts = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(1, 6)), max_size=4)
"""Of each image: text tokens before it, merged rows and columns."""


def sequence(layout: list[tuple[int, int, int]], tail: int) -> tuple[list[int], list[ImageRecord]]:
    ids, images = [], []
    for n, (text, rows, columns) in enumerate(layout):
        ids += [1] * text + [2]
        images.append(record(n, rows, columns, len(ids)))
        ids += [9] * (rows * columns) + [3]
    return ids + [1] * tail, images


@given(layouts, st.integers(1, 10))
def test_positions_are_the_models_own(layout: list[tuple[int, int, int]], tail: int) -> None:
    """M-RoPE positions from records equal those of transformers' get_rope_index."""
    stubs.install()                                  # torchvision beside a CPU torch, which transformers imports
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    ids, images = sequence(layout, tail)
    config = Qwen2_5_VLConfig(image_token_id=9, video_token_id=8, vision_start_token_id=2)
    config.vision_config.spatial_merge_size = MERGE
    model = SimpleNamespace(config=config, get_vision_position_ids=Qwen2_5_VLModel.get_vision_position_ids)
    model.get_vision_position_ids = lambda *a, **k: Qwen2_5_VLModel.get_vision_position_ids(model, *a, **k)
    tokens = torch.tensor([ids])
    kinds = (tokens == 9).int()
    grids = torch.tensor([image.grid for image in images]) if images else None
    theirs, delta = Qwen2_5_VLModel.get_rope_index(model, tokens, mm_token_type_ids=kinds, image_grid_thw=grids)
    ours, our_delta = positions(len(ids), images, MERGE)
    assert torch.equal(ours, theirs[:, 0]) and our_delta.item() == delta.item()


@given(layouts, st.integers(0, 10))
def test_padding_replaces_images_and_nothing_else(layout: list[tuple[int, int, int]], tail: int) -> None:
    """In a KV key every image token stands for its image, and every other token for itself."""
    ids, images = sequence(layout, tail)
    out = padded(ids, images)
    inside = {i for image in images for i in range(image.start, image.start + image.tokens)}
    assert len(out) == len(ids)
    assert all(out[i] >= PAD_BASE if i in inside else out[i] == ids[i] for i in range(len(ids)))


def test_images_of_one_size_differ_from_their_first_token_on() -> None:
    """Eight slices of the digest, so that neither the first token nor any run of eight collides by a 30-bit hash."""
    seen = [tuple(pads(digest(n))) for n in range(5000)]
    assert len(set(seen)) == 5000
    assert all(PAD_BASE <= pad < PAD_BASE + (1 << 30) for one in seen for pad in one)
    assert pads("f" * 64) != pads("f" * 63 + "e") and pads("f" * 64) == pads("f" * 64)


def test_an_image_beyond_the_sequence_is_refused() -> None:
    """A span that does not fit is an error, not a silent shift of everything behind it."""
    with pytest.raises(ValueError, match="ends at token 13 of 12"):
        padded([1] * 12, [record(0, 2, 2, 9)])


def test_a_grid_that_makes_other_tokens_is_refused() -> None:
    """Positions of an image whose grid does not make its token count would shift the rest of the prompt."""
    with pytest.raises(ValueError, match="makes 4 tokens, not 5"):
        positions(20, [ImageRecord(digest(0), (1, 4, 4), 5, 2)], MERGE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_patches_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """What is mapped is what was put, in its own type."""
    files, patches = VisionFiles(tmp_path / "vision"), torch.randn(16, 1176).to(dtype)
    files.put(digest(1), patches)
    assert files.has(digest(1)) and torch.equal(files.map(digest(1)), patches)
    assert [path.suffix for path in (tmp_path / "vision").iterdir()] == [".px"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "longer", "no header"])
def test_a_file_that_is_not_whole_is_not_there(tmp_path: Path, damage: str) -> None:
    """A damaged file is never mapped: its image counts as missing and is made again."""
    files = VisionFiles(tmp_path)
    files.put(digest(1), torch.zeros(4, 8))
    path = files.path(digest(1))
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-1], "empty": b"", "longer": whole + b"x", "no header": b"\0" * len(whole)}[damage])
    assert files.map(digest(1)) is None


def test_missing_images_are_named(tmp_path: Path) -> None:
    """Patches are attached to all items that have some; those that have none are named in one error."""
    files = VisionFiles(tmp_path)
    files.put(digest(1), torch.ones(4, 8))
    items = [SimpleNamespace(model_specific_data={"digest": digest(n)}, feature=None) for n in (1, 2, 3)]
    with pytest.raises(ImagesMissing, match=f"{digest(2)},{digest(3)}"):
        attach(items, files)
    assert torch.equal(items[0].feature, torch.ones(4, 8))
