"""Trains the demo model's vision tower and low-rank change: `python -m server.demo.train OUT` on a machine with a GPU.

It starts from `weights/` (`--fresh` starts the tower from nothing), takes `--seconds` of training and writes OUT/*.safetensors,
which replace the files of `weights/`. `--until` stops earlier and keeps everything in OUT/state.pt, from which `--resume`
goes on as if nothing had happened. Packages: requirements/train.txt.
"""

import argparse
import math
import queue
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.demo import build, convert
from server.demo.cases import Case, cases
from server.demo.encoding import MERGE, encode
from server.demo.network import WIDTH, Network
from server.demo.packing import Feed, Pack, Shape, feed, pack
from server.demo.probes import Probes
from server.demo.replay import Texts, texts

TOWER_RATE, LORA_RATE = 8e-4, 4e-4
WARM_STEPS = 150
REPLAY_WEIGHT = 0.15
PROBE_WEIGHT = 0.2
CHECKED_TOGETHER = 24
LONGEST_PICTURE = 1024
"""Patches."""
LONGEST_DIALOGUE = 2048
"""Tokens."""
HERE = Path(__file__).parent


class Trainer:
    def __init__(self, network: Network, probes: Probes, device: torch.device) -> None:
        self.network, self.probes, self.device = network, probes, device
        self.tower, self.lora = [*network.tower.parameters(), *probes.parameters()], list(network.lora.parameters())
        groups = [{"params": self.tower, "rate": TOWER_RATE}, {"params": self.lora, "rate": LORA_RATE}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
        self.steps, self.joint_steps, self.spent_s = 0, 0, 0.0

    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"network": self.network, "probes": self.probes, "optimizer": self.optimizer}
        return {name: part.state_dict() for name, part in parts.items()} | {"counts": (self.steps, self.joint_steps, self.spent_s)}

    def load(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.probes.load_state_dict(state["probes"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.joint_steps, self.spent_s = state["counts"]

    def step(self, batch: dict[str, Tensor], replay: Texts | None, progress: float, joint: bool) -> dict[str, Tensor]:
        """One update. Not `joint`: the tower alone, by its probes."""
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group, steps in zip(self.optimizer.param_groups, (self.steps, self.joint_steps), strict=True):
            group["lr"] = group["rate"] * fall * min(1.0, (steps + 1) / WARM_STEPS)
        tokens = self.network.see(batch["patches"], batch["grid"], batch["picture_starts"], LONGEST_PICTURE)
        cells, slots = self.probes(tokens, batch["token_starts"], batch["cells"], batch["slots"])
        seen = {"cells": cells.detach(), "slots": slots.detach()}
        loss = cells + slots
        if joint:
            answers, texts_ = self._reading(batch, tokens, replay, seen)
            loss = answers + REPLAY_WEIGHT * texts_ + PROBE_WEIGHT * fall * loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.tower, 1.0)
        if joint:
            nn.utils.clip_grad_norm_(self.lora, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps, self.joint_steps = self.steps + 1, self.joint_steps + joint
        return seen

    def _reading(self, batch: dict[str, Tensor], tokens: Tensor, replay: Texts | None, seen: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.network.read(batch["ids"], batch["positions"], tokens, batch["image_places"], batch["starts"], LONGEST_DIALOGUE)
        wanted = batch["ids"][batch["answer_places"]]
        scores = self.network.logits(hidden[batch["answer_places"] - 1])
        answers = F.cross_entropy(scores, wanted)
        seen["answers"], seen["right"] = answers.detach(), (scores.detach().argmax(-1) == wanted).float().mean()
        if replay is None or not len(batch["replay_places"]):
            return answers, answers.new_zeros(())
        rows = batch["replay_rows"]
        guess = self.network.logits(hidden[batch["replay_places"] - 1]).log_softmax(-1).gather(-1, replay.likely[rows].long())
        said = -(replay.shares[rows] * guess).sum(-1).mean()
        seen["replay"] = said.detach()
        return answers, said

    @torch.no_grad()
    def check(self, asked: list[Case]) -> dict[str, tuple[int, int]]:
        """(exact, all) answers to the last question of each case, by row. Every word but the last chosen given the right ones before it:
        all words chosen right is the same as the right answer from greedy decoding."""
        count: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for first in range(0, len(asked), CHECKED_TOGETHER):
            part = asked[first : first + CHECKED_TOGETHER]
            samples = [encode(case.dialogue) for case in part]
            made = pack(samples, Shape(sum(len(s.ids) for s in samples), sum(len(p.patches) for s in samples for p in s.pictures), 0))
            batch = to_device(made, self.device)
            with torch.compiler.set_stance("force_eager"):  # another shape than that of training
                tokens = self.network.see(batch["patches"], batch["grid"], batch["picture_starts"], LONGEST_PICTURE)
                hidden = self.network.read(batch["ids"], batch["positions"], tokens, batch["image_places"], batch["starts"], LONGEST_DIALOGUE)
            right = (self.network.logits(hidden[batch["answer_places"] - 1]).argmax(-1) == batch["ids"][batch["answer_places"]]).cpu()
            places = batch["answer_places"].cpu()
            for i, case in enumerate(part):
                inside = (places >= int(made.starts[i])) & (places < int(made.starts[i + 1]))
                own, hits = places[inside], right[inside]
                begin = int((own[1:] != own[:-1] + 1).nonzero()[-1]) + 1 if bool((own[1:] != own[:-1] + 1).any()) else 0
                count[case.row][0] += bool(hits[begin:].all())
                count[case.row][1] += 1
        return {row: (exact, total) for row, (exact, total) in count.items()}


def to_device(made: Pack, device: torch.device) -> dict[str, Tensor]:
    def move(array: Any, kind: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(array).to(kind)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    long = {name: move(getattr(made, name), torch.int64) for name in ("ids", "image_places", "cells", "slots", "answer_places", "replay_places", "replay_rows")}
    starts = {name: move(getattr(made, name), torch.int32) for name in ("starts", "picture_starts")}
    token_starts = move(made.picture_starts[: made.pictures + 1] // MERGE**2, torch.int64)
    return long | starts | {
        "token_starts": token_starts, "patches": move(made.patches, torch.uint8), "grid": move(made.grid, torch.float32), "positions": move(made.positions, torch.float32),
    }  # fmt: skip


def batches(source: Feed, device: torch.device) -> "queue.Queue[tuple[dict[str, Tensor], int]]":
    """Moves packs to the GPU in a thread, a few ahead of the training."""
    ready: queue.Queue[tuple[dict[str, Tensor], int]] = queue.Queue(4)

    def move() -> None:
        while True:
            number, made = source.take()
            batch = to_device(made, device)
            source.give_back(number)
            ready.put((batch, made.dialogues))

    threading.Thread(target=move, daemon=True).start()
    return ready


def start(device: torch.device, fresh: bool, weights: Path) -> tuple[Network, dict[str, Tensor]]:
    from safetensors.torch import load_file

    torch.manual_seed(0)
    language = {name: weight for name, weight in convert.language_model(convert.gguf_path())}
    tower = load_file(weights / "vision-1.safetensors") | load_file(weights / "vision-2.safetensors")
    lora = load_file(weights / "lora.safetensors")
    if fresh:
        tower = {n: torch.ones_like(w) if w.dim() == 1 and "bias" not in n else torch.zeros_like(w) if w.dim() == 1 else torch.randn(w.shape) * 0.02 for n, w in tower.items()}
        lora = {n: torch.zeros_like(w) if n.endswith("b") else torch.randn(w.shape) * w.shape[1] ** -0.5 for n, w in lora.items()}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    grown = language | {"embed_tokens.weight": build.grow(language["embed_tokens.weight"])}
    return Network(grown, tower, lora, dtype, compiled=device.type == "cuda").to(device), language


def main() -> None:
    options = arguments()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    network, language = start(device, options.fresh, options.weights)
    trainer = Trainer(network, Probes(WIDTH).to(device), device)
    trainer.spent_s = options.spent
    if options.resume:
        trainer.load(torch.load(options.resume, map_location=device, weights_only=False))
    kept = options.out / "replay.pt"
    if not kept.is_file():
        texts(language, device, network.dtype, prompts=options.prompts).save(str(kept))
    replay = Texts.load(str(kept), device)
    print(f"base model's texts: {len(replay.replay.prompt)}, {len(replay.replay.ids)} tokens", flush=True)
    shape = Shape(options.tokens, options.patches, options.replay_tokens)
    with feed(options.seed + trainer.steps, options.workers, shape, replay.replay) as source:
        run(trainer, source, replay, options)
    for name, weights in network.weights().items():
        from safetensors.torch import save_file

        save_file(weights, options.out / f"{name}.safetensors")
    torch.save(trainer.state(), options.out / "state.pt")
    print("saved", flush=True)
    if options.check:
        for row, (exact, total) in trainer.check(cases(options.seed + 900000, options.check)).items():
            print(f"{row:28} {exact:4} of {total:4}  {exact / total:.3f}", flush=True)


def run(trainer: Trainer, source: Feed, replay: Texts, options: argparse.Namespace) -> None:
    ready = batches(source, trainer.device)
    began, before, at, dialogues, since = time.monotonic(), trainer.spent_s, trainer.steps, 0, time.monotonic()
    while trainer.spent_s < min(options.until or options.seconds, options.seconds):
        batch, count = ready.get(timeout=300)
        seen = trainer.step(batch, replay, trainer.spent_s / options.seconds, trainer.spent_s >= options.tower_seconds)
        dialogues += count
        if trainer.steps % options.every == 0 or trainer.steps in (1, 5):
            shown = " ".join(f"{name} {value.item():.4f}" for name, value in seen.items())
            now = time.monotonic()
            pace = (now - since) / max(1, trainer.steps - at)
            per_64 = 64 * (now - since) / max(1, dialogues)
            print(f"step {trainer.steps} t {trainer.spent_s:.0f} {shown} | {pace * 1000:.0f} ms/step, {per_64 * 1000:.0f} ms/64 conversations, {source.waiting()} packs waiting", flush=True)
            at, dialogues, since = trainer.steps, 0, now
        trainer.spent_s = before + time.monotonic() - began


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m server.demo.train", description="Train the bundled demo model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", type=Path, default=HERE / "weights", help="where to start from")
    parser.add_argument("--fresh", action="store_true", help="start from random weights instead")
    parser.add_argument("--seconds", type=float, default=1050, help="of training; the learning rate falls to 0 over it")
    parser.add_argument("--until", type=float, help="stop after so many of them, to be resumed")
    parser.add_argument("--tower-seconds", type=float, default=90, help="of them, at first, on the vision tower alone")
    parser.add_argument("--resume", type=Path, help="a state.pt")
    parser.add_argument("--spent", type=float, default=0, help="seconds to count as spent, when only the weights of a training are left")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", type=int, help="of the base model's texts; all by default")
    parser.add_argument("--check", type=int, default=60, help="cases a category after training; 0: none")
    parser.add_argument("--every", type=int, default=100, help="steps between lines of the log")
    for name, default in Shape()._asdict().items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=f"{name} of a pack")
    return parser.parse_args()


if __name__ == "__main__":
    main()
