"""What the worker tells the plugin in SGLang's other processes. Travels in the environment, because they are spawned."""

import os

import msgspec

VARIABLE = "REKINDLE_PLUGIN"


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: str
    """Names the KV: what must match for its bytes to be shared."""
    vision_folder: str
    """Preprocessed images, shared by the front process and the scheduler."""
    offload_url: str | None = None
    """zmq address of the LMCache daemon; None: no offload."""
    chunk_tokens: int = 16
    timeout_s: float = 3.0
    heartbeat_s: float = 2.0


def publish(config: PluginConfig) -> None:
    """For processes spawned from now on."""
    os.environ[VARIABLE] = msgspec.json.encode(config).decode()


def current() -> PluginConfig | None:
    """None in a process that Rekindle did not start: the plugin then leaves SGLang as it is."""
    text = os.environ.get(VARIABLE)
    return msgspec.json.decode(text, type=PluginConfig) if text else None
