"""The demo model's builder and the tiny model's."""

import hashlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from server.demo import build, convert
from tests.support.tiny_vlm import build_tiny_vlm

LANGUAGE_MODEL = "820276e0535677c9ac82973967ec6190fbd9e3c98a86b0242e1275f03cc918ca"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_converted_language_model_has_the_same_bits_everywhere() -> None:
    """The converted SmolLM2 is, bit for bit, the one that the vision tower was trained with."""
    assert convert.digest(convert.language_model(convert.gguf_path())) == LANGUAGE_MODEL


def test_a_stale_model_is_replaced_by_the_same_bytes_and_a_fresh_one_left_alone(demo_model: Path, tmp_path: Path) -> None:
    """A folder built from something else is replaced as a whole, by files equal to another build's; then nothing is done."""
    out = tmp_path / "demo"
    out.mkdir()
    (out / build.STAMP).write_text("something older")
    (out / "litter").touch()
    assert build.ensure(out)
    assert {p.name: sha256(p) for p in out.iterdir()} == {p.name: sha256(p) for p in demo_model.iterdir()}
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]
    assert not build.ensure(out)


def test_a_build_that_fails_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package of the language part the error names it, and what is in the folder stays."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "model.safetensors").write_text("old")
    monkeypatch.setattr(convert, "PACKAGE", "no-such-package")
    with pytest.raises(FileNotFoundError, match="no-such-package"):
        build.ensure(tmp_path / "demo")
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["model.safetensors"]


def test_an_unknown_tensor_is_refused() -> None:
    """A GGUF file of another architecture is named in the error instead of giving half a model."""
    with pytest.raises(ValueError, match="ffn_gate_exps"):
        convert._name("blk.0.ffn_gate_exps.weight")


def test_vision_tokens_are_single_tokens_where_the_config_says(demo_model: Path) -> None:
    """Tokenizer and configuration agree on the ids of the vision tokens."""
    config = json.loads((demo_model / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids = tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>", add_special_tokens=False).ids
    assert ids == [config["vision_start_token_id"], config["image_token_id"], config["vision_end_token_id"]]
    assert config["text_config"]["vocab_size"] == build.VOCABULARY >= tokenizer.get_vocab_size()


def test_the_tiny_model_is_small_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    """Two tiny models of one seed are equal, of another seed differ, and take Qwen's own pixel limits."""
    one, again, other = (build_tiny_vlm(tmp_path / str(n), seed=seed) for n, seed in enumerate((0, 0, 1)))
    name = "model.safetensors"
    assert sha256(one / name) == sha256(again / name) != sha256(other / name)
    with safe_open(one / name, "pt") as file:
        assert sum(file.get_tensor(key).numel() for key in list(file.keys())) < 8_000_000
    processor = json.loads((one / "processor_config.json").read_text())["image_processor"]
    assert processor["size"] == {"shortest_edge": 3_136, "longest_edge": 12_845_056}
