"""The demo model as the trainer runs it: the same function as transformers' Qwen2.5-VL, on packs, with the language part's change folded in.

Master weights are float32; each step casts them to bf16 once, adds the low-rank change to the frozen weights once
(W + 2BA), and runs everything else on bf16. Sequences of a pack do not see each other (flash attention with their starts).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.demo.build import LORA_SCALE

TEXT_HEADS, KEY_HEADS, LAYERS, WIDTH = 9, 3, 30, 576
VISION_HEADS, DEPTH, VISION_WIDTH = 5, 6, 320
HEAD = 64
MROPE_SECTION = (8, 12, 12)
TEXT_THETA, VISION_THETA = 100000.0, 10000.0
TEXT_EPSILON, VISION_EPSILON = 1e-5, 1e-6
MEAN, SPREAD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PROJECTIONS = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
JOINED = {"qkv": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (tokens, heads, HEAD)."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, causal: bool) -> Tensor:
    """(tokens, heads, HEAD) each; sequences lie between `starts`."""
    if q.is_cuda:
        return torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, causal, False, scale=HEAD**-0.5)[0]
    number = torch.bucketize(torch.arange(len(q)), starts[1:-1].long(), right=True)
    mask = number[:, None] == number[None]
    if causal:
        mask = mask & torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask).transpose(0, 1)


# ---- the parts that are worth compiling: all but the attention -----------------------------------------------------
def vision_before(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = F.linear(rms(x, norm, VISION_EPSILON), weight, bias).view(-1, 3, VISION_HEADS, HEAD).unbind(1)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def vision_after(x: Tensor, seen: Tensor, proj: Tensor, proj_bias: Tensor, norm: Tensor, gate: Tensor, gate_bias: Tensor, up: Tensor, up_bias: Tensor,
                 down: Tensor, down_bias: Tensor) -> Tensor:  # fmt: skip
    x = x + F.linear(seen.flatten(1), proj, proj_bias)
    h = rms(x, norm, VISION_EPSILON)
    return x + F.linear(F.silu(F.linear(h, gate, gate_bias)) * F.linear(h, up, up_bias), down, down_bias)


def text_before(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = F.linear(rms(x, norm, TEXT_EPSILON), weight).split([TEXT_HEADS * HEAD, KEY_HEADS * HEAD, KEY_HEADS * HEAD], -1)
    q, k = rotate(q.view(-1, TEXT_HEADS, HEAD), cos, sin), rotate(k.view(-1, KEY_HEADS, HEAD), cos, sin)
    group = TEXT_HEADS // KEY_HEADS
    return q, k.repeat_interleave(group, 1), v.view(-1, KEY_HEADS, HEAD).repeat_interleave(group, 1)


def text_after(x: Tensor, seen: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    x = x + F.linear(seen.flatten(1), out)
    gate, up = F.linear(rms(x, norm, TEXT_EPSILON), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


class Network(nn.Module):
    """`language` and `tower`: weights by the names of `convert` and of the vision checkpoint; `lora`: as in weights/lora.safetensors."""

    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    norm: Tensor
    embeddings: Tensor
    mean: Tensor
    spread: Tensor

    def __init__(self, language: dict[str, Tensor], tower: dict[str, Tensor], lora: dict[str, Tensor], dtype: torch.dtype, compiled: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.tower = nn.ParameterDict({_key(name): nn.Parameter(weight.float()) for name, weight in tower.items()})
        self.lora = nn.ParameterDict()
        for name in PROJECTIONS:
            for side in "ab":
                self.lora[f"{name}_{side}"] = nn.Parameter(torch.stack([lora[f"layers.{i}.{name}.{side}"].float() for i in range(LAYERS)]))
        for joined, names in JOINED.items():
            stacked = [torch.stack([language[f"layers.{i}.{PROJECTIONS[n]}.{n}.weight"] for i in range(LAYERS)]) for n in names]
            self.register_buffer(f"base_{joined}", torch.cat(stacked, 1).to(dtype))
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.register_buffer(name, torch.stack([language[f"layers.{i}.{name}.weight"] for i in range(LAYERS)]).to(dtype))
        self.register_buffer("norm", language["norm.weight"].to(dtype))
        self.register_buffer("embeddings", language["embed_tokens.weight"].to(dtype))
        self.register_buffer("mean", torch.tensor(MEAN).repeat_interleave(196) * 255)
        self.register_buffer("spread", torch.tensor(SPREAD).repeat_interleave(196) * 255)
        parts: list[Callable[..., Any]] = [vision_before, vision_after, text_before, text_after]
        self._vision_before, self._vision_after, self._text_before, self._text_after = (torch.compile(p, dynamic=False) if compiled else p for p in parts)

    def see(self, patches: Tensor, grid: Tensor, starts: Tensor, longest: int) -> Tensor:
        """uint8 patches of many pictures -> one vector for each token."""
        w = {name: weight.to(self.dtype) for name, weight in self.tower.items()}
        kernel = self.tower[_key("patch_embed.proj.weight")].sum(2).flatten(1)  # a still picture is the same at both times
        x = F.linear(((patches.float() - self.mean) / self.spread).to(self.dtype), kernel.to(self.dtype))
        step = VISION_THETA ** -(torch.arange(0, HEAD // 2, 2, device=x.device) / (HEAD // 2))
        angle = (grid[..., None] * step).flatten(1).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        for i in range(DEPTH):
            b = {name.removeprefix(f"blocks-{i}-"): weight for name, weight in w.items() if name.startswith(f"blocks-{i}-")}
            q, k, v = self._vision_before(x, cos, sin, b["norm1-weight"], b["attn-qkv-weight"], b["attn-qkv-bias"])
            rest = [b[f"mlp-{n}_proj-{s}"] for n in ("gate", "up", "down") for s in ("weight", "bias")]
            x = self._vision_after(x, attend(q, k, v, starts, longest, False), b["attn-proj-weight"], b["attn-proj-bias"], b["norm2-weight"], *rest)
        x = rms(x, w["merger-ln_q-weight"], VISION_EPSILON).view(-1, VISION_WIDTH * 4)
        x = F.gelu(F.linear(x, w["merger-mlp-0-weight"], w["merger-mlp-0-bias"]))
        return F.linear(x, w["merger-mlp-2-weight"], w["merger-mlp-2-bias"])

    def folded(self) -> dict[str, tuple[Tensor, ...]]:
        """W + 2BA of each layer."""
        out = {}
        for joined, names in JOINED.items():
            change = torch.cat([torch.bmm(self.lora[f"{n}_b"], self.lora[f"{n}_a"]) for n in names], 1)
            out[joined] = (getattr(self, f"base_{joined}") + LORA_SCALE * change).to(self.dtype).unbind(0)
        return out

    def read(self, ids: Tensor, positions: Tensor, vision: Tensor | None, places: Tensor | None, starts: Tensor, longest: int) -> Tensor:
        """Hidden state of each token, before the output layer. `places`: where the vectors of `vision` go."""
        w = self.folded()
        x = F.embedding(ids, self.embeddings)
        if vision is not None and places is not None:
            x = torch.cat((x, x.new_zeros(1, WIDTH))).index_copy(0, places, vision)[:-1]
        step = TEXT_THETA ** -(torch.arange(0, HEAD, 2, device=x.device) / HEAD)
        axis = torch.tensor([i for i, n in enumerate(MROPE_SECTION) for _ in range(n)], device=x.device)
        angle = (positions[axis].T * step).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        for i in range(LAYERS):
            q, k, v = self._text_before(x, cos, sin, self.input_layernorm[i], w["qkv"][i])
            x = self._text_after(x, attend(q, k, v, starts, longest, True), w["o"][i], self.post_attention_layernorm[i], w["gate_up"][i], w["down"][i])
        return rms(x, self.norm, TEXT_EPSILON)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embeddings).float()

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """The trained parts as they ship: bf16, by file of `weights/`."""
        tower = {name.replace("-", "."): weight.detach().to(torch.bfloat16).cpu().contiguous() for name, weight in self.tower.items()}
        names = sorted(tower)
        lora = {}
        for name in PROJECTIONS:
            for side in "ab":
                for i, weight in enumerate(self.lora[f"{name}_{side}"].detach().to(torch.bfloat16).cpu()):
                    lora[f"layers.{i}.{name}.{side}"] = weight.contiguous()
        half = math.ceil(len(names) / 2)
        return {"vision-1": {n: tower[n] for n in names[:half]}, "vision-2": {n: tower[n] for n in names[half:]}, "lora": lora}


def _key(name: str) -> str:
    """nn.ParameterDict allows no dots."""
    return name.replace(".", "-")
