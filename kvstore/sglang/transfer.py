"""Copies between the device and the LMCache daemon, two-phase: pages are locked or freshly allocated until the daemon has
answered. Whatever ends a copy early gives them back, except pages that a silent daemon may still be reading or writing:
those are quarantined until it answers or is another one.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from kvstore.lmcache.client import OffloadClient, OffloadError

from .cache import SessionRadixCache
from .tasks import Clock, Future, Operation, Sleep

log = logging.getLogger("rekindle.transfer")

POLL_S = 0.003
MOST_PAUSE_S = 0.2
SETTLE_S = 10.0
"""How long a written chunk may take to show up on a tier."""


class Transfers:
    """Runs in the scheduler thread. client is None where no offload is configured."""

    def __init__(self, cache: SessionRadixCache, client: OffloadClient | None, clock: Clock) -> None:
        self.cache, self.client, self._clock = cache, client, clock
        self._quarantine: list[tuple[Future, str, Callable[[], None]]] = []
        """(unanswered future, incarnation of the daemon, what gives the pages back)"""

    @property
    def quarantined(self) -> int:
        return len(self._quarantine)

    def poll(self) -> None:
        if self._quarantine:
            self._quarantine = [entry for entry in self._quarantine if not self._over(*entry)]

    def daemon(self) -> OffloadClient:
        """Raises OffloadError where there is none, or none that answers."""
        if self.client is None:
            raise OffloadError("this engine runs without offload")
        if not self.client.healthy:
            raise OffloadError("the LMCache daemon does not answer")
        return self.client

    def locked(self, node: TreeNode) -> Callable[[], None]:
        """Locks the node and all above it; returns what unlocks them."""
        self.cache.inc_lock_ref(node)
        return lambda: self.cache.dec_lock_ref(node)

    def store(self, key: RadixKey, *, to_storage: bool = False) -> Operation:
        """Copy down what is on the device of this sequence and not yet below.

        Returns (tokens that were on the device, leading tokens of them that are below now, whole chunks).
        """
        client = self.daemon()
        slots, node = self.cache.match(key)
        tokens, salt, count = list(key.token_ids), key.extra_key or "", slots.numel()
        end = count // client.chunk_tokens * client.chunk_tokens
        if not end:
            return count, 0
        request_id, release = f"store-{uuid.uuid4().hex[:12]}", self.locked(node)
        try:
            where = yield client.where(tokens[:end], salt)
            wanted = "sb" if to_storage else "hsb"
            if to_storage and "h" in where:
                # Written to the host a moment ago, perhaps, and still on its way down; else it will not go by itself.
                where = yield from self._await(tokens[:end], salt, "sb-" if "-" in where else "sb")
                stuck = [i for i, letter in enumerate(where) if letter == "h"]
                if stuck:
                    yield client.delete(tokens[:end], salt, stuck, ["host"])
            missing = [i for i, letter in enumerate(where) if letter not in wanted]
            if missing:
                start = missing[0] * client.chunk_tokens
                incarnation = client.incarnation
                future = client.store(tokens, start, end, self._pages(slots[start:end]), request_id, salt)
                try:
                    ok = yield future
                except TimeoutError:
                    self._quarantined(future, incarnation, release)
                    release = _keep
                    raise
                client.end(request_id)
                if not ok:
                    client.suspect("it refused a store")
                    raise OffloadError("the daemon refused the store")
                where = yield from self._await(tokens[:end], salt, wanted)
            return count, leading(where, wanted) * client.chunk_tokens
        finally:
            release()

    def _await(self, tokens: Sequence[int], salt: str, wanted: str) -> Operation:
        """`where` as soon as all chunks are on a wanted tier, or when it has taken too long."""
        deadline, pause_s = self._clock() + SETTLE_S, POLL_S
        while True:
            where = yield self.daemon().where(tokens, salt)
            if all(letter in wanted for letter in where) or self._clock() > deadline:
                return where
            yield Sleep(pause_s, self._clock)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)     # each question carries all tokens

    def load(self, key: RadixKey, tokens: list[int], where: str, slots: torch.Tensor) -> Operation:
        """host/storage -> device, what follows the prefix in `slots`. Returns (tokens by tier, why nothing came)."""
        client, chunk, allocator = self.daemon(), self.daemon().chunk_tokens, self.cache.token_to_kv_pool_allocator
        salt, request_id = key.extra_key or "", f"restore-{uuid.uuid4().hex[:12]}"
        have, limit = slots.numel(), leading(where, "hsb") * chunk
        fresh: torch.Tensor | None = None
        locked = (0, limit)
        try:
            yield client.lookup(tokens, limit, request_id, salt)
            deadline = self._clock() + SETTLE_S
            while (chunks := (yield client.loaded(request_id))) is None:
                if self._clock() > deadline:
                    raise TimeoutError("storage did not deliver in time")
                yield Sleep(POLL_S, self._clock)
            found = chunks * chunk
            locked = (0, found)
            if found <= have:
                return {}, "the daemon no longer has it"
            need, free = found - have, allocator.available_size()
            if free + self.cache.evictable_size() < need:    # before others lose their pages for nothing
                return {}, f"the device pool has {free + self.cache.evictable_size()} tokens to spare, {need} are needed"
            if free < need:
                self.cache.evict(EvictParams(num_tokens=need - free))
            fresh = allocator.alloc(need)
            first = have // chunk * chunk            # the daemon moves whole chunks; what we have of the first is skipped
            client.unlock(tokens, 0, first, request_id, salt)
            locked = (first, found)
            pages = [0] * ((have - first) // self.cache.page_size) + self._pages(fresh)
            incarnation = client.incarnation
            future = client.retrieve(tokens, first, found, pages, have - first, request_id, salt)
            try:
                locked = (0, 0)                      # the daemon uses them up, or releases them when it fails
                ok = yield future
            except TimeoutError:
                lost, fresh = fresh, None
                self._quarantined(future, incarnation, lambda: allocator.free(lost))
                raise
            if not ok:
                client.suspect("it refused a retrieve")
                return {}, "the daemon could not deliver"
            inserted = self.cache.insert(InsertParams(key=key[:found], value=torch.cat([slots, fresh])))
            duplicate = inserted.prefix_len - have   # another request computed these meanwhile
            if duplicate > 0:
                allocator.free_segment(fresh[:duplicate], start_pos=have)
            fresh = None
            self.cache.epoch += 1
            tiers = Counter()
            for i in range(first // chunk, found // chunk):
                tiers["storage" if where[i] == "s" else "host"] += min((i + 1) * chunk, found) - max(i * chunk, have)
            return dict(tiers), ""
        finally:
            if fresh is not None:
                allocator.free(fresh)
            if locked[0] < locked[1]:
                # No `end` after it, which could overtake it in the daemon: that forgets the request by itself in time.
                client.unlock(tokens, *locked, request_id, salt)
            else:
                client.end(request_id)

    def _pages(self, slots: torch.Tensor) -> list[int]:
        """Page ids of whole pages of slots."""
        return (slots[::self.cache.page_size] // self.cache.page_size).tolist()

    def _quarantined(self, future: Future, incarnation: str, release: Callable[[], None]) -> None:
        """The daemon has not answered and may still touch these pages. `incarnation`: of the daemon that was asked, which
        need not be the one of now."""
        assert self.client is not None               # it was asked
        self._quarantine.append((future, incarnation, release))
        self.client.suspect("it left a transfer unanswered")

    def _over(self, future: Future, incarnation: str, release: Callable[[], None]) -> bool:
        try:
            answered = future.query()
        except Exception as error:  # noqa: BLE001  an answer that cannot be read says nothing about the copy
            log.warning("the answer to a transfer is unreadable: %r", error)
            answered = False
        if answered or self.client is None or self.client.incarnation != incarnation:
            release()
            return True
        return False


def _keep() -> None:
    """In place of a release: the quarantine has it."""


def leading(where: str, wanted: str) -> int:
    """Chunks before the first that is on no wanted tier."""
    return next((i for i, letter in enumerate(where) if letter not in wanted), len(where))
