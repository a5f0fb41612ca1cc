"""Image records: an image is preprocessed once; a turn carries only its digest, grid and place.

Front process: `prepare` writes the patches of a new image to the vision folder; `processor_output` builds what SGLang's
own processor would, from records. Scheduler: `attach` maps the patches of the request's images (no bytes are read until
the vision encoder wants them). Stock SGLang decodes, preprocesses and hashes every image of the history on every turn,
and re-tokenises the prompt; it also keys an image's KV by 30 bits of a hash, so that two images can share KV.
"""

import json
import os
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

PAD_SLICES = 8
PAD_BASE = 1_000_000
"""Above every vocabulary. Eight 30-bit slices of the sha256, cycled over the image's tokens, stand for it in every KV key."""
_HEADER_BYTES = 128


class ImageRecord(msgspec.Struct, frozen=True):
    digest: str
    grid: tuple[int, int, int]
    """Patches: time, rows, columns."""
    tokens: int
    start: int


class ImageRecords(msgspec.Struct, frozen=True):
    """What `GenerateReqInput.image_data=[ImageRecords(...)]` carries."""

    images: tuple[ImageRecord, ...]


class ImagesMissing(LookupError):
    """No preprocessed file for these digests."""


def pads(digest: str) -> list[int]:
    """The ids that stand for an image in KV keys."""
    value = int(digest, 16)
    return [PAD_BASE + ((value >> (30 * i)) & ((1 << 30) - 1)) for i in range(PAD_SLICES)]


def padded(token_ids: Sequence[int], images: Sequence[ImageRecord]) -> array:
    """The sequence as KV keys see it: each image's placeholder run replaced by its pads."""
    out = array("q", token_ids)
    for image in images:
        end = image.start + image.tokens
        if end > len(out):
            raise ValueError(f"image {image.digest[:12]} ends at token {end} of {len(out)}")
        run = pads(image.digest) * (image.tokens // PAD_SLICES + 1)
        out[image.start:end] = array("q", run[:image.tokens])
    return out


def positions(length: int, images: Sequence[ImageRecord], merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """M-RoPE positions int64 [3, length] and their delta [1, 1]; equal to the model's own get_rope_index."""
    out = np.empty((3, length), np.int64)
    at = following = 0
    for image in images:
        out[:, at:image.start] = np.arange(following, following + image.start - at)
        following += image.start - at
        t, h, w = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        if t * h * w != image.tokens:
            raise ValueError(f"image {image.digest[:12]}: a grid of {image.grid} makes {t * h * w} tokens, not {image.tokens}")
        at = image.start + image.tokens
        out[0, image.start:at] = following + np.repeat(np.arange(t), h * w)
        out[1, image.start:at] = following + np.tile(np.repeat(np.arange(h), w), t)
        out[2, image.start:at] = following + np.tile(np.arange(w), t * h)
        following += max(t, h, w)
    out[:, at:] = np.arange(following, following + length - at)
    following += length - at
    return torch.from_numpy(out), torch.tensor([[following - length]], dtype=torch.int64)


def processor_output(processor: Any, records: ImageRecords, input_ids: Sequence[int]) -> Any:
    """In place of SGLang's decoding, preprocessing, hashing and re-tokenising."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    items = [MultimodalDataItem(modality=Modality.IMAGE, hash=int(image.digest, 16), pad_value=pads(image.digest),
                                offsets=[(image.start, image.start + image.tokens - 1)],
                                model_specific_data={"digest": image.digest, "image_grid_thw": torch.tensor([image.grid])})
             for image in records.images]
    mrope, delta = positions(len(input_ids), records.images, processor.spatial_merge_size)
    return MultimodalProcessorOutput(
        mm_items=items, padded_input_ids=padded(input_ids, records.images), im_token_id=processor.mm_tokens.image_token_id,
        im_start_id=getattr(processor, "vision_start_token_id", None), im_end_id=getattr(processor, "vision_end_token_id", None),
        video_token_id=processor.mm_tokens.video_token_id, mrope_positions=mrope, mrope_position_delta=delta)


# ---- the vision folder -----------------------------------------------------------------------------------------
class VisionFiles:
    """Preprocessed patches by image digest: a JSON header of 128 bytes, then the tensor. Written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        return self._folder / f"{digest}.px"

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def put(self, digest: str, patches: torch.Tensor) -> None:
        """patches: float [patches, channels x time x height x width] on the CPU."""
        header = json.dumps({"shape": list(patches.shape), "dtype": str(patches.dtype).removeprefix("torch.")}).encode()
        self._folder.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(header.ljust(_HEADER_BYTES))
                file.write(memoryview(patches.contiguous().reshape(-1).view(torch.uint8).numpy()))
            os.replace(temporary, self.path(digest))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def map(self, digest: str) -> torch.Tensor | None:
        """The tensor, mapped (copy-on-write, nothing read yet); None where there is no whole file."""
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(_HEADER_BYTES))
                size = os.fstat(file.fileno()).st_size
        except (OSError, ValueError):
            return None
        dtype = getattr(torch, header["dtype"])
        if size != _HEADER_BYTES + int(np.prod(header["shape"])) * dtype.itemsize:
            return None
        raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return raw[_HEADER_BYTES:].view(dtype).reshape(header["shape"])


def attach(items: Sequence[Any], files: VisionFiles) -> None:
    """Give each record item its patches. Raises ImagesMissing naming the digests that are nowhere."""
    missing = []
    for item in items:
        digest = item.model_specific_data.get("digest")
        if digest is not None and item.feature is None:
            item.feature = files.map(digest)
            if item.feature is None:
                missing.append(digest)
    if missing:
        raise ImagesMissing(",".join(missing))
