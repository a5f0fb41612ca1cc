"""Packs of a fixed size for the trainer, made ahead of time by worker processes in memory shared with it.

A pack is several conversations end to end, padded to exactly `Shape.tokens` and `Shape.patches`, so that compiled code sees
one shape only. Pixels travel as bytes; they are normalised on the GPU.
"""

import multiprocessing as mp
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any, NamedTuple

import numpy as np

from server.demo.dialogues import dialogue
from server.demo.encoding import IMAGE_PAD, MERGE, PATCH, Sample, encode
from server.demo.targets import IGNORED

PIXELS = 3 * PATCH * PATCH
END = 2
LONGEST_PADDING = 512
SLOTS_PER_WORKER = 4


class Shape(NamedTuple):
    tokens: int = 16384
    patches: int = 34816
    replay_tokens: int = 1536
    """Of `tokens`: room for texts of the base model."""


@dataclass(slots=True)
class Pack:
    ids: np.ndarray
    positions: np.ndarray
    patches: np.ndarray
    grid: np.ndarray
    """(patches, 2): row and column of each patch in its picture."""
    image_places: np.ndarray
    """For each token that the vision tower makes, its place among the tokens; `Shape.tokens` for padding."""
    cells: np.ndarray
    slots: np.ndarray
    """(pictures, targets.SLOTS)."""
    starts: np.ndarray
    """Where each conversation begins, and the end: as flash attention wants it."""
    picture_starts: np.ndarray
    pictures: int
    """How many are real; padding follows."""
    answer_places: np.ndarray
    """Tokens to predict; the prediction is made one place earlier."""
    replay_places: np.ndarray
    replay_rows: np.ndarray
    """For each replayed token, its row in the table of the base model's predictions."""
    dialogues: int


class Replay(NamedTuple):
    """Texts of the base model, laid end to end. `starts` has one more entry than there are texts; `prompt` counts tokens."""

    ids: np.ndarray
    starts: np.ndarray
    prompt: np.ndarray


def pack(samples: list[Sample], shape: Shape, replay: Replay | None = None, r: random.Random | None = None, patches_out: np.ndarray | None = None) -> Pack:
    """`r` chooses the texts of `replay`; `patches_out` is where the pixels go. Raises ValueError if the samples do not fit."""
    ids, positions = np.full(shape.tokens, END, np.int32), np.zeros((3, shape.tokens), np.int32)
    pixels = np.zeros((shape.patches, PIXELS), np.uint8) if patches_out is None else patches_out
    grid = np.zeros((shape.patches, 2), np.int32)
    merged = shape.patches // MERGE**2
    places, cells = np.full(merged, shape.tokens, np.int32), np.full((merged, 2), IGNORED, np.int16)
    starts, picture_starts, slots, answers = [0], [0], [], []
    token = patch = 0
    for sample in samples:
        size = len(sample.ids)
        if token + size > shape.tokens - shape.replay_tokens or patch + sum(len(p.patches) for p in sample.pictures) > shape.patches:
            raise ValueError(f"{len(samples)} conversations do not fit into {shape}")
        ids[token : token + size], positions[:, token : token + size] = sample.ids, sample.positions
        answers.append(np.flatnonzero(sample.answers) + token)
        image_places = np.flatnonzero(sample.ids == IMAGE_PAD) + token
        done = patch // MERGE**2
        places[done : done + len(image_places)] = image_places
        for picture in sample.pictures:
            count, (rows, columns) = len(picture.patches), picture.grid
            pixels[patch : patch + count] = picture.patches
            where = np.moveaxis(np.mgrid[:rows, :columns], 0, -1).reshape(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
            grid[patch : patch + count] = where.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
            cells[patch // MERGE**2 : (patch + count) // MERGE**2] = picture.cells
            slots.append(picture.slots)
            patch += count
            picture_starts.append(patch)
        token += size
        starts.append(token)
    replay_places, replay_rows, limit = [], [], token + shape.replay_tokens
    while replay is not None and r is not None and len(replay.prompt):
        which = r.randrange(len(replay.prompt))
        first, last = int(replay.starts[which]), int(replay.starts[which + 1])
        if token + last - first > limit:
            break
        ids[token : token + last - first] = replay.ids[first:last]
        positions[:, token : token + last - first] = np.arange(last - first)
        begin = int(replay.prompt[which])
        replay_places.append(np.arange(token + begin, token + last - first))
        replay_rows.append(np.arange(first + begin, last))
        token += last - first
        starts.append(token)
    pixels[patch:] = 0
    _pad(starts, shape.tokens)
    _pad(picture_starts, shape.patches)
    empty = [np.zeros(0, np.int64)]
    return Pack(
        ids, positions, pixels, grid, places, cells, np.stack(slots), np.array(starts, np.int32), np.array(picture_starts, np.int32), len(slots),
        np.concatenate(answers), np.concatenate(replay_places or empty), np.concatenate(replay_rows or empty), len(samples),
    )  # fmt: skip


def _pad(starts: list[int], end: int) -> None:
    while starts[-1] < end:
        starts.append(min(end, starts[-1] + LONGEST_PADDING))


def _fitting(r: random.Random, shape: Shape) -> Sample:
    """A conversation that fits into an empty pack."""
    while True:
        sample = encode(dialogue(r))
        if len(sample.ids) <= shape.tokens - shape.replay_tokens and sum(len(p.patches) for p in sample.pictures) <= shape.patches:
            return sample


def packs(seed: int, shape: Shape, replay: Replay | None) -> Generator[Any, np.ndarray | None, None]:
    """Endless packs from one seed. Send each a place for its patches, or None."""
    r = random.Random(seed)
    waiting: Sample | None = None
    out = yield
    while True:
        chosen: list[Sample] = []
        tokens = patches = 0
        while True:
            sample, waiting = waiting or _fitting(r, shape), None
            tokens, patches = tokens + len(sample.ids), patches + sum(len(p.patches) for p in sample.pictures)
            if tokens > shape.tokens - shape.replay_tokens or patches > shape.patches:
                waiting = sample
                break
            chosen.append(sample)
        out = yield pack(chosen, shape, replay, r, out)


def _work(seed: int, shape: Shape, replay: Replay | None, buffers: list[Any], free: Any, full: Any) -> None:
    maker = packs(seed, shape, replay)
    next(maker)
    while True:
        number = free.get()
        made = maker.send(np.frombuffer(buffers[number], np.uint8).reshape(shape.patches, PIXELS))
        made.patches = np.zeros(0, np.uint8)  # they are in the shared buffer already
        full.put((number, made))


class Feed:
    """Packs from worker processes; `give_back` a pack's buffer once its pixels have been copied."""

    def __init__(self, shape: Shape, buffers: list[Any], free: Any, full: Any) -> None:
        self._shape, self._buffers, self._free, self._full = shape, buffers, free, full

    def take(self, timeout_s: float = 120) -> tuple[int, Pack]:
        """Raises queue.Empty when no worker has delivered within `timeout_s`."""
        number, made = self._full.get(timeout=timeout_s)
        made.patches = np.frombuffer(self._buffers[number], np.uint8).reshape(self._shape.patches, PIXELS)
        return number, made

    def give_back(self, number: int) -> None:
        self._free.put(number)

    def waiting(self) -> int:
        return int(self._full.qsize())


@contextmanager
def feed(seed: int, workers: int, shape: Shape, replay: Replay | None) -> Iterator[Feed]:
    """Which worker's pack comes first depends on the machine; what each worker makes depends on the seed alone."""
    context = mp.get_context("spawn")
    buffers = [RawArray("B", shape.patches * PIXELS) for _ in range(workers * SLOTS_PER_WORKER)]
    free, full = context.Queue(), context.Queue()
    for number in range(len(buffers)):
        free.put(number)
    started = [context.Process(target=_work, args=(seed * 1000 + i, shape, replay, buffers, free, full), daemon=True) for i in range(workers)]
    for process in started:
        process.start()
    try:
        yield Feed(shape, buffers, free, full)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.join()


__all__ = ["Feed", "Pack", "Replay", "Shape", "feed", "pack", "packs"]
