"""Builds the demo model's folder: `python -m server.demo.build OUT [--dtype bfloat16|float32]`.

The language part comes from `convert`, `weights/` adds a vision tower and a low-rank change of the language part, and
`files/` (configuration, tokenizer, chat template) is copied. The result is an ordinary Qwen2.5-VL folder.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from server.demo import convert

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent
STAMP = "built-from"
LORA_SCALE = 2.0
VOCABULARY = 49216
"""SmolLM2's 49,152 tokens, five for vision, padded to a multiple of 64."""
NEW_TOKEN_SCALE = 0.1
"""The added tokens start at the mean embedding, made small; their trained meaning is in the vision tower's output."""

Dtype = Literal["bfloat16", "float32"]


def ensure(out: Path, dtype: Dtype = "bfloat16") -> bool:
    """Have the model in `out`, built from what is installed now. False: it was there already.

    `out` is replaced as a whole or left as it was. Raises FileNotFoundError without the package of the language part, OSError.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with _alone(out.parent):
        stamp = _stamp(dtype)
        if (out / STAMP).is_file() and (out / STAMP).read_text() == stamp:
            return False
        fresh, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(HERE / "files", fresh)
        _write_weights(fresh / "model.safetensors", dtype)
        (fresh / STAMP).write_text(stamp)
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        fresh.rename(out)
        shutil.rmtree(old, ignore_errors=True)
        return True


def weights(dtype: Dtype = "bfloat16") -> "dict[str, torch.Tensor]":
    """All tensors of the model under the names that Qwen2.5-VL's own checkpoints use."""
    import torch
    from safetensors.torch import load_file

    kind: torch.dtype = getattr(torch, dtype)
    lora = load_file(HERE / "weights" / "lora.safetensors")
    out: dict[str, torch.Tensor] = {}
    for name, weight in convert.language_model(convert.gguf_path()):
        if name == "embed_tokens.weight":
            weight = grow(weight)
        elif (change := _change(name, lora)) is not None:
            weight = weight.double() + change
        out["model." + name] = weight.to(kind)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):  # Qwen2 has biases here, Llama has none
            out["model." + name.removesuffix("weight") + "bias"] = torch.zeros(weight.shape[0], dtype=kind)
    for part in ("vision-1", "vision-2"):
        for name, weight in load_file(HERE / "weights" / f"{part}.safetensors").items():
            out["visual." + name] = weight.to(kind)
    return out


def _write_weights(path: Path, dtype: Dtype) -> None:
    from safetensors.torch import save_file

    save_file(weights(dtype), path, metadata={"format": "pt"})


def _change(name: str, lora: "dict[str, torch.Tensor]") -> "torch.Tensor | None":
    """What training added to `layers.N.block.projection.weight`. In float64, so that the rounded sum is the same on every machine."""
    parts = name.split(".")
    if len(parts) != 5 or (key := f"layers.{parts[1]}.{parts[3]}") + ".a" not in lora:
        return None
    return LORA_SCALE * lora[key + ".b"].double() @ lora[key + ".a"].double()


def grow(embeddings: "torch.Tensor") -> "torch.Tensor":
    import torch

    added = embeddings.double().mean(0) * NEW_TOKEN_SCALE
    return torch.cat([embeddings.double(), added.expand(VOCABULARY - embeddings.shape[0], -1)])


def _stamp(dtype: Dtype) -> str:
    """Names the dtype and everything that the model is made from, this code among it."""
    sources = [Path(__file__), Path(convert.__file__), *sorted(HERE.glob("files/*")), *sorted(HERE.glob("weights/*"))]
    lines = [f"dtype {dtype}"]
    for path in [*sources, convert.gguf_path()]:
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()} {path.name}")
    return "\n".join(lines) + "\n"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One builder at a time: two that start together would rename over each other."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server.demo.build", description="Build the bundled demo model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        built = ensure(options.out, options.dtype)
    except OSError as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    if built:
        print(f"demo model: built in {options.out} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
