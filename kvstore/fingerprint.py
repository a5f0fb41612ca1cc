"""PURE. What must match before KV bytes may be shared: everything that a page's content depends on besides its tokens."""

import hashlib
import json
from dataclasses import asdict, dataclass

FORMAT_VERSION = 1
"""Rises when Rekindle stores pages in another form; older pages then match nothing and are recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    model: str
    weights_digest: str
    adapter: str = ""
    """Name and digest of a LoRA adapter; empty without one."""
    kv_dtype: str
    tensor_parallel: int
    page_tokens: int
    tokenizer_digest: str
    """Of the tokenizer and the chat template."""
    engine: str
    engine_version: str
    format_version: int = FORMAT_VERSION

    def hex(self) -> str:
        """16 hex digits, the same on every machine and in every process."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
