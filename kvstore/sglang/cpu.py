"""What SGLang's CPU mode still asks Triton for when a page holds several tokens, in PyTorch. Only under SGLANG_USE_CPU_ENGINE=1."""

from collections.abc import Callable
from typing import Any

import torch


class Kernel:
    """Called as kernel[grid](...), like Triton's."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def alloc_decode(seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, out: torch.Tensor,
                 bs_upper: int, page_size: int) -> None:
    """One slot for each sequence: the next in its page, or the first of a fresh page. out is [batch]."""
    fresh = (seq_lens - 1) % page_size == 0
    n = int(fresh.sum())
    out.copy_(last_loc + 1)
    if n and n <= len(free_pages):                   # otherwise the caller returns None and drops `out`
        out[fresh] = free_pages[:n].to(out.dtype) * page_size


def alloc_extend(prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor,
                 out: torch.Tensor, bs_upper: int, page_size: int) -> None:
    """Slots for the tokens [prefix, seq) of each sequence, concatenated in out."""
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    need = int(((seq_lens + page_size - 1) // page_size - (prefix_lens + page_size - 1) // page_size).sum())
    if need <= len(free_pages):
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, out.device)


def install() -> None:
    """These are module globals called as kernel[grid](...), which SGLang's hook registry cannot wrap."""
    from sglang.srt.mem_cache.allocator import paged

    paged.alloc_extend_kernel = Kernel(alloc_extend)
    paged.alloc_decode_kernel = Kernel(alloc_decode)
