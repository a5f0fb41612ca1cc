"""What the server knows of a model without loading it: tokenizer, chat template, special ids, image rule, identity.

Read from the folder's own JSON files with `tokenizers` alone: importing transformers loads torch, which the server process
never needs.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .pixels import ImageRules
from .template import Template, TemplateError, learn

EDGE_BYTES = 1 << 20
TRANSFORMERS_MIN_PIXELS, TRANSFORMERS_MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""What the engine uses where a model's processor config names no limits: the defaults of transformers' own class."""


class ModelError(ValueError):
    """The folder is not a model that this server can serve; the message says what is missing."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelInfo:
    name: str
    """As it was asked for."""
    folder: Path
    model_type: str
    dtype: str | None
    """Of the stored weights."""
    context_tokens: int
    """The most positions that the model was made for."""
    tokenizer: Tokenizer = field(repr=False)
    """Reads ordinary text: special tokens in it are spelled out. Not for template text."""
    template: Template = field(repr=False)
    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer: the end of a turn and those of the generation config."""
    image_token_id: int | None
    """None: a text model. Then `rules` is None too."""
    vision_start_id: int | None
    vision_end_id: int | None
    rules: ImageRules | None
    longest_token_bytes: int
    """At least: no token of ordinary text stands for more bytes."""
    weights_digest: str
    tokenizer_digest: str
    """Of tokenizer and chat template."""

    @property
    def end_of_turn_id(self) -> int:
        return self.template.end_of_turn


def locate(name: str, revision: str | None = None) -> Path:
    """The folder of a model: `name` itself, or the local snapshot of a hub name, fetched if it must be. Raises ModelError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no folder {name}")
    from huggingface_hub import snapshot_download  # slow to import, and a local model never needs it

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.txt"]))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} is neither a folder nor a model that the hub gives: {error}") from error


def read(name: str, revision: str | None = None) -> ModelInfo:
    """Raises ModelError, also for a chat template that is not append-only."""
    folder = locate(name, revision)
    config = _json(folder / "config.json")
    if not config:
        raise ModelError(f"{folder} has no config.json")
    tokenizer = _tokenizer(folder)
    settings = _json(folder / "tokenizer_config.json")
    source = _template_source(folder, settings)
    image_token_id = config.get("image_token_id")
    variables = {key: _content(value) for key, value in settings.items() if key.endswith("_token") and value}
    try:
        template = learn(tokenizer, source, variables, image_token_id)
    except TemplateError as error:
        raise ModelError(f"{name}: {error}") from error
    stop = _stop_ids(folder, config, settings, tokenizer) | {template.end_of_turn}
    vision = (config.get("vision_start_token_id"), config.get("vision_end_token_id"))
    _seal(tokenizer, template.ids() | stop | {i for i in (image_token_id, *vision) if i is not None})
    text_config = config.get("text_config") or {}
    context_tokens = text_config.get("max_position_embeddings") or config.get("max_position_embeddings")
    if not context_tokens:
        raise ModelError(f"{folder / 'config.json'} names no max_position_embeddings")
    return ModelInfo(
        name=name, folder=folder, model_type=str(config.get("model_type")),
        dtype=next((str(c[key]) for c in (config, text_config) for key in ("dtype", "torch_dtype") if c.get(key)), None),
        context_tokens=context_tokens, tokenizer=tokenizer, template=template, stop_token_ids=tuple(sorted(stop)),
        image_token_id=image_token_id, vision_start_id=vision[0] if image_token_id is not None else None,
        vision_end_id=vision[1] if image_token_id is not None else None,
        rules=None if image_token_id is None else _rules(folder),
        longest_token_bytes=max(len(token.encode()) for token in tokenizer.get_vocab()), weights_digest=weights_digest(folder),
        tokenizer_digest=hashlib.sha256((folder / "tokenizer.json").read_bytes() + b"\0" + source.encode()).hexdigest())


def weights_digest(folder: Path) -> str:
    """Tells weights apart cheaply: sha256 over each *.safetensors file's name, size, header, and first and last MiB.

    The header holds every tensor's name, type, shape and place. A change in the middle of a file alone goes unseen.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            header = file.read(min(int.from_bytes(first, "little"), size))
            head = file.read(EDGE_BYTES)
            file.seek(max(0, size - EDGE_BYTES))
            tail = file.read(EDGE_BYTES)
        for part in (path.name.encode(), str(size).encode(), header, head, tail):
            digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:                              # the library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _seal(tokenizer: Tokenizer, structural: set[int]) -> None:
    """From now on the tokenizer reads ordinary text. Structural tokens that the model left unmarked count as special too."""
    added = tokenizer.get_added_tokens_decoder()
    tokenizer.add_special_tokens([added[i] for i in sorted(structural) if i in added])
    tokenizer.encode_special_tokens = True


def _template_source(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = _json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(source, list):                            # several, by name
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not source:
        raise ModelError(f"{folder} has no chat template")
    return source


def _stop_ids(folder: Path, config: dict[str, Any], settings: dict[str, Any], tokenizer: Tokenizer) -> set[int]:
    for source in (_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        ids = source.get("eos_token_id")
        if ids is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    eos = settings.get("eos_token")
    found = tokenizer.token_to_id(_content(eos)) if eos else None
    return set() if found is None else {found}


def _rules(folder: Path) -> ImageRules:
    config = _json(folder / "processor_config.json").get("image_processor") or _json(folder / "preprocessor_config.json")
    kind = str(config.get("image_processor_type"))
    if not kind.startswith(("Qwen2VL", "Qwen2_5VL", "Qwen2_5_VL", "Qwen3VL")):
        raise ModelError(f"{folder}: the image processor {kind} is not known; known are Qwen2-VL's and its successors'")
    size = config.get("size") or {}
    return ImageRules(
        patch=config.get("patch_size", 14), merge=config.get("merge_size", 2),
        min_pixels=config.get("min_pixels") or size.get("shortest_edge") or TRANSFORMERS_MIN_PIXELS,
        max_pixels=config.get("max_pixels") or size.get("longest_edge") or TRANSFORMERS_MAX_PIXELS)


def _json(path: Path) -> dict[str, Any]:
    """The object in the file; {} where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold an object")
    return value


def _content(token: str | dict[str, Any]) -> str:
    """A token of tokenizer_config.json is its text or an object that holds it."""
    return token["content"] if isinstance(token, dict) else token
