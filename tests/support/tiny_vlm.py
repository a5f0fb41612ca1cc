"""A random Qwen2.5-VL of the smallest useful size, for tests that count: tokens, pages, bytes, turns.

Its answers mean nothing, but depend on the whole context (the weights are large enough for that). Tokenizer and chat template
are the demo model's; pixel limits are Qwen's own (3,136 to 12,845,056), and 32,768 positions fit.
"""

import json
import math
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from server.demo import build as demo

HIDDEN, LAYERS, HEADS, KEY_HEADS, INNER = 64, 2, 2, 1, 128
VISION_HIDDEN, VISION_DEPTH, VISION_HEADS, VISION_INNER = 32, 2, 2, 64
PATCH_VALUES, MERGED_PATCHES = 3 * 2 * 14 * 14, 4
MAX_POSITIONS = 32_768
MIN_PIXELS, MAX_PIXELS = 3_136, 12_845_056


def build_tiny_vlm(out: Path, dtype: Literal["bfloat16", "float32"] = "float32", seed: int = 0) -> Path:
    """Write the model's folder (which must not exist) and return it. The same seed gives the same bytes."""
    out.mkdir(parents=True)
    for source in (demo.HERE / "files").iterdir():
        (out / source.name).write_bytes(source.read_bytes())
    _edit(out / "config.json", _shape, dtype)
    _edit(out / "processor_config.json", _pixel_limits)
    _edit(out / "tokenizer_config.json", lambda tree: tree.update(model_max_length=MAX_POSITIONS))
    save_file(_weights(getattr(torch, dtype), seed), out / "model.safetensors", metadata={"format": "pt"})
    return out


def _edit(path: Path, change, *arguments) -> None:
    tree = json.loads(path.read_text())
    change(tree, *arguments)
    path.write_text(json.dumps(tree, indent=2) + "\n")


def _shape(config: dict, dtype: str) -> None:
    config["dtype"] = dtype
    config["tie_word_embeddings"] = False  # tied random embeddings would only repeat the last token
    config["text_config"].update(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS,
        intermediate_size=INNER, max_position_embeddings=MAX_POSITIONS, max_window_layers=LAYERS,
        layer_types=["full_attention"] * LAYERS, tie_word_embeddings=False,
    )  # fmt: skip
    config["text_config"]["rope_parameters"]["mrope_section"] = [4, 6, 6]  # halves of a head's 32 dimensions
    config["vision_config"].update(
        depth=VISION_DEPTH, hidden_size=VISION_HIDDEN, num_heads=VISION_HEADS, intermediate_size=VISION_INNER,
        out_hidden_size=HIDDEN, fullatt_block_indexes=[VISION_DEPTH - 1],
    )  # fmt: skip


def _pixel_limits(config: dict) -> None:
    config["image_processor"]["size"] = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}


def _weights(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        out[name + ".weight"] = torch.randn(rows, columns, generator=random) / math.sqrt(columns)
        if bias:
            out[name + ".bias"] = torch.randn(rows, generator=random) * 0.1

    def norm(name: str, size: int) -> None:
        out[name + ".weight"] = torch.ones(size)

    linear("model.embed_tokens", demo.VOCABULARY, HIDDEN, bias=False)
    linear("lm_head", demo.VOCABULARY, HIDDEN, bias=False)
    norm("model.norm", HIDDEN)
    key_size = HIDDEN // HEADS * KEY_HEADS
    for layer in (f"model.layers.{n}." for n in range(LAYERS)):
        norm(layer + "input_layernorm", HIDDEN)
        norm(layer + "post_attention_layernorm", HIDDEN)
        for part, rows in (("q", HIDDEN), ("k", key_size), ("v", key_size)):
            linear(f"{layer}self_attn.{part}_proj", rows, HIDDEN, bias=True)
        linear(layer + "self_attn.o_proj", HIDDEN, HIDDEN, bias=False)
        linear(layer + "mlp.gate_proj", INNER, HIDDEN, bias=False)
        linear(layer + "mlp.up_proj", INNER, HIDDEN, bias=False)
        linear(layer + "mlp.down_proj", HIDDEN, INNER, bias=False)

    linear("visual.patch_embed.proj", VISION_HIDDEN, PATCH_VALUES, bias=False)
    out["visual.patch_embed.proj.weight"] = out["visual.patch_embed.proj.weight"].reshape(VISION_HIDDEN, 3, 2, 14, 14)
    for block in (f"visual.blocks.{n}." for n in range(VISION_DEPTH)):
        norm(block + "norm1", VISION_HIDDEN)
        norm(block + "norm2", VISION_HIDDEN)
        linear(block + "attn.qkv", 3 * VISION_HIDDEN, VISION_HIDDEN, bias=True)
        linear(block + "attn.proj", VISION_HIDDEN, VISION_HIDDEN, bias=True)
        linear(block + "mlp.gate_proj", VISION_INNER, VISION_HIDDEN, bias=True)
        linear(block + "mlp.up_proj", VISION_INNER, VISION_HIDDEN, bias=True)
        linear(block + "mlp.down_proj", VISION_HIDDEN, VISION_INNER, bias=True)
    merged = VISION_HIDDEN * MERGED_PATCHES
    norm("visual.merger.ln_q", VISION_HIDDEN)
    linear("visual.merger.mlp.0", merged, merged, bias=True)
    linear("visual.merger.mlp.2", HIDDEN, merged, bias=True)
    return {name: weight.to(dtype).contiguous() for name, weight in out.items()}
