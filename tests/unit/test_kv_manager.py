"""The KV manager where order matters: callers that give up, turns that wait, planned work that fails."""

import asyncio

import pytest

from kvstore.geometry import Tier
from kvstore.ledger import Ledger, Residency
from kvstore.manager import HOLD_OFF_S, KvManager
from kvstore.planner import PlanPolicy, Pressure
from kvstore.receipt import KvVerb, Outcome, Receipt

POLICY = PlanPolicy(to_host_s=50, to_storage_s=None, high=0.9, low=0.5, page_tokens=16)


class Stage:
    """A manager on an engine that ends a verb when it is told to, or at once with `outcome`."""

    def __init__(self, outcome: Outcome | Exception | None = None) -> None:
        self.outcome, self.ran, self.told, self.now_s = outcome, [], [], 1000.0
        self.go = asyncio.Event()
        self.manager = KvManager(Ledger(), self.run, POLICY, lambda: self.now_s, lambda *said: self.told.append(said))

    async def run(self, verb: KvVerb, owner: str, /, **args) -> Receipt:
        self.ran.append((verb, owner))
        if self.outcome is None:
            await self.go.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        moved = self.manager.ledger.entry(owner).device_exclusive_tokens if self.outcome in (None, Outcome.DONE) else 0
        return Receipt("kv", verb, owner, 1, {"device": moved} if moved else {}, "host", moved, outcome=self.outcome or Outcome.DONE)

    def hot(self, owner: str, tokens: int = 64) -> None:
        self.manager.on_report(owner, device_tokens=tokens, device_exclusive_tokens=tokens, host_tokens=0, storage_tokens=0,
                               total_tokens=tokens, reachable_tokens=tokens)


async def test_a_caller_that_gives_up_stops_nothing():
    """A cancelled caller leaves its verb running: a turn waits for it, before any verb that waits too, and its receipt counts."""
    stage = Stage()
    stage.hot("a")
    caller = asyncio.create_task(stage.manager.spill("a", Tier.HOST))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    dropping = asyncio.create_task(stage.manager.drop("a"))
    await asyncio.sleep(0)
    entered = asyncio.Event()

    async def turn():
        async with stage.manager.turn("a"):
            entered.set()

    waiting = asyncio.create_task(turn())
    await asyncio.sleep(0.01)
    assert not entered.is_set()
    stage.go.set()
    refused = await dropping
    assert (refused.outcome, refused.reason) == (Outcome.REFUSED, "a turn is waiting")
    await waiting
    assert stage.ran == [(KvVerb.SPILL, "a")]
    assert stage.manager.ledger.state("a") is Residency.WARM


async def test_a_verb_under_a_turn_is_refused():
    """While a turn runs every verb is refused without reaching the engine; after it they work."""
    stage = Stage(Outcome.DONE)
    async with stage.manager.turn("a"):
        for verb in (stage.manager.restore, stage.manager.prefetch, stage.manager.demote, stage.manager.drop):
            receipt = await verb("a")
            assert (receipt.outcome, receipt.reason) == (Outcome.REFUSED, "a turn is running")
    assert stage.ran == []
    assert (await stage.manager.drop("a")).outcome is Outcome.DONE


async def test_what_the_engine_raises_reaches_the_caller():
    """An engine that is gone fails the call, and the owner is free again."""
    stage = Stage(ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        await stage.manager.restore("a")
    async with stage.manager.turn("a"):
        pass


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.NOTHING, ConnectionError("gone")])
async def test_planned_work_that_does_not_get_done_is_held_off(outcome):
    """An owner whose planned spill was not done is left alone for a while, or until it is used again."""
    stage = Stage(outcome)
    stage.hot("a")
    stage.now_s += 60
    for at_s, runs in ((stage.now_s, 1), (stage.now_s + 1, 1), (stage.now_s + HOLD_OFF_S + 1, 2)):
        await stage.manager.tick(at_s)
        assert len(stage.ran) == runs
    async with stage.manager.turn("a"):
        pass
    await stage.manager.tick(stage.now_s + 200)
    assert len(stage.ran) == 3


async def test_a_stale_reading_does_not_spill_twice():
    """Until the engine's next reading, the manager expects what its spills freed; it does not plan for it again."""
    stage = Stage(Outcome.DONE)
    for n, owner in enumerate("abcd"):
        stage.hot(owner, 16 * 25)
        stage.manager.ledger.touch(owner, stage.now_s + n)
    stage.manager.on_pressure(Pressure(5, 95, 0, 100))
    for _ in range(3):
        await stage.manager.tick(stage.now_s + 10)
    assert stage.ran == [(KvVerb.SPILL, "a"), (KvVerb.SPILL, "b")]
    assert stage.manager.pressure == Pressure(55, 45, 0, 100)


async def test_a_pin_holds_and_ends():
    """A pinned owner is not planned for until its pin is over; a time that is past unpins."""
    stage = Stage(Outcome.DONE)
    stage.hot("a")
    await stage.manager.pin("a", stage.now_s + 500)
    stage.ran.clear()
    await stage.manager.tick(stage.now_s + 499)
    assert stage.ran == []
    await stage.manager.tick(stage.now_s + 501)
    assert stage.ran == [(KvVerb.SPILL, "a")]
    await stage.manager.pin("a", stage.now_s - 1)
    assert stage.manager.ledger.entry("a").pinned_until_s is None


async def test_listeners_hear_of_every_change():
    """Verbs are told with their receipts, the beginning of a restore as restoring, and what changed nothing is not told."""
    stage = Stage(Outcome.DONE)
    stage.hot("a")
    await stage.manager.spill("a", Tier.HOST)
    await stage.manager.restore("a")
    stage.manager.on_engine_restart()
    assert [(receipt.verb if receipt else None, state) for _, receipt, state in stage.told] == [
        (None, Residency.HOT), (KvVerb.SPILL, Residency.WARM), (None, Residency.RESTORING), (KvVerb.RESTORE, Residency.WARM)]


async def test_a_spill_goes_down():
    """A spill to the device is refused as an error before anything happens."""
    stage = Stage(Outcome.DONE)
    with pytest.raises(ValueError, match="device"):
        await stage.manager.spill("a", Tier.DEVICE)
    assert stage.ran == []
