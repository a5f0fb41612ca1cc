"""PURE. The ceilings of a session: turns, tokens, images. (Bytes by tier are `kvstore`'s; here they are only merged.)

A turn reserves what it may use at most, before it runs; when it ends, the reservation is settled (replaced by what it
used) or released. The sum of what was used and what is reserved never passes a ceiling, whatever runs side by side.
"""

from dataclasses import dataclass, fields

from .errors import IllegalEvent, InvalidLimit, LimitExceeded
from .model import Limits, Totals

_NAMES = tuple(f.name for f in fields(Limits))
_LEAST = {name: 1 for name in _NAMES} | {"images_per_message": 0}
_NOTHING = Totals()


def effective(defaults: Limits, own: Limits) -> Limits:
    """The limits in force: the session's own where it has one, else the server's."""
    return Limits(**{n: getattr(defaults, n) if getattr(own, n) is None else getattr(own, n) for n in _NAMES})


def clamp_request(server: Limits, asked: Limits) -> Limits:
    """`asked`, if a user may have it: at most the server's ceiling, each. Raises LimitExceeded, InvalidLimit."""
    for name in _NAMES:
        value, ceiling = getattr(asked, name), getattr(server, name)
        if value is None:
            continue
        if value < _LEAST[name]:
            raise InvalidLimit(name, value, _LEAST[name])
        if ceiling is not None and value > ceiling:
            raise LimitExceeded(name, ceiling, value)
    return asked


def check(limits: Limits, totals: Totals, reserved: Totals = _NOTHING, *, added_tokens: int, max_output_tokens: int,
          images_in_message: int) -> None:
    """May one more turn of that size run? Raises LimitExceeded with the name of the first limit that it would pass.

    `added_tokens`: what the turn adds to its branch's prompt; `max_output_tokens`: the most it may answer.
    """
    if min(added_tokens, max_output_tokens, images_in_message) < 0:
        raise ValueError(f"sizes are not negative: {added_tokens=} {max_output_tokens=} {images_in_message=}")
    turn_tokens = added_tokens + max_output_tokens
    for name, requested in (
        ("images_per_message", images_in_message),
        ("max_turns", totals.turns + reserved.turns + 1),
        ("tokens_per_turn", turn_tokens),
        ("tokens_per_session", totals.tokens + reserved.tokens + turn_tokens),
    ):
        limit = getattr(limits, name)
        if limit is not None and requested > limit:
            raise LimitExceeded(name, limit, requested)


def warnings(limits: Limits, totals: Totals) -> list[tuple[str, int, int]]:
    """(name, limit, used) of every sum that has reached 80% of its ceiling."""
    used = (("max_turns", limits.max_turns, totals.turns), ("tokens_per_session", limits.tokens_per_session, totals.tokens))
    return [(name, limit, value) for name, limit, value in used if limit is not None and value * 5 >= limit * 4]


@dataclass(frozen=True, slots=True)
class Reservation:
    """The most that one running turn may use."""

    tokens: int
    images: int


class Book:
    """What one session has used and what its running turns have reserved. One book per session, in one process.

    It starts from the store's totals and follows them: had each turn to ask the store, one that is committed but not yet
    settled would count twice.
    """

    def __init__(self, totals: Totals = _NOTHING) -> None:
        self._totals = totals
        self._open: dict[str, Reservation] = {}

    @property
    def totals(self) -> Totals:
        """Used by committed turns."""
        return self._totals

    @property
    def reserved(self) -> Totals:
        """Held by turns that run."""
        held = self._open.values()
        return Totals(len(held), sum(r.tokens for r in held), sum(r.images for r in held))

    def reserve(self, turn_id: str, limits: Limits, *, added_tokens: int, max_output_tokens: int,
                images_in_message: int) -> Reservation:
        """Check and hold, in one step. Raises LimitExceeded, or IllegalEvent if the turn holds something already."""
        if turn_id in self._open:
            raise IllegalEvent(f"{turn_id} has reserved already")
        check(limits, self._totals, self.reserved, added_tokens=added_tokens, max_output_tokens=max_output_tokens,
              images_in_message=images_in_message)
        self._open[turn_id] = Reservation(added_tokens + max_output_tokens, images_in_message)
        return self._open[turn_id]

    def settle(self, turn_id: str, *, tokens: int, images: int) -> Totals:
        """The turn was committed and used that much: count it, once. Raises IllegalEvent if it holds nothing."""
        self.release(turn_id)
        self._totals = Totals(self._totals.turns + 1, self._totals.tokens + tokens, self._totals.images + images)
        return self._totals

    def release(self, turn_id: str) -> None:
        """The turn was rolled back: nothing is counted. Raises IllegalEvent if it holds nothing."""
        if self._open.pop(turn_id, None) is None:
            raise IllegalEvent(f"{turn_id} holds no reservation: it was settled or released, or never reserved")
