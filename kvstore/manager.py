"""Runs KV verbs, one at a time per owner and never under a running turn, and the planner's actions on a timer.

A verb that was begun is finished whatever happens to the caller: an engine cannot be told to un-move pages half way, so a
cancelled caller leaves the verb running, and the owner stays taken until its result is here.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from .geometry import Tier
from .ledger import DeviceFigures, Ledger, Residency
from .planner import Action, PlanPolicy, Pressure, SpillTo, plan
from .receipt import KvVerb, Outcome, Receipt

log = logging.getLogger(__name__)

HOLD_OFF_S = 30.0
"""An owner whose planned action was not done is left alone for so long, unless it is used again."""


class RunVerb(Protocol):
    """Has the engine do it. Keyword arguments: `to` for a spill, `until` for a pin. What it raises, the caller gets."""

    def __call__(self, verb: KvVerb, owner: str, /, **args: Any) -> Awaitable[Receipt]: ...


class PoolFigures(Protocol):
    @property
    def free_pages(self) -> int: ...
    @property
    def used_pages(self) -> int: ...
    @property
    def in_flight_pages(self) -> int: ...
    @property
    def total_pages(self) -> int: ...


Listen = Callable[[str, Receipt | None, Residency], None]
"""(owner, receipt of a verb that ended or None, state now). Called when a verb ends and when the state changed."""


class KvManager:
    def __init__(self, ledger: Ledger, run: RunVerb, policy: PlanPolicy, clock: Callable[[], float], listen: Listen) -> None:
        self.ledger = ledger
        self.policy = policy
        self.pressure: Pressure | None = None
        self._run, self._clock, self._listen = run, clock, listen
        self._verbs: dict[str, asyncio.Task[Receipt]] = {}
        self._waiting_turns: Counter[str] = Counter()
        self._hold_until_s: dict[str, float] = {}
        self._told: dict[str, Residency] = {}
        self._readings = 0

    # ---- verbs: each raises what `run` raises ------------------------------------------------------------------
    async def spill(self, owner: str, to: Tier) -> Receipt:
        if to not in (Tier.HOST, Tier.STORAGE):
            raise ValueError(f"a spill goes to host or storage, not to {to}")
        return await self._verb(KvVerb.SPILL, owner, to=Tier(to))

    async def restore(self, owner: str) -> Receipt:
        return await self._verb(KvVerb.RESTORE, owner)

    async def prefetch(self, owner: str) -> Receipt:
        return await self._verb(KvVerb.PREFETCH, owner)

    async def demote(self, owner: str) -> Receipt:
        return await self._verb(KvVerb.DEMOTE, owner)

    async def drop(self, owner: str) -> Receipt:
        return await self._verb(KvVerb.DROP, owner)

    async def pin(self, owner: str, until: float) -> Receipt:
        """`until`: seconds on the manager's clock; a time that is past unpins."""
        return await self._verb(KvVerb.PIN, owner, until=until)

    async def _verb(self, verb: KvVerb, owner: str, **args: Any) -> Receipt:
        while (running := self._verbs.get(owner)) is not None:
            await asyncio.wait({running})
        if owner in self.ledger and self.ledger.entry(owner).busy:
            return self.refused(verb, owner, "a turn is running")
        if self._waiting_turns[owner]:
            return self.refused(verb, owner, "a turn is waiting")
        generation = self.ledger.begin_verb(owner, verb)
        task = asyncio.create_task(self._execute(verb, owner, generation, args), name=f"{verb} {owner}")
        self._verbs[owner] = task
        task.add_done_callback(lambda done: self._ended(owner, done))     # runs even if the task never got to start
        self._tell(owner)
        return await asyncio.shield(task)

    async def _execute(self, verb: KvVerb, owner: str, generation: int, args: dict[str, Any]) -> Receipt:
        receipt = await self._run(verb, owner, **args)
        if not self.ledger.apply_receipt(receipt, generation):
            return receipt
        if receipt.outcome is Outcome.DONE and verb is KvVerb.PIN:
            self.ledger.pin(owner, args["until"] if args["until"] > self._clock() else None)
        if verb in (KvVerb.RESTORE, KvVerb.PREFETCH):
            self.ledger.touch(owner, self._clock())     # somebody wants it here: idleness begins anew
        return receipt

    def _ended(self, owner: str, task: asyncio.Task[Receipt]) -> None:
        del self._verbs[owner]
        self.ledger.end_verb(owner)
        failed = task.cancelled() or task.exception() is not None
        if failed:
            log.warning("%s did not end: %s", task.get_name(), "cancelled" if task.cancelled() else task.exception())
        self._tell(owner, None if failed else task.result())

    @staticmethod
    def refused(verb: KvVerb, owner: str, reason: str) -> Receipt:
        """Never reached the engine, so it carries generation 0: the session's own is the caller's to know."""
        return Receipt(f"kv_{uuid.uuid4().hex[:16]}", verb, owner, generation=0, outcome=Outcome.REFUSED, reason=reason)

    # ---- turns -------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Around a running turn. A verb in flight is waited for; verbs asked for meanwhile are refused."""
        self._waiting_turns[owner] += 1
        try:
            while (running := self._verbs.get(owner)) is not None:
                await asyncio.wait({running})
            self.ledger.begin_turn(owner)
        finally:
            self._waiting_turns[owner] -= 1
            if not self._waiting_turns[owner]:
                del self._waiting_turns[owner]
        self._tell(owner)
        try:
            yield
        finally:
            self.ledger.end_turn(owner)
            if owner in self.ledger:                 # else it was forgotten meanwhile
                self.ledger.touch(owner, self._clock())
                self._hold_until_s.pop(owner, None)
                self._tell(owner)

    def forget(self, owner: str) -> None:
        """The owner is gone for good; a verb in flight ends late and changes nothing."""
        self.ledger.forget(owner)
        self._told.pop(owner, None)
        self._hold_until_s.pop(owner, None)

    # ---- planning ----------------------------------------------------------------------------------------------
    async def tick(self, now: float) -> list[Receipt]:
        """Do what the planner asks for now, side by side. Receipts of what ended; what failed is logged and held off."""
        self._hold_until_s = {owner: until for owner, until in self._hold_until_s.items() if until > now}
        entries = [entry for entry in self.ledger.entries() if entry.owner not in self._hold_until_s]
        actions = plan(entries, self.pressure, self.policy, now)
        results = await asyncio.gather(*(self._act(action) for action in actions), return_exceptions=True)
        receipts = [result for result in results if isinstance(result, Receipt)]
        for action, result in zip(actions, results, strict=True):
            if isinstance(result, Exception):
                log.warning("planned for %s (%s), failed: %s", action.owner, action.reason, result)
            elif isinstance(result, BaseException):
                raise result
            if not isinstance(result, Receipt) or result.outcome is not Outcome.DONE:
                self._hold_until_s[action.owner] = now + HOLD_OFF_S
        return receipts

    async def _act(self, action: Action) -> Receipt:
        if not isinstance(action, SpillTo):
            return await self.demote(action.owner)
        readings = self._readings
        receipt = await self.spill(action.owner, action.to)
        if self.pressure is not None and self._readings == readings:     # no newer reading came: expect the effect
            freed_tokens = receipt.source.get(Tier.DEVICE, 0)
            self.pressure = self.pressure.relieved(freed_tokens // self.policy.page_tokens)
        return receipt

    async def run_forever(self, check_s: float) -> None:
        while True:
            await asyncio.sleep(check_s)
            await self.tick(self._clock())

    # ---- what the engine says ----------------------------------------------------------------------------------
    def on_pressure(self, figures: PoolFigures) -> None:
        self._readings += 1
        self.pressure = Pressure(figures.free_pages, figures.used_pages, figures.in_flight_pages, figures.total_pages)

    def on_ledger(self, epoch: int, entries: Iterable[DeviceFigures]) -> None:
        """The full list of device figures."""
        known = set(self.ledger.owners())
        if self.ledger.apply_device(epoch, entries):
            for owner in self.ledger.owners():
                if owner not in known:
                    self.ledger.touch(owner, self._clock())
                self._tell(owner)

    def on_report(self, owner: str, **tokens: int) -> None:
        """The keyword arguments are Ledger.apply_report's."""
        if owner not in self.ledger:
            self.ledger.touch(owner, self._clock())
        self.ledger.apply_report(owner, **tokens)
        self._tell(owner)

    def on_engine_restart(self) -> None:
        """The device is empty. Verbs in flight end on their own: the engine's proxy fails them."""
        self.ledger.reset_device()
        self.pressure = None
        for owner in self.ledger.owners():
            self._tell(owner)

    def _tell(self, owner: str, receipt: Receipt | None = None) -> None:
        if owner not in self.ledger or self.ledger.entry(owner).forgotten:
            return
        state = self.ledger.state(owner)
        if receipt is not None or self._told.get(owner, Residency.EMPTY) is not state:
            self._told[owner] = state
            self._listen(owner, receipt, state)
