"""A model's chat template, learned once: the token ids that stand around user texts, answers and images.

The template is rendered with sentinels in place of texts and cut at them, so that a conversation can be extended token by
token and never needs rendering again. That is possible for append-only templates only; `learn` proves it or raises.
"""

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

SYSTEM, IMAGE_LEFT, IMAGE_RIGHT = "xqSYSTEMqx", "xqLEFTqx", "xqRIGHTqx"
USERS, ANSWERS = ("xqUSERAqx", "xqUSERBqx", "xqUSERCqx"), ("xqANSWERAqx", "xqANSWERBqx")
_SENTINEL = re.compile("xq[A-Z]+qx")


class TemplateError(ValueError):
    """This chat template cannot be extended token by token, or cannot be rendered."""


@dataclass(frozen=True, slots=True)
class Template:
    """Token ids of the fixed parts of a conversation.

    opening  user text  answer  ANSWER  between  user text  answer  ANSWER ...
    With instructions, before_instructions  INSTRUCTIONS  after_instructions  stands in the place of the opening.
    """

    opening: tuple[int, ...]
    """Up to the first user text, with the template's own system text if it has one."""
    before_instructions: tuple[int, ...] | None
    """None: the template takes no system message."""
    after_instructions: tuple[int, ...]
    answer: tuple[int, ...]
    """From a user text to the answer."""
    between: tuple[int, ...]
    """From an answer to the next user text, the end-of-turn token first."""
    image_before: tuple[int, ...]
    """Before the image tokens of one image; empty for text models."""
    image_after: tuple[int, ...]

    @property
    def end_of_turn(self) -> int:
        """The token that ends an answer."""
        return self.between[0]

    def ids(self) -> set[int]:
        """Every token id of the fixed parts."""
        return {*self.opening, *(self.before_instructions or ()), *self.after_instructions, *self.answer, *self.between,
                *self.image_before, *self.image_after}


def learn(tokenizer: Tokenizer, source: str, variables: Mapping[str, Any], image_token_id: int | None) -> Template:
    """`source` is the Jinja text, `variables` what it may use besides the messages (bos_token, ...). Raises TemplateError.

    The tokenizer must parse special tokens (encode_special_tokens False), since template text may name them.
    """
    template = _compile(source)

    def render(*messages: tuple[str, Sequence[str | None]]) -> str:
        """A message is its role and its parts; None is an image. Text models get plain strings."""
        rendered = [{"role": role, "content": _content(parts, image_token_id is not None)} for role, parts in messages]
        try:
            return template.render(messages=rendered, add_generation_prompt=True, **variables)
        except Exception as error:                          # a template is a program; what it raises is up to it
            raise TemplateError(f"the chat template cannot be rendered: {error}") from error

    users, answers = [("user", [text]) for text in USERS], [("assistant", [text]) for text in ANSWERS]
    talk = [users[0], answers[0], users[1], answers[1], users[2]]
    opening, answer, between = _pieces(render(*talk), [USERS[0], ANSWERS[0], USERS[1], ANSWERS[1], USERS[2]])[:3]
    whole = opening + USERS[0]
    for i, text in enumerate(USERS):
        if i:
            whole += ANSWERS[i - 1] + between + text
        _require_equal(render(*talk[: 2 * i + 1]), whole := whole + answer)

    before, after = None, ""
    system = ("system", [SYSTEM])
    try:
        rendered = render(system, users[0])
    except TemplateError:
        rendered = ""                                       # such templates raise on purpose: instructions are refused later
    if SYSTEM in rendered:
        before, after, _ = _pieces(rendered, [SYSTEM, USERS[0]])
        _require_equal(render(system, *talk), before + SYSTEM + after + whole.removeprefix(opening))

    image_before: tuple[int, ...] = ()
    image_after: tuple[int, ...] = ()
    if image_token_id is not None:
        left, right = _pieces(render(("user", [IMAGE_LEFT, None, IMAGE_RIGHT])), [IMAGE_LEFT, IMAGE_RIGHT])[0:2]
        _require_equal(left, opening)
        _require_equal(render(("user", [None, IMAGE_LEFT])), opening + right + IMAGE_LEFT + answer)
        ids = _encode(tokenizer, right)
        if ids.count(image_token_id) != 1:
            raise TemplateError(f"the chat template must write one image token ({image_token_id}) for an image")
        at = ids.index(image_token_id)
        image_before, image_after = ids[:at], ids[at + 1:]

    between_ids = _encode(tokenizer, between)
    if not between_ids or between_ids[0] not in tokenizer.get_added_tokens_decoder():
        raise TemplateError("the chat template does not end an answer with a special token")
    return Template(
        opening=_encode(tokenizer, opening), before_instructions=None if before is None else _encode(tokenizer, before),
        after_instructions=_encode(tokenizer, after), answer=_encode(tokenizer, answer), between=between_ids,
        image_before=image_before, image_after=image_after)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def _content(parts: Sequence[str | None], as_parts: bool) -> Any:
    if not as_parts:
        return "".join(part for part in parts if part)
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]


def _pieces(rendered: str, sentinels: list[str]) -> list[str]:
    """The texts before, between and after the sentinels, which must all occur once and in that order."""
    if _SENTINEL.findall(rendered) != sentinels:
        raise TemplateError("the chat template drops, repeats or moves parts of a conversation")
    return _SENTINEL.split(rendered)


def _require_equal(rendered: str, composed: str) -> None:
    if rendered != composed:
        at = next((i for i, (a, b) in enumerate(zip(rendered, composed, strict=False)) if a != b), min(len(rendered), len(composed)))
        raise TemplateError("the chat template is not append-only: a longer conversation changes what stood before; it renders "
                            f"{rendered[max(0, at - 20):at + 20]!r} where {composed[max(0, at - 20):at + 20]!r} was expected")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for training; here it is transparent."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    """In a sandbox, with the names that published templates expect (those of transformers)."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
               sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    # Rendered once per start: a template with a clock shows the time of the start.
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template cannot be compiled: {error}") from error
