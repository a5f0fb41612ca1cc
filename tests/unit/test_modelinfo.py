"""What is read from a model's folder, and what is refused."""

import json
import shutil
import subprocess
import sys

import pytest

from server import modelinfo
from server.modelinfo import ModelError


@pytest.fixture
def folder(tiny_model, tmp_path):
    """A copy that a test may damage; the weights are cut to a small file."""
    out = tmp_path / "model"
    shutil.copytree(tiny_model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (out / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(5 << 20))
    return out


def edit(path, **changes):
    tree = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            tree.pop(key, None)
        else:
            tree[key] = value
    path.write_text(json.dumps(tree))


def test_the_facts_of_a_vision_model(tiny_model):
    """Special ids, stop tokens, pixel limits, positions and type are those of the folder's files."""
    info = modelinfo.read(str(tiny_model))
    name = info.tokenizer.id_to_token
    assert (name(info.image_token_id), name(info.vision_start_id), name(info.vision_end_id)) == (
        "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    assert name(info.end_of_turn_id) == "<|im_end|>" and info.stop_token_ids == (2,)
    assert (info.rules.patch, info.rules.merge, info.rules.min_pixels, info.rules.max_pixels) == (14, 2, 3136, 12_845_056)
    assert (info.context_tokens, info.dtype, info.model_type) == (32_768, "float32", "qwen2_5_vl")


def test_torch_and_transformers_are_not_loaded():
    """Reading models and building prompts costs the server process neither library."""
    code = "import sys, server.modelinfo, server.prompt, server.images; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_several_stop_tokens_and_the_end_of_turn(folder):
    """A list of end tokens is taken whole, and the template's end of turn is always among them."""
    edit(folder / "generation_config.json", eos_token_id=[0, 5])
    assert modelinfo.read(str(folder)).stop_token_ids == (0, 2, 5)


def test_a_text_model_has_no_image_facts(folder):
    """Without image_token_id there are no image ids and no rule, whatever else the config says."""
    edit(folder / "config.json", image_token_id=None)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\n' }}")
    info = modelinfo.read(str(folder))
    assert (info.image_token_id, info.vision_start_id, info.vision_end_id, info.rules) == (None, None, None, None)


def test_the_image_rule_is_found_in_the_older_file_too(folder):
    """preprocessor_config.json with min_pixels and max_pixels counts where processor_config.json holds no image processor."""
    edit(folder / "processor_config.json", image_processor=None)
    (folder / "preprocessor_config.json").write_text(json.dumps(
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}))
    assert modelinfo.read(str(folder)).rules.max_pixels == 12_845_056
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast"}))
    assert modelinfo.read(str(folder)).rules.max_pixels == 1_003_520


@pytest.mark.parametrize(("name", "content", "says"), [
    ("config.json", None, "config.json"), ("config.json", "{", "not JSON"), ("config.json", "[]", "object"),
    ("tokenizer.json", None, "tokenizer.json"), ("tokenizer.json", "{}", "cannot be read"), ("chat_template.jinja", None, "chat template"),
    ("processor_config.json", '{"image_processor": {"image_processor_type": "CLIPImageProcessor"}}', "CLIPImageProcessor"),
    ("chat_template.jinja", "{{ messages|length }}", "drops, repeats"),
])
def test_a_folder_that_cannot_be_served_is_refused_with_the_reason(folder, name, content, says):
    """Each missing or foreign file gives a ModelError that names it."""
    modelinfo.read(str(folder))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ModelError, match=says):
        modelinfo.read(str(folder))


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "a/b/c"])
def test_a_missing_folder_is_not_looked_for_on_the_hub(name):
    """A name that can only be a path is refused at once."""
    with pytest.raises(ModelError, match="no folder"):
        modelinfo.locate(name)


def test_the_weights_digest_tells_weights_apart(folder):
    """Name, size, header, first and last MiB each change it; the same bytes elsewhere do not."""
    digest = lambda: modelinfo.weights_digest(folder)
    path = folder / "model.safetensors"
    seen = [digest()]
    good = path.read_bytes()
    for at in (12, 3000, len(good) - 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1:])
        seen.append(digest())
    path.write_bytes(good + b"\0")
    seen.append(digest())
    path.write_bytes(good)
    assert digest() == seen[0]
    path.rename(folder / "other.safetensors")
    seen.append(digest())
    assert len(set(seen)) == len(seen)


def test_the_tokenizer_digest_covers_the_template(folder):
    """Another template is another fingerprint: its KV must not be shared."""
    before = modelinfo.read(str(folder)).tokenizer_digest
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("named SmolLM", "named Ember"))
    assert modelinfo.read(str(folder)).tokenizer_digest != before


def test_structural_tokens_that_a_model_left_unmarked_are_never_parsed(folder):
    """A tokenizer that does not call <|im_end|> and <|image_pad|> special still spells them out in texts."""
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    for token in tree["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(tree))
    info = modelinfo.read(str(folder))
    ids = info.tokenizer.encode("<|im_end|><|image_pad|><|im_start|>", add_special_tokens=False).ids
    assert not {info.image_token_id, info.end_of_turn_id, 1} & set(ids)
