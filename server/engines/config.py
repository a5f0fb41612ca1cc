"""What a worker needs to know to host an engine. Travels as JSON from the supervisor to the worker."""

from typing import Any, Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model_path: str
    """A folder."""
    fingerprint: str
    image_folder: str
    """Normalised images, <digest>.png, written by the server."""
    vision_folder: str
    """Preprocessed images; the engine's own, safe to delete."""
    kind: Literal["sglang", "scripted"] = "sglang"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "auto"
    context_tokens: int = 8192
    device_tokens: int | None = 16384
    page_tokens: int = 16
    max_running_turns: int = 4
    offload_url: str | None = None
    """zmq address of the LMCache daemon, tcp://127.0.0.1:PORT; None: no offload."""
    chunk_tokens: int = 16
    offload_timeout_s: float = 3.0
    extra_args: dict[str, Any] = {}
    log_level: str = "warning"


def decode(text: str | bytes) -> EngineConfig:
    """Raises msgspec.ValidationError naming the field."""
    return msgspec.json.decode(text, type=EngineConfig)


def encode(config: EngineConfig) -> bytes:
    return msgspec.json.encode(config)
