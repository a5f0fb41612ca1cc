"""SessionRadixCache against a trivial model: who owns which pages, and what a release frees. SGLang's own tree, no engine."""

from array import array
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import tests.support.sglang_here  # noqa: F401  first: it makes the next ones possible  # isort: skip
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvstore.sglang.cache import SessionRadixCache

PAGE = 4
POOL = 64 * PAGE
SESSIONS = ("a", "b", "c")


class Pool:
    """A page allocator that notices double frees."""

    device, size = "cpu", POOL

    def __init__(self) -> None:
        self.free_pages = list(range(POOL // PAGE))

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE

    def alloc(self, tokens: int) -> Any:
        pages, self.free_pages = self.free_pages[:tokens // PAGE], self.free_pages[tokens // PAGE:]
        return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)], dtype=torch.int64)

    def free_segment(self, slots: Any, start_pos: int) -> None:
        pages = [int(slot) // PAGE for slot in slots[::PAGE]]
        assert not set(pages) & set(self.free_pages), "freed twice"
        self.free_pages += pages

    def get_kvcache(self) -> None:
        return None


class SessionCache(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.cache = SessionRadixCache(CacheInitParams(disable=False, req_to_token_pool=None, page_size=PAGE,
                                                       token_to_kv_pool_allocator=self.pool))
        self.owned: dict[str, set[tuple[int, ...]]] = {name: set() for name in SESSIONS}
        """Model: session -> the page-aligned prefixes it owns, one a page."""
        self.locked: list[Any] = []

    def pages(self, tokens: list[int]) -> set[tuple[int, ...]]:
        return {tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)}

    def resident(self) -> set[tuple[int, ...]]:
        out = set()
        for node in self.cache.nodes():
            path, up = [], node
            while up is not self.cache.root_node:
                path.append(list(up.key.token_ids))
                up = up.parent
            prefix = [token for part in reversed(path) for token in part]
            out |= {page for page in self.pages(prefix) if len(page) > len(prefix) - len(node.key)}
        return out

    @rule(name=st.sampled_from(SESSIONS), pages=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def finish_a_turn(self, name: str, pages: list[int]) -> None:
        """As a finished request does: insert, free what was there already, own the path."""
        tokens = [kind * 10 + i for kind in pages for i in range(PAGE)]
        if self.pool.available_size() < len(tokens):
            self.cache.evict(EvictParams(num_tokens=len(tokens)))
            alive = self.resident()
            self.owned = {who: mine & alive for who, mine in self.owned.items()}
            if self.pool.available_size() < len(tokens):
                return
        slots, key = self.pool.alloc(len(tokens)), RadixKey(array("q", tokens), None)
        there = self.cache.insert(InsertParams(key=key, value=slots)).prefix_len
        if there:
            self.pool.free_segment(slots[:there], start_pos=0)
        self.cache.tag(name, self.cache.match(key)[1])
        self.owned[name] |= self.pages(tokens)

    @rule(name=st.sampled_from(SESSIONS))
    def release(self, name: str) -> None:
        """Frees exactly the pages that nobody else owns and nobody uses."""
        others = set().union(*(mine for who, mine in self.owned.items() if who != name))
        before = self.pool.available_size()
        freed, kept = self.cache.release(name)
        assert self.pool.available_size() - before == freed
        mine = self.owned[name]
        if not self.locked:
            assert freed == PAGE * len(mine - others) and kept == PAGE * len(mine & others)
        assert freed + kept == PAGE * len(mine)
        still = self.resident()
        assert others <= still, "a neighbour lost pages"
        tokens = self.cache.report().get(name, (0, 0, 0))[0]
        assert tokens == 0 or self.locked, "only pages in use may stay"
        self.owned[name] = {page for page in mine & still if self.owns(name, page)}
        assert tokens == PAGE * len(self.owned[name])

    def owns(self, name: str, page: tuple[int, ...]) -> bool:
        _, node = self.cache.match(RadixKey(array("q", page), None))
        return name in self.cache.owners(node)

    @rule(pages=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def a_turn_begins(self, pages: list[int]) -> None:
        """Somebody's prompt has matched a prefix and holds it."""
        tokens = [kind * 10 + i for kind in pages for i in range(PAGE)]
        _, node = self.cache.match(RadixKey(array("q", tokens), None))
        if node is not self.cache.root_node and len(self.locked) < 3:
            self.cache.inc_lock_ref(node)
            self.locked.append(node)

    @rule()
    def a_turn_ends(self) -> None:
        if self.locked:
            self.cache.dec_lock_ref(self.locked.pop())

    @invariant()
    def the_books_balance(self) -> None:
        free, cached, in_flight, total = self.cache.gauges()
        assert free + cached + in_flight == total == POOL
        assert in_flight == sum(len(node.key) for node in self.cache.nodes() if node.lock_ref)
        assert self.cache.sanity() == []

    @invariant()
    def the_report_is_the_model(self) -> None:
        report = self.cache.report()
        for name, mine in self.owned.items():
            others = set().union(*(pages for who, pages in self.owned.items() if who != name))
            tokens, exclusive, _ = report.get(name, (0, 0, 0))
            assert tokens == PAGE * len(mine) and exclusive == PAGE * len(mine - others)


TestSessionCache = SessionCache.TestCase
TestSessionCache.settings = settings(stateful_step_count=30)
