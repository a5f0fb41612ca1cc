"""A part of the server that lives in a process of its own, kept alive: one table of states, backoff, and no giving up for good.

A *life* of a component is a coroutine: it starts the thing, calls `up` when it serves, and returns the reason of its end.
It raises EngineStartError where another try without a change is of little use. Then, and after a crash loop, the component
is `failed`, and tried again only every `retry_s`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

import structlog

from .engines.base import EngineError, EngineStartError

log = structlog.get_logger(__name__)


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


class Step(StrEnum):
    UP = "up"
    DOWN = "down"
    GAVE_UP = "gave_up"
    RETRY = "retry"


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.STARTING, Step.UP): State.READY,
    (State.STARTING, Step.DOWN): State.RESTARTING,
    (State.STARTING, Step.GAVE_UP): State.FAILED,
    (State.READY, Step.DOWN): State.RESTARTING,
    (State.READY, Step.GAVE_UP): State.FAILED,
    (State.RESTARTING, Step.UP): State.READY,
    (State.RESTARTING, Step.DOWN): State.RESTARTING,
    (State.RESTARTING, Step.GAVE_UP): State.FAILED,
    (State.FAILED, Step.RETRY): State.RESTARTING,
}


@dataclass(frozen=True, slots=True)
class Backoff:
    first_s: float = 0.5
    cap_s: float = 30.0
    stable_s: float = 60.0
    """A life that served so long makes the next wait short again."""
    crash_deaths: int = 5
    crash_within_s: float = 60.0
    """So many deaths within so long are a crash loop."""
    retry_s: float = 60.0
    """Between tries of a component that has failed."""


class Restarts:
    """PURE. How long to wait before the next life."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._deaths_s: deque[float] = deque(maxlen=backoff.crash_deaths)
        self._in_a_row = 0

    def after_death(self, now_s: float, up_since_s: float | None) -> float | None:
        """Seconds to wait; None: a crash loop. `up_since_s`: None where that life never served."""
        backoff = self._backoff
        if up_since_s is not None and now_s - up_since_s >= backoff.stable_s:
            self._in_a_row = 0
        self._deaths_s.append(now_s)
        if len(self._deaths_s) == backoff.crash_deaths and now_s - self._deaths_s[0] <= backoff.crash_within_s:
            self._deaths_s.clear()
            return None
        wait_s = min(backoff.cap_s, backoff.first_s * 2**min(self._in_a_row, 32))
        self._in_a_row += 1
        return wait_s


class Component:
    """`changed` is called after every change of state or detail; `tail` gives the end of the component's log."""

    def __init__(self, name: str, life: Callable[[Callable[[], None]], Awaitable[str]], *, backoff: Backoff,
                 changed: Callable[[], None], tail: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.state, self.detail = name, State.STARTING, ""
        self.deaths = 0
        self._life, self._backoff, self._changed, self._tail, self._clock = life, backoff, changed, tail, clock
        self._restarts = Restarts(backoff)
        self._up_since_s: float | None = None

    async def keep(self) -> None:
        """One life after another, until cancelled."""
        while True:
            self._up_since_s = None
            hopeless = False
            try:
                reason = await self._life(self._up)
            except (EngineStartError, OSError) as error:
                reason, hopeless = str(error) or repr(error), True
            except EngineError as error:
                reason = str(error)
            self.deaths += 1
            wait_s = self._restarts.after_death(self._clock(), self._up_since_s)
            log.warning("component_down", component=self.name, reason=reason, wait_s=wait_s)
            if hopeless or wait_s is None:
                self._step(Step.GAVE_UP, f"{reason}\n{self._tail()}".strip())
                await asyncio.sleep(self._backoff.retry_s)
                self._step(Step.RETRY, reason)
            else:
                self._step(Step.DOWN, reason)
                await asyncio.sleep(wait_s)

    def progress(self, detail: str) -> None:
        self.detail = detail
        self._changed()

    def _up(self) -> None:
        self._up_since_s = self._clock()
        self._step(Step.UP, "")
        log.info("component_up", component=self.name)

    def _step(self, step: Step, detail: str) -> None:
        self.state = TRANSITIONS[self.state, step]
        self.progress(detail)
