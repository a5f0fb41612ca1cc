"""PURE. Sizes of KV: tokens, pages, bytes. Linear in the length of a conversation, whatever else is said of it.

A *page* is a fixed run of tokens whose KV is stored together; only whole pages are shared, spilled and restored.
The last token of a sequence never has KV: it was sampled, not computed.
"""

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where KV pages live. For people: GPU (or the CPU engine's own pool), memory, disk."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV layout of one running engine."""

    page_tokens: int
    """Tokens in one page."""
    token_bytes: int
    """Bytes of K and V of one token over all layers and all ranks."""
    device_tokens: int
    """Capacity of the device pool in tokens."""

    def __post_init__(self) -> None:
        if min(self.page_tokens, self.token_bytes, self.device_tokens) < 1:
            raise ValueError(f"every part of a geometry is at least 1: {self}")

    def page_floor(self, tokens: int) -> int:
        """The largest whole-page token count that is not above `tokens`."""
        return tokens // self.page_tokens * self.page_tokens

    def kept_tokens(self, sequence_tokens: int) -> int:
        """Tokens of a finished sequence of that length whose KV can be kept: whole pages, without the last token."""
        return self.page_floor(max(0, sequence_tokens - 1))

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one perhaps partly filled."""
        return -(-tokens // self.page_tokens)

    def bytes(self, tokens: int) -> int:
        """Bytes of the KV of `tokens` tokens, in whole pages."""
        return self.pages(tokens) * self.page_tokens * self.token_bytes
