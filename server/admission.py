"""PURE. May this turn run? One answer from the session's limits, the context length, the device pool and the bytes by tier.

Rule for the length of an answer: what the client asks for is kept or refused, never shortened; where it asks for nothing, the
server's default is shortened to what every limit leaves, as long as that is at least one token.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore import budget
from kvstore.geometry import Geometry, Tier
from sessions import budgets
from sessions.errors import LimitExceeded
from sessions.model import Limits, Totals


@dataclass(frozen=True, slots=True)
class Admit:
    max_output_tokens: int
    """The most that the turn may answer."""
    need_bytes: Mapping[Tier, int]
    """KV bytes of the whole sequence, prompt and longest answer, on each tier; empty while the geometry is not known."""


@dataclass(frozen=True, slots=True)
class Refuse:
    name: str
    """A limit of sessions.model.Limits, context_tokens, or device_tokens (the whole pool)."""
    limit: int
    requested: int
    """What the turn would have made of it, in the limit's unit."""
    message: str


class TurnRefused(Exception):
    """A Refuse on its way to the client."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__(refuse.message)
        self.refuse = refuse


def admit(limits: Limits, totals: Totals, reserved: Totals, *, prompt_tokens: int, added_tokens: int, max_output_tokens: int | None,
          default_output_tokens: int, images_in_message: int, geometry: Geometry | None, context_tokens: int,
          pinned_tokens: int = 0) -> Admit | Refuse:
    """`limits` are those in force, `totals` and `reserved` what committed and running turns used.

    prompt_tokens: the whole prompt, history included; added_tokens: what this turn adds to it;
    pinned_tokens: of the device pool, what pins of other sessions hold. Changes nothing.
    """
    def refusal(output_tokens: int) -> Refuse | None:
        try:
            budgets.check(limits, totals, reserved, added_tokens=added_tokens, max_output_tokens=output_tokens,
                          images_in_message=images_in_message)
        except LimitExceeded as error:
            return Refuse(error.name, error.limit, error.requested, str(error))
        return _fits(limits, prompt_tokens, output_tokens, geometry, context_tokens, pinned_tokens)

    asked = max_output_tokens
    if asked is None:
        # A longer answer is never accepted where a shorter one is refused.
        asked = max(1, bisect_left(range(1, default_output_tokens + 1), True, key=lambda tokens: refusal(tokens) is not None))
    refused = refusal(asked)
    if refused is not None:
        return refused
    return Admit(asked, budget.need(geometry, prompt_tokens + asked) if geometry else {})


ENGINE_SPARE_TOKENS = 8
"""SGLang refuses a prompt that comes within 6 tokens of its context length or its pool."""
NORMALISING_SHRINKS = 4
"""No tokenizer's normal form makes a text shorter than by this factor."""


def check_text(text_bytes: int, longest_token_bytes: int, context_tokens: int) -> None:
    """Refuses, before any tokenizing, what cannot fit however well its bytes make tokens. Raises TurnRefused."""
    least_tokens = text_bytes // (longest_token_bytes * NORMALISING_SHRINKS)
    if least_tokens > context_tokens:
        raise TurnRefused(Refuse("context_tokens", context_tokens, least_tokens,
                                 f"a text of {text_bytes} bytes is at least {least_tokens} tokens; the context has {context_tokens}"))


def room_tokens(geometry: Geometry, pinned_tokens: int) -> int:
    """The longest sequence that the engine can ever run beside so many pinned tokens.

    SGLang wants a page more than a turn needs before it starts it, and at times one while it runs; what it has no room for it
    leaves waiting, and all behind it.
    """
    spare_tokens = max(2 * geometry.page_tokens, ENGINE_SPARE_TOKENS)
    return max(0, geometry.page_floor(geometry.device_tokens) - geometry.pages(pinned_tokens) * geometry.page_tokens - spare_tokens)


def _fits(limits: Limits, prompt_tokens: int, output_tokens: int, geometry: Geometry | None, context_tokens: int,
          pinned_tokens: int) -> Refuse | None:
    """The sequence as a whole: context, pool, bytes by tier."""
    sequence_tokens = prompt_tokens + output_tokens
    what = f"the prompt of {prompt_tokens} tokens and an answer of up to {output_tokens}"
    if sequence_tokens > context_tokens:
        return Refuse("context_tokens", context_tokens, sequence_tokens, f"{what} pass the context of {context_tokens} tokens")
    if geometry is None:
        return None
    room = room_tokens(geometry, pinned_tokens)
    if sequence_tokens > room:
        return Refuse("device_tokens", room, sequence_tokens, f"{what} cannot fit into the engine's pool of {geometry.device_tokens} tokens"
                      + (f", of which others have pinned {pinned_tokens}" if pinned_tokens else "") + f": the longest that can has {room}")
    over = budget.check(geometry, sequence_tokens, {
        Tier.DEVICE: limits.device_bytes, Tier.HOST: limits.host_bytes, Tier.STORAGE: limits.storage_bytes})
    if over is None:
        return None
    return Refuse(over.name, over.limit, over.requested, f"{what} need {over.requested} bytes of KV; {over.name} is {over.limit}")
