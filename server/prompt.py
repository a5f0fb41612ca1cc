"""Token in, token out: what a turn appends to its branch, and the text of what comes back.

A branch's ids are kept and only ever extended, so KV is found again whatever the texts were. Texts of users (and
instructions) are ordinary text: a `<|im_end|>` in them is spelled out in characters, never a special token.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from sessions.model import ImagePart, Part, TextPart

from .modelinfo import ModelInfo


class PromptRefused(Exception):
    """The model cannot take this message. `code`: images_unsupported, instructions_unsupported."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TurnPrompt(NamedTuple):
    """What a turn appends."""

    input_ids: list[int]
    """To append to the branch's sequence, up to where the answer begins."""
    parts: tuple[Part, ...]
    """The message's parts, each image with its `start` counted from the start of the branch's whole sequence."""

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The images of this message in order."""
        return tuple(part for part in self.parts if isinstance(part, ImagePart))


def opening(info: ModelInfo, instructions: str) -> list[int]:
    """What every branch with these instructions begins with, up to its first message. Raises PromptRefused."""
    template = info.template
    if not instructions:
        return list(template.opening)
    if template.before_instructions is None:
        raise PromptRefused("instructions_unsupported", f"{info.name} takes no instructions: its chat template has no system message")
    return [*template.before_instructions, *text_ids(info, instructions), *template.after_instructions]


def open_turn(info: ModelInfo, instructions: str, parts: Sequence[Part]) -> TurnPrompt:
    """The first turn of a branch. Empty instructions: the template's own system text. Raises PromptRefused."""
    return _turn(info, opening(info, instructions), parts, 0)


def next_turn(info: ModelInfo, previous_ids: Sequence[int], previous_last_generated: int | None, parts: Sequence[Part]) -> TurnPrompt:
    """A later turn. `previous_ids` is the branch's whole sequence so far, answers included; `previous_last_generated` the
    last token of the last answer, None if it is empty. An answer that was cut gets its end of turn here. Raises PromptRefused.
    """
    between = info.template.between
    start = 1 if previous_last_generated == between[0] else 0
    return _turn(info, list(between[start:]), parts, len(previous_ids))


def text_ids(info: ModelInfo, text: str) -> list[int]:
    """Ordinary text -> ids, special tokens spelled out."""
    return info.tokenizer.encode(text, add_special_tokens=False).ids


def _turn(info: ModelInfo, ids: list[int], parts: Sequence[Part], offset: int) -> TurnPrompt:
    """Appends the message and the opening of the answer to `ids`, which will stand at `offset`."""
    placed: list[Part] = []
    text = ""
    for part in parts:
        if isinstance(part, TextPart):
            text += part.text                       # the template writes neighbouring texts as one, so they are one here
            placed.append(part)
            continue
        if info.image_token_id is None:
            raise PromptRefused("images_unsupported", f"{info.name} takes no images")
        ids += text_ids(info, text)
        text = ""
        ids += info.template.image_before
        placed.append(replace(part, start=offset + len(ids)))
        ids += [info.image_token_id] * part.tokens
        ids += info.template.image_after
    ids += text_ids(info, text)
    ids += info.template.answer
    return TurnPrompt(ids, tuple(placed))


class Detokeniser:
    """Ids of one answer -> text, piece by piece. The pieces joined are the text of the whole answer.

    A piece holds whole characters only; bytes of an unfinished one wait for the next token. Special tokens give nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._said = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens completed, perhaps empty."""
        self._ids += token_ids
        text = "".join(self._stream.step(self._tokenizer, token_id) or "" for token_id in token_ids)
        self._said += len(text)
        return text

    def flush(self) -> str:
        """At the end of the answer: what waits, its incomplete characters as U+FFFD."""
        rest = self._tokenizer.decode(self._ids, skip_special_tokens=True)[self._said:]
        self._said += len(rest)
        return rest
