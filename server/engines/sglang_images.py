"""Images before the engine sees them: preprocessed once, by the model's own processor, into the vision folder."""

import asyncio
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvstore.sglang.images import ImageRecord, VisionFiles, padded

from .channel import Content, ImageRef


class ImagePreparer:
    """`manager`: SGLang's tokenizer manager, which holds the processor and the model's type."""

    def __init__(self, manager: Any, image_folder: Path, files: VisionFiles) -> None:
        self._manager, self._folder, self._files = manager, image_folder, files
        self._pool = ThreadPoolExecutor(2, "image-prepare")
        self._preparing: dict[str, asyncio.Task[None]] = {}

    async def prepare(self, content: Content) -> None:
        """Preprocess images that were never seen; one run for all turns that wait for the same image.

        Raises OSError (no such image) or ValueError (the model's processor sees another grid than was priced).
        """
        for image in content.images:
            if self._files.has(image.digest):
                continue
            task = self._preparing.get(image.digest)
            if task is None:
                task = asyncio.get_running_loop().create_task(self._in_pool(image))
                self._preparing[image.digest] = task
                task.add_done_callback(lambda _, digest=image.digest: self._preparing.pop(digest, None))
            await asyncio.shield(task)               # a cancelled turn must not take it from the others

    async def _in_pool(self, image: ImageRef) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, self._preprocess, image)

    def _preprocess(self, image: ImageRef) -> None:
        from PIL import Image

        processor = self._manager.mm_processor._processor.image_processor
        with Image.open(self._folder / f"{image.digest}.png") as picture:
            out = processor(images=[picture.convert("RGB")], return_tensors="pt")
        grid = tuple(int(x) for x in out["image_grid_thw"][0])
        if grid != tuple(image.grid):
            raise ValueError(f"image {image.digest[:12]} has a grid of {grid}, it was priced as {tuple(image.grid)}")
        # The encoder casts its input to the model's own type first: storing that loses nothing.
        self._files.put(image.digest, out["pixel_values"].to(self._manager.model_config.dtype))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def records(content: Content) -> tuple[ImageRecord, ...]:
    return tuple(ImageRecord(digest=i.digest, grid=i.grid, tokens=i.tokens, start=i.start) for i in content.images)


def padded_ids(content: Content) -> array:
    """The token ids as KV keys see them."""
    return padded(content.token_ids, records(content))
