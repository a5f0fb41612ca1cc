"""The KV manager and ledger against a trivial model: verbs that end in any order, fail, are cancelled, or come too late."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.geometry import Tier
from kvstore.ledger import Ledger, Residency
from kvstore.manager import KvManager
from kvstore.planner import PlanPolicy
from kvstore.receipt import KvVerb, Outcome, Receipt

OWNERS = ("a", "b", "c")
TOTAL = 64


class EngineGone(Exception):
    pass


@dataclass
class Pool:
    free_pages: int
    used_pages: int
    in_flight_pages: int = 0

    @property
    def total_pages(self) -> int:
        return self.free_pages + self.used_pages + self.in_flight_pages


@dataclass
class Figures:
    session_id: str
    device_tokens: int
    device_exclusive_tokens: int
    locked_tokens: int = 0


@dataclass
class Run:
    """A verb that the fake engine was given and has not ended."""

    verb: KvVerb
    owner: str
    incarnation: int
    to: Tier | None
    answer: "asyncio.Future[Receipt]"


@dataclass
class Turn:
    owner: str
    task: "asyncio.Task[None]"
    inside: bool = False
    release: asyncio.Event = field(default_factory=asyncio.Event)


class Books(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now_s = 1000.0
        self.runs: list[Run] = []
        self.turns: list[Turn] = []
        self.calls: list[asyncio.Task] = []
        self.incarnation = Counter()
        self.told: list[tuple[str, Receipt | None, Residency]] = []
        self.late = 0
        self.epoch = 0
        self.ledger = Ledger()
        policy = PlanPolicy(to_host_s=50, to_storage_s=200, high=0.9, low=0.5, page_tokens=16)
        self.manager = KvManager(self.ledger, self.run, policy, lambda: self.now_s, lambda *said: self.told.append(said))

    async def run(self, verb: KvVerb, owner: str, /, **args) -> Receipt:
        assert not [r for r in self.runs if r.owner == owner], "two verbs at once"
        assert not [t for t in self.turns if t.owner == owner and t.inside], "a verb under a running turn"
        run = Run(verb, owner, self.incarnation[owner], args.get("to"), asyncio.get_running_loop().create_future())
        self.runs.append(run)
        try:
            return await run.answer
        finally:
            self.runs.remove(run)

    def settle(self) -> None:
        async def turns_of_the_loop():
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns_of_the_loop())

    def do(self, coroutine) -> None:
        self.calls.append(self.loop.create_task(coroutine))
        self.settle()

    # ---- what callers do ---------------------------------------------------------------------------------------
    @rule(owner=st.sampled_from(OWNERS), verb=st.sampled_from(["spill", "restore", "prefetch", "demote", "drop", "pin"]),
          to=st.sampled_from([Tier.HOST, Tier.STORAGE]), until=st.integers(-10, 500))
    def verb(self, owner, verb, to, until):
        extra = {"spill": (to,), "pin": (self.now_s + until,)}.get(verb, ())
        self.do(getattr(self.manager, verb)(owner, *extra))

    @rule(owner=st.sampled_from(OWNERS))
    def start_turn(self, owner):
        async def run(turn: Turn) -> None:
            async with self.manager.turn(owner):
                turn.inside = True
                try:
                    await turn.release.wait()
                finally:
                    turn.inside = False

        turn = Turn(owner, None)
        turn.task = self.loop.create_task(run(turn))
        self.turns.append(turn)
        self.settle()

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), cancel=st.booleans())
    def end_turn(self, data, cancel):
        turn = data.draw(st.sampled_from(self.turns))
        self.turns.remove(turn)
        if cancel:
            turn.task.cancel()
        else:
            turn.release.set()
        self.calls.append(turn.task)
        self.settle()

    @precondition(lambda self: any(not call.done() for call in self.calls))
    @rule(data=st.data())
    def cancel_a_caller(self, data):
        data.draw(st.sampled_from([call for call in self.calls if not call.done()])).cancel()
        self.settle()

    @rule(passed_s=st.sampled_from([1, 60, 250]))
    def tick(self, passed_s):
        self.now_s += passed_s
        self.do(self.manager.tick(self.now_s))

    @rule(owner=st.sampled_from(OWNERS))
    def forget(self, owner):
        self.incarnation[owner] += 1
        self.manager.forget(owner)
        self.told = [said for said in self.told if said[0] != owner]

    # ---- what the engine does ----------------------------------------------------------------------------------
    @precondition(lambda self: self.runs)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome), tokens=st.integers(0, TOTAL))
    def a_verb_ends(self, data, outcome, tokens):
        run = data.draw(st.sampled_from(self.runs))
        if outcome in (Outcome.NOTHING, Outcome.REFUSED, Outcome.FAILED):
            tokens = 0
        source = {KvVerb.SPILL: "device", KvVerb.DEMOTE: "host"}.get(run.verb, data.draw(st.sampled_from(["host", "storage"])))
        self.late += run.incarnation != self.incarnation[run.owner]
        if run.verb is KvVerb.DROP and tokens and run.incarnation == self.incarnation[run.owner]:
            self.incarnation[run.owner] += 1
        outcome = outcome if tokens or outcome in (Outcome.NOTHING, Outcome.REFUSED, Outcome.FAILED) else Outcome.NOTHING
        run.answer.set_result(Receipt("kv", run.verb, run.owner, 1, {source: tokens} if tokens else {}, run.to and str(run.to), tokens, outcome=outcome))
        self.settle()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def a_verb_raises(self, data):
        data.draw(st.sampled_from(self.runs)).answer.set_exception(EngineGone("gone"))
        self.settle()

    @rule(device=st.lists(st.integers(0, 4), min_size=3, max_size=3), old=st.booleans())
    def device_figures(self, device, old):
        self.epoch += not old
        self.manager.on_ledger(self.epoch, [Figures(o, n * 16, n * 16) for o, n in zip(OWNERS, device, strict=True) if n])

    @rule(owner=st.sampled_from(OWNERS), device=st.integers(0, 4), host=st.integers(0, 4), storage=st.integers(0, 4))
    def report(self, owner, device, host, storage):
        self.manager.on_report(owner, device_tokens=device * 16, device_exclusive_tokens=device * 16, host_tokens=host * 16,
                               storage_tokens=storage * 16, total_tokens=TOTAL, reachable_tokens=max(device, host, storage) * 16)

    @rule(free=st.integers(0, 20), used=st.integers(1, 20))
    def pressure(self, free, used):
        self.manager.on_pressure(Pool(free, used))

    @rule()
    def engine_restarts(self):
        self.epoch = 0
        for owner in OWNERS:
            self.incarnation[owner] += 1
        self.manager.on_engine_restart()

    # ---- what must hold ----------------------------------------------------------------------------------------
    @invariant()
    def flags_tell_what_runs(self):
        """An owner is marked with the verb that the engine has for it, and with as many turns as are inside."""
        for entry in self.ledger.entries():
            in_flight = [r for r in self.runs if r.owner == entry.owner]
            assert [r.verb for r in in_flight] == ([entry.verb] if entry.verb else [])
            assert entry.turns == sum(t.inside for t in self.turns if t.owner == entry.owner)
            assert not (entry.turns and entry.verb)
        assert {r.owner for r in self.runs} | {t.owner for t in self.turns if t.inside} <= set(self.ledger.owners())

    @invariant()
    def counts_are_sound(self):
        for e in self.ledger.entries():
            assert min(e.total_tokens, e.reachable_tokens, e.device_tokens, e.device_exclusive_tokens, e.locked_tokens,
                       e.host_tokens, e.storage_tokens) >= 0
            assert e.device_exclusive_tokens <= e.device_tokens
            assert e.reachable_tokens <= e.total_tokens
        assert sum(self.ledger.by_state().values()) == len(self.ledger.owners())
        assert self.ledger.late_results == self.late

    @invariant()
    def listeners_know_the_state(self):
        """What was last told of an owner is its state now."""
        last = {owner: state for owner, _, state in self.told}
        for entry in self.ledger.entries():
            assert entry.forgotten or last.get(entry.owner, Residency.EMPTY) is entry.state

    @invariant()
    def a_pressure_reading_balances(self):
        p = self.manager.pressure
        assert p is None or (p.free_pages + p.used_pages + p.in_flight_pages == p.total_pages and min(p.free_pages, p.used_pages) >= 0)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for turn in list(self.turns):
            turn.release.set()
        for _ in range(100):
            self.settle()
            for run in list(self.runs):
                if not run.answer.done():
                    run.answer.set_result(Receipt("kv", run.verb, run.owner, 1, outcome=Outcome.NOTHING))
        pending = [*self.calls, *(turn.task for turn in self.turns)]
        assert all(task.done() for task in pending), "somebody waits for ever"
        for task in pending:
            with suppress(EngineGone, asyncio.CancelledError):
                task.result()
        assert not self.runs
        for entry in self.ledger.entries():
            assert (entry.busy, entry.verb) == (False, None)
        self.loop.close()


TestBooks = Books.TestCase
TestBooks.settings = settings(stateful_step_count=40, deadline=None)
