"""In PyTorch, the two helpers of sgl_kernel that SGLang's CPU mode calls by name; anything else raises when it is called.

With no CPU kernels in `torch.ops.sgl_kernel`, SGLang takes the native PyTorch path in every layer.
"""

import ctypes

import torch

__version__ = "0.0.0+rekindle.cpu"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, row_tokens):
    """Write each request's new slots, laid end to end in `out_cache_loc`, into its row at [start, end)."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy slots `src_loc` to `tgt_loc` in every layer's buffer (address and bytes per slot given)."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + slot * stride, stride) for slot in sources]  # all read first: they may overlap
        for slot, content in zip(targets, slots, strict=True):
            ctypes.memmove(base + slot * stride, content, stride)


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this machine: it has no SGLang kernels")

    return missing


def _declare_operators() -> torch.library.Library:
    """Operators that SGLang's model files name when they are imported: declared, never implemented."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
        "fused_gdn_gating_cpu",
        "fused_sigmoid_gating_delta_rule_update_cpu",
    ):
        if not hasattr(torch.ops.sgl_kernel, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    return library


_operators = _declare_operators()
