"""SessionOps under any interleaving: turns, spills, restores and write-through of several sessions, with a daemon that answers
in any order, late, wrongly, never, or as another. SGLang's own tree and allocator; the daemon is a fake (support/fake_offload).
"""

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import tests.support.sglang_here  # noqa: F401  first: it makes the next ones possible  # isort: skip
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvstore.sglang.cache import SessionRadixCache
from kvstore.sglang.ops import Branch, SessionOps
from tests.support.fake_offload import FakeOffload, kv, sequence

PAGE, CHUNK, PAGES = 4, 8, 24
TIMEOUT_S = 3.0
SALTS = {"a": "x", "b": "x", "c": "y"}
NAMES = st.sampled_from(sorted(SALTS))
STEPS = st.sampled_from([0, 0, 1, 2, 3, 4, 5, 6, 12])
"""How far a verb gets before something else happens."""
WORDS = st.lists(st.integers(1, 2), min_size=1, max_size=5)


class Rows:
    """SGLang's request-to-token table."""

    def __init__(self) -> None:
        self.req_to_token = torch.zeros((8, PAGES * PAGE * 2), dtype=torch.int32)
        self.free = list(range(8))

    def write(self, where: Any, values: torch.Tensor) -> None:
        self.req_to_token[where] = values.to(torch.int32)


class Request(SimpleNamespace):
    """As much of SGLang's Req as the radix cache looks at."""

    def get_fill_ids(self) -> array:
        return self.origin_input_ids[:self.filled]


class SessionOpsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = PagedTokenToKVPoolAllocator(PAGES * PAGE, PAGE, torch.float32, "cpu", None, need_sort=False)
        self.pool.debug_mode = True                  # asserts that nothing is freed twice
        self.rows = Rows()
        self.cache = SessionRadixCache(CacheInitParams(disable=False, req_to_token_pool=self.rows, page_size=PAGE,
                                                       token_to_kv_pool_allocator=self.pool))
        self.memory: dict[int, int] = {}
        self.daemon = FakeOffload(PAGE, CHUNK, self.memory)
        self.ops = SessionOps(self.cache, self.daemon, TIMEOUT_S, clock=lambda: self.now)
        self.said = {name: array("q") for name in SALTS}
        self.requests: dict[str, Request] = {}
        self.verbs: dict[str, str] = {}
        """A verb in flight; as in the server there is one at a time, and none during a turn but its own restore."""
        self.lost: set[Any] = set()
        """Chunks that the daemon has thrown out by itself."""
        self.mishaps = 0
        """Whatever leaves locks in the daemon to their time to live."""

    # ---- turns -------------------------------------------------------------------------------------------------
    @initialize()
    def everybody_has_said_something(self) -> None:
        for name in SALTS:
            self.a_turn(name, [1, 1, 2, 2, 1, 1], True, 12)

    @rule(name=NAMES, words=WORDS, afresh=st.booleans(), steps=STEPS)
    def a_turn(self, name: str, words: list[int], afresh: bool, steps: int) -> None:
        """From begin to end, nothing between; its write-through gets so far."""
        if name not in self.requests:
            self.a_turn_begins(name, words, afresh)
            if name in self.requests:
                self.a_turn_ends(list(self.requests).index(name), True)
                self.go_on(steps)

    @rule(name=NAMES, words=WORDS, afresh=st.booleans())
    def a_turn_begins(self, name: str, words: list[int], afresh: bool) -> None:
        """Match and lock what is there, take slots for the rest, as the scheduler does for a prefill."""
        if name in self.requests or name in self.verbs:
            return
        afresh = afresh or len(self.said[name]) > PAGES * PAGE // 3
        tokens = (array("q") if afresh else self.said[name]) + sequence(words)
        request = Request(session_id=name, origin_input_ids=tokens, output_ids=array("q"), extra_key=SALTS[name],
                          req_pool_idx=self.rows.free.pop(), priority=0, filled=0)
        if self.admit(request):
            self.requests[name] = request
        else:
            self.rows.free.append(request.req_pool_idx)

    def admit(self, request: Request) -> bool:
        tokens = request.origin_input_ids
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:-1], request.extra_key)))
        have, node = match.device_indices, match.last_device_node
        self.cache.inc_lock_ref(node)
        need = -(-(len(tokens) - len(have)) // PAGE) * PAGE
        if self.pool.available_size() < need:
            self.cache.evict(EvictParams(num_tokens=need - self.pool.available_size()))
        fresh = self.pool.alloc(need)
        if fresh is None:
            self.cache.dec_lock_ref(node)
            return False
        row = torch.cat([have, fresh])[:len(tokens)]
        self.rows.write((request.req_pool_idx, slice(0, len(tokens))), row)
        request.last_node, request.cache_protected_len, request.prefix_indices = node, len(have), have
        request.filled = len(have)
        return True

    def compute(self, request: Request, upto: int) -> None:
        values = kv(request.extra_key, request.origin_input_ids)
        row = self.rows.req_to_token[request.req_pool_idx].tolist()
        for i in range(request.cache_protected_len, upto):
            self.memory[row[i]] = values[i]
        request.filled = upto

    @rule(which=st.integers(0, 9), share=st.integers(1, 3))
    def a_chunk_is_prefilled(self, which: int, share: int) -> None:
        if not self.requests:
            return
        request = self.request(which)
        upto = max(request.filled, len(request.origin_input_ids) * share // 3)
        if upto > request.cache_protected_len:
            self.compute(request, upto)
            self.cache.cache_unfinished_req(request, chunked=share < 3)

    @rule(which=st.integers(0, 9), kept=st.booleans())
    def a_turn_ends(self, which: int, kept: bool) -> None:
        """Answered by one token (the last never has KV), or ended without an insert."""
        if not self.requests:
            return
        request = self.request(which)
        length = len(request.origin_input_ids) if kept else max(request.cache_protected_len, request.filled)
        if kept:
            self.compute(request, length)
            request.output_ids = array("q", [5])
        rest = self.rows.req_to_token[request.req_pool_idx, length:len(request.origin_input_ids)]
        self.cache.cache_finished_req(request, is_insert=kept, kv_len_to_handle=length)
        beyond = -length % PAGE                      # slots in the last page that is already freed
        self.pool.free_segment(rest[beyond:], start_pos=length + beyond)
        self.rows.free.append(request.req_pool_idx)
        del self.requests[request.session_id]
        if kept:
            self.said[request.session_id] = request.origin_input_ids + request.output_ids

    def request(self, which: int) -> Request:
        return list(self.requests.values())[which % len(self.requests)]

    # ---- verbs -------------------------------------------------------------------------------------------------
    def branch(self, name: str) -> Branch:
        return Branch(self.said[name], SALTS[name])

    def on_device(self, name: str) -> int:
        return self.cache.match(self.cache.key(self.said[name], SALTS[name]))[0].numel()

    def start(self, name: str, verb: str, operation: Any, steps: int, after: Any = None) -> None:
        self.verbs[name] = verb

        def done(result: Any, error: BaseException | None) -> None:
            del self.verbs[name]
            assert error is None or isinstance(error, (TimeoutError, RuntimeError)), repr(error)
            if error is None and after is not None:
                after(result)

        self.ops.tasks.start(operation, done)
        self.go_on(steps)

    def go_on(self, steps: int) -> None:
        """Scheduler steps in which the daemon answers everything."""
        for _ in range(steps):
            for promise in list(self.daemon.unanswered):
                self.answer(promise)
            self.daemon.write_down()
            self.a_step()

    def free_for_a_verb(self, name: str) -> bool:
        return name not in self.verbs and name not in self.requests and len(self.said[name]) > 0

    @rule(name=NAMES, to=st.sampled_from(["host", "storage"]), steps=STEPS)
    def spill(self, name: str, to: str, steps: int) -> None:
        """What it freed is below, unless the daemon has lost it since."""
        if not self.free_for_a_verb(name):
            return
        key = list(self.cache.key(self.said[name], SALTS[name]).token_ids)
        before, incarnation = self.on_device(name), self.daemon.incarnation

        def after(result: dict[str, Any]) -> None:
            below = self.daemon.host.keys() | self.daemon.storage.keys() | self.lost
            if self.daemon.incarnation == incarnation:
                assert set(self.daemon.chunks(key[:before], SALTS[name])) <= below | self.device_chunks(name), "freed what is nowhere"
            assert sum(result["source"].values()) == result["tokens"]

        self.start(name, "spill", self.ops.spill(name, [self.branch(name)], to), steps, after)

    def device_chunks(self, name: str) -> set[Any]:
        key = list(self.cache.key(self.said[name], SALTS[name]).token_ids)
        return set(self.daemon.chunks(key[:self.on_device(name)], SALTS[name]))

    @rule(name=NAMES, steps=STEPS)
    def restore(self, name: str, steps: int) -> None:
        """What it says it brought is on the device, after what was there."""
        if not self.free_for_a_verb(name):
            return

        def after(result: dict[str, Any]) -> None:
            assert self.on_device(name) >= result["tokens"]
            if result["tokens"]:
                assert name in self.cache.report()

        self.start(name, "restore", self.ops.restore(name, [self.branch(name)]), steps, after)

    @rule(name=NAMES, to=st.sampled_from(["host", "storage"]), steps=STEPS)
    def away_and_coming_back(self, name: str, to: str, steps: int) -> None:
        self.spill(name, to, 12)
        self.restore(name, steps)

    @rule(name=NAMES, to=st.sampled_from(["host", "storage"]))
    def a_restore_is_cut_off(self, name: str, to: str) -> None:
        """The daemon falls silent when it has been asked for the pages."""
        self.away_and_coming_back(name, to, 0)
        self.until("retrieve")
        self.time_passes(TIMEOUT_S + 0.1)

    @rule(name=NAMES, words=WORDS)
    def a_store_is_cut_off(self, name: str, words: list[int]) -> None:
        self.a_turn(name, words, True, 0)
        self.until("store")
        self.time_passes(TIMEOUT_S + 0.1)

    def until(self, kind: str) -> None:
        """Steps in which the daemon answers everything, up to the first question of that kind."""
        for _ in range(12):
            if any(promise.kind == kind for promise in self.daemon.unanswered):
                break
            self.go_on(1)

    @rule(name=NAMES, verb=st.sampled_from(["demote", "drop", "report", "pin", "unpin"]), steps=STEPS)
    def other_verb(self, name: str, verb: str, steps: int) -> None:
        if not self.free_for_a_verb(name):
            return
        branches = [self.branch(name)]
        operation = {"demote": lambda: self.ops.demote(name, branches), "drop": lambda: self.ops.drop(name, branches),
                     "report": lambda: self.ops.report(name, branches), "pin": lambda: self.ops.pin(name, branches, 1e12),
                     "unpin": lambda: self.ops.pin(name, branches, 0.0)}[verb]
        self.start(name, verb, operation(), steps)

    # ---- the scheduler and the daemon --------------------------------------------------------------------------
    @rule()
    def a_step(self) -> None:
        self.now += 0.01
        self.ops.poll()

    @rule(which=st.integers(0, 9), failing=st.booleans())
    def the_daemon_answers(self, which: int, failing: bool) -> None:
        if self.daemon.unanswered:
            self.answer(self.daemon.unanswered[which % len(self.daemon.unanswered)], failing and which % 2 == 0)

    def answer(self, promise: Any, failing: bool = False) -> None:
        self.daemon.unanswered.remove(promise)
        if promise.kind == "retrieve":
            assert not promise.slots & (self.free_slots() | self.tree_slots() | self.request_slots()), "written to pages of others"
        if promise.kind == "store":
            assert not promise.slots & self.free_slots(), "read from free pages"
        self.daemon.failing, self.mishaps = failing, self.mishaps + failing
        promise.answer()
        self.daemon.failing = False

    @rule(steps=st.integers(1, 12))
    def all_goes_well_for_a_while(self, steps: int) -> None:
        self.go_on(steps)

    @rule(seconds=st.sampled_from([0.5, TIMEOUT_S + 0.1, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.mishaps += 1
        self.now += seconds
        self.ops.poll()

    @rule(what=st.sampled_from(["written down", "evicted", "dies", "restarts", "back", "flushed", "room"]), which=st.integers(0, 30))
    def something_happens(self, what: str, which: int) -> None:
        match what:
            case "written down":
                self.daemon.write_down()
            case "evicted":
                before = set(self.daemon.host)
                self.daemon.lose_from_host(which)
                self.lost |= before - set(self.daemon.host)
            case "dies" | "restarts":
                self.mishaps += 1
                self.daemon.die()
                if what == "restarts":
                    self.daemon.come_back()
            case "back" if not self.daemon.healthy:
                self.the_daemon_is_back()
            case "flushed" if not self.requests and not self.ops.busy:
                self.cache.reset()                   # Scheduler.flush_cache, which SGLang allows when it is fully idle
                self.pool.clear()
            case "room":
                self.cache.evict(EvictParams(num_tokens=which))

    def the_daemon_is_back(self) -> None:
        """As another, or as the same that was only suspected."""
        self.daemon.come_back() if self.daemon.abandoned else setattr(self.daemon, "healthy", True)
        self.daemon.abandoned.clear()

    # ---- what must hold ----------------------------------------------------------------------------------------
    def free_slots(self) -> set[int]:
        pages = self.pool.free_pages.tolist() + self.pool.release_pages.tolist()
        return {page * PAGE + i for page in pages for i in range(PAGE)}

    def tree_slots(self) -> set[int]:
        return {slot for node in self.cache.nodes() for slot in node.value.tolist()}

    def request_slots(self) -> set[int]:
        """Slots that running requests hold outside the tree."""
        out: set[int] = set()
        for request in self.requests.values():
            row = self.rows.req_to_token[request.req_pool_idx, request.cache_protected_len:len(request.origin_input_ids)]
            out |= {int(slot) // PAGE * PAGE + i for slot in row for i in range(PAGE)}
        return out

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        free, tree, requests = self.free_slots(), self.tree_slots(), self.request_slots()
        held = {slot for node in self.cache.nodes() for slot in node.value.tolist()}
        assert len(tree) == sum(len(node.value) for node in self.cache.nodes()), "a slot twice in the tree"
        assert not free & tree and not free & requests and not tree & requests
        elsewhere = set(range(PAGE, (PAGES + 1) * PAGE)) - free - held - requests
        assert not elsewhere or self.ops.busy, f"pages are lost: {sorted(elsewhere)}"
        for promise in self.daemon.unanswered:
            if promise.kind == "retrieve":
                assert promise.slots <= elsewhere, "given away while the daemon may still write to them"
            if promise.kind == "store":
                assert not promise.slots & free, "freed while the daemon may still read them"

    @invariant()
    def the_tree_holds_the_right_kv(self) -> None:
        for node in self.cache.nodes():
            path, up = [], node
            while up is not self.cache.root_node:
                path.append(up)
                up = up.parent
            tokens = [token for part in reversed(path) for token in part.key.token_ids]
            expected = kv(node.key.extra_key, tokens)[len(tokens) - len(node.key):]
            assert [self.memory.get(slot) for slot in node.value.tolist()] == expected

    @invariant()
    def the_books_balance(self) -> None:
        assert self.cache.sanity() == []
        locked = sum(len(node.key) for node in self.cache.nodes() if node.lock_ref)
        assert self.cache.protected_size_ == locked
        assert self.cache.evictable_size_ == sum(len(node.key) for node in self.cache.nodes()) - locked
        assert all(count >= 0 for count in self.daemon.locks.values())

    def teardown(self) -> None:
        """When all is over nothing is locked, held or waited for, here and in the daemon."""
        if not self.daemon.healthy:
            self.the_daemon_is_back()
        while self.requests:
            self.a_turn_ends(0, True)
        for _ in range(60):
            for promise in list(self.daemon.unanswered):
                self.answer(promise)
            self.daemon.write_down()
            self.now += 0.3
            self.ops.poll()
        for name in SALTS:
            self.ops.unpin(name)
        assert not self.verbs and not self.ops.busy and not self.ops.quarantined
        assert self.cache.protected_size_ == 0, "something is still locked"
        assert self.pool.available_size() + self.cache.evictable_size_ == PAGES * PAGE
        assert self.mishaps or not +self.daemon.locks, "read locks were left in the daemon"
        assert self.mishaps or self.daemon.open <= self.daemon.ttl, "requests were left open in the daemon"


TestSessionOps = SessionOpsMachine.TestCase
TestSessionOps.settings = settings(stateful_step_count=40, deadline=None)
