"""What SGLang is started with, and what is refused before it starts."""

import pytest

from server.engines.base import EngineStartError
from server.engines.config import EngineConfig
from server.engines.sglang import SGLangEngine


def config(**more: object) -> EngineConfig:
    return EngineConfig(model_path="m", fingerprint="f", image_folder="i", vision_folder="v", device="cuda", **more)


def test_offload_runs_without_overlap() -> None:
    """Copies are ordered behind the scheduler's stream, so that must be the one that the forward pass runs on."""
    assert SGLangEngine(config(offload_url="tcp://x"))._arguments()["disable_overlap_schedule"] is True
    assert "disable_overlap_schedule" not in SGLangEngine(config())._arguments()


def test_overlap_with_offload_is_refused() -> None:
    """The engine does not start, and the message names the argument."""
    with pytest.raises(EngineStartError, match="disable_overlap_schedule"):
        SGLangEngine(config(offload_url="tcp://x", extra_args={"disable_overlap_schedule": False}))._arguments()
