"""What can be done with a session's pages, without a request and without holding up the scheduler.

Each operation is a generator (tasks.py) over the tree (cache.py) and the daemon (kvstore/lmcache/client.py). Two-phase
throughout: pages are locked or freshly allocated until the daemon has answered; whatever ends an operation early gives
them back, except pages that a silent daemon may still be copying: those are quarantined until it answers or is gone.
"""

import logging
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from kvstore.lmcache.client import OffloadClient, OffloadError

from .cache import SessionRadixCache
from .tasks import Operation, Runner, Sleep

log = logging.getLogger("rekindle.ops")
POLL_S = 0.003
SETTLE_S = 10.0
"""How long a written chunk may take to show up on a tier."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A token sequence: padded tokens (images replaced by their digest), salt, and where it stops being common property."""

    tokens: array
    salt: str
    private_from: int = 0


class SessionOps:
    """All methods run in the scheduler thread. client is None where no offload is configured."""

    def __init__(self, cache: SessionRadixCache, client: OffloadClient | None, timeout_s: float) -> None:
        self.cache, self.client = cache, client
        self.tasks = Runner(timeout_s)
        self._storing: Counter[str] = Counter()
        self._pins: dict[str, tuple[float, list[TreeNode]]] = {}
        self._quarantine: list[tuple[Any, str, Any]] = []
        """(future, daemon incarnation, what to do when it is over)"""
        cache.on_finished = self._write_through

    # ---- the scheduler's hooks ---------------------------------------------------------------------------------
    def poll(self) -> None:
        """Once per scheduler step."""
        self.tasks.poll()
        if self._quarantine:
            self._quarantine = [entry for entry in self._quarantine if not self._try_release(*entry)]
        now = time.time()
        for owner in [o for o, (until, _) in self._pins.items() if until <= now]:
            self.unpin(owner)

    @property
    def busy(self) -> bool:
        """Pages are held outside the tree: not a leak, and not the time to sleep."""
        return bool(self.tasks) or bool(self._quarantine)

    # ---- write-through -----------------------------------------------------------------------------------------
    def _write_through(self, owner: str, key: RadixKey, node: TreeNode) -> None:
        """Every finished turn is copied down at once, so that a spill only has to free."""
        if self.client is None or not self.client.healthy:
            return
        self._storing[owner] += 1

        def done(_: Any, error: BaseException | None) -> None:
            self._storing[owner] -= 1
            if error is not None:
                log.warning("write-through of %s failed: %r", owner, error)

        self.tasks.start(self._store(key), done)

    def _settled(self, owner: str) -> Operation:
        while self._storing[owner] > 0:
            yield Sleep(POLL_S)

    def _store(self, key: RadixKey, *, to_storage: bool = False) -> Operation:
        """Copy down what is on the device of this sequence and not yet below. Returns whole-chunk tokens now below."""
        client = self._daemon()
        slots, node = self.cache.match(key)
        tokens, salt = list(key.token_ids), key.extra_key or ""
        end = slots.numel() // client.chunk_tokens * client.chunk_tokens
        if not end:
            return 0
        request_id, release = f"store-{uuid.uuid4().hex[:12]}", self._locked(node)
        try:
            where = yield client.where(tokens[:end], salt)
            wanted = "sb" if to_storage else "hsb"
            if to_storage and "h" in where:
                # Written to the host a moment ago, perhaps, and still on its way down; else it will not go by itself.
                where = yield from self._await_storage(tokens[:end], salt, where)
                stuck = [i for i, letter in enumerate(where) if letter == "h"]
                if stuck:
                    yield client.delete(tokens[:end], salt, stuck, ["host"])
            missing = [i for i, letter in enumerate(where) if letter not in wanted]
            if missing:
                start = missing[0] * client.chunk_tokens
                future = client.store(tokens, start, end, self._pages(slots[start:end]), request_id, salt)
                try:
                    ok = yield future
                except TimeoutError:
                    release = self._quarantined(future, release)
                    raise
                if not ok:
                    client.suspect("it refused a store")
                    raise OffloadError("the daemon refused the store")
                where = yield from self._await(tokens[:end], salt, wanted)
            return self._leading(where, wanted) * client.chunk_tokens
        finally:
            release()

    def _await(self, tokens: Sequence[int], salt: str, wanted: str) -> Operation:
        """`where` as soon as all chunks are on a wanted tier, or when it has taken too long."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            where = yield self._daemon().where(tokens, salt)
            if all(letter in wanted for letter in where) or time.monotonic() > deadline:
                return where
            yield Sleep(POLL_S)

    def _await_storage(self, tokens: Sequence[int], salt: str, where: str) -> Operation:
        return (yield from self._await(tokens, salt, "sb-" if "-" in where else "sb"))

    # ---- verbs -------------------------------------------------------------------------------------------------
    def spill(self, owner: str, sequences: Sequence[Branch], to: str) -> Operation:
        """Copy down, verify, then free the device pages that only this session owns; to storage: its host chunks, too."""
        yield from self._settled(owner)
        keys = [self.cache.key(s.tokens, s.salt) for s in sequences]
        unstored = 0
        for key in keys:
            on_device = self.cache.match(key)[0].numel()
            stored = (yield from self._store(key, to_storage=to == "storage")) if on_device else 0
            whole = on_device // self._daemon().chunk_tokens * self._daemon().chunk_tokens
            if stored < whole:
                raise OffloadError(f"only {stored} of {whole} tokens are on {to}; nothing was freed")
            unstored += on_device - whole
        self.unpin(owner)
        shared = [self.cache.shared_prefix_tokens(owner, key) for key in keys]
        freed, kept = self.cache.release(owner)
        source, left = ({"device": freed} if freed else {}), 0
        if to == "storage":
            host, left = yield from self._free_host(sequences, keys, shared)
            if host:
                source["host"] = host
        reason = "; ".join(filter(None, [
            f"{unstored} tokens beyond the last whole chunk were not stored" if unstored else "",
            f"{left} tokens stay on the host, storage does not have them" if left else ""]))
        return {"source": source, "target": to, "tokens": freed or source.get("host", 0), "kept": kept, "reason": reason}

    def demote(self, owner: str, sequences: Sequence[Branch]) -> Operation:
        """Free the host chunks of a session that storage holds as well."""
        yield from self._settled(owner)
        keys = [self.cache.key(s.tokens, s.salt) for s in sequences]
        shared = [self.cache.shared_prefix_tokens(owner, key) for key in keys]
        host, left = yield from self._free_host(sequences, keys, shared)
        return {"source": {"host": host} if host else {}, "target": "storage", "tokens": host,
                "reason": f"{left} tokens stay on the host, storage does not have them" if left else ""}

    def _free_host(self, sequences: Sequence[Branch], keys: Sequence[RadixKey], shared: Sequence[int]) -> Operation:
        """(host tokens freed, host tokens that stay because they are nowhere else)"""
        client, freed, left = self._daemon(), 0, 0
        for sequence, key, shared_tokens in zip(sequences, keys, shared, strict=True):
            tokens = list(key.token_ids)
            where = yield client.where(tokens, sequence.salt)
            first = -(-max(shared_tokens, sequence.private_from) // client.chunk_tokens)
            doomed = [i for i in range(first, len(where)) if where[i] == "b"]
            left += where[first:].count("h") * client.chunk_tokens
            if doomed:
                answer = yield client.delete(tokens, sequence.salt, doomed, ["host"])
                freed += answer["host"] * client.chunk_tokens
        return freed, left

    def drop(self, owner: str, sequences: Sequence[Branch]) -> Operation:
        """Forget the session's KV on every tier; what others share stays."""
        yield from self._settled(owner)
        self.unpin(owner)
        keys = [self.cache.key(s.tokens, s.salt) for s in sequences]
        shared = [self.cache.shared_prefix_tokens(owner, key) for key in keys]
        freed, kept = self.cache.release(owner)
        source = Counter({"device": freed})
        if self.client is not None:
            for sequence, key, shared_tokens in zip(sequences, keys, shared, strict=True):
                tokens = list(key.token_ids)
                first = -(-max(shared_tokens, sequence.private_from) // self.client.chunk_tokens)
                chunks = range(first, len(tokens) // self.client.chunk_tokens)
                answer = yield self._daemon().delete(tokens, sequence.salt, chunks, ["host", "storage"])
                source.update({tier: answer[tier] * self.client.chunk_tokens for tier in ("host", "storage")})
        return {"source": {tier: n for tier, n in source.items() if n}, "target": None, "tokens": max(source.values()), "kept": kept}

    def restore(self, owner: str, sequence: Branch) -> Operation:
        """Bring back what is below of the sequence's longest stored prefix. Loads nothing that is on the device."""
        yield from self._settled(owner)
        key = self.cache.key(sequence.tokens, sequence.salt)
        slots, node = self.cache.match(key)
        have, source = slots.numel(), Counter()
        result = {"target": "device", "had": have, "reason": ""}
        release = self._locked(node)                 # what is on the device stays there while the rest is loaded
        try:
            client = self.client
            end = len(key) // client.chunk_tokens * client.chunk_tokens if client is not None else 0
            if client is not None and end > have and client.healthy:
                tokens = list(key.token_ids)
                where = yield client.where(tokens[:end], sequence.salt)
                if self._leading(where, "hsb") * client.chunk_tokens > have:
                    loaded = yield from self._load(key, tokens, where, have, slots, result)
                    for tier, count in loaded.items():
                        source[tier] += count
            elif client is not None and end > have:
                result["reason"] = "the LMCache daemon does not answer"
            reached = have + sum(source.values())
            if reached:
                self.cache.tag(owner, self.cache.match(key[:reached])[1])
        finally:
            release()
        return {**result, "source": dict(source), "tokens": sum(source.values()), "wanted": len(key) - have}

    def _load(self, key: RadixKey, tokens: list[int], where: str, have: int, slots: torch.Tensor, result: dict) -> Operation:
        """host/storage -> device for tokens [have, found). Returns tokens by tier (empty: nothing came)."""
        client, chunk, allocator = self._daemon(), self._daemon().chunk_tokens, self.cache.token_to_kv_pool_allocator
        salt, request_id = key.extra_key or "", f"restore-{uuid.uuid4().hex[:12]}"
        limit = self._leading(where, "hsb") * chunk
        fresh: torch.Tensor | None = None
        locked = (0, limit)
        try:
            yield client.lookup(tokens, limit, request_id, salt)
            deadline = time.monotonic() + SETTLE_S
            while (chunks := (yield client.loaded(request_id))) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError("storage did not deliver in time")
                yield Sleep(POLL_S)
            found = chunks * chunk
            locked = (0, found)
            if found <= have:
                result["reason"] = "the daemon no longer has it"
                return {}
            need = found - have
            if allocator.available_size() < need:
                self.cache.evict(EvictParams(num_tokens=need - allocator.available_size()))
            fresh = allocator.alloc(need)
            if fresh is None:
                result["reason"] = f"the device pool has {allocator.available_size()} tokens free, {need} are needed"
                return {}
            first = have // chunk * chunk            # the daemon moves whole chunks; what we have of the first is skipped
            client.unlock(tokens, 0, first, request_id, salt)
            locked = (first, found)
            pages = [0] * ((have - first) // self.cache.page_size) + self._pages(fresh)
            future = client.retrieve(tokens, first, found, pages, have - first, request_id, salt)
            try:
                locked = (0, 0)                      # the daemon uses them up, or releases them when it fails
                ok = yield future
            except TimeoutError:
                lost, fresh = fresh, None
                self._quarantined(future, lambda: allocator.free(lost))
                raise
            if not ok:
                client.suspect("it refused a retrieve")
                result["reason"] = "the daemon could not deliver"
                return {}
            inserted = self.cache.insert(InsertParams(key=key[:found], value=torch.cat([slots, fresh])))
            duplicate = inserted.prefix_len - have   # another request computed these meanwhile
            if duplicate > 0:
                allocator.free_segment(fresh[:duplicate], start_pos=have)
            fresh = None
            self.cache.epoch += 1
            tiers = Counter()
            for i in range(first // chunk, found // chunk):
                tiers["storage" if where[i] == "s" else "host"] += min((i + 1) * chunk, found) - max(i * chunk, have)
            return dict(tiers)
        finally:
            if fresh is not None:
                allocator.free(fresh)
            client.unlock(tokens, *locked, request_id, salt)
            client.end(request_id)

    def pin(self, owner: str, sequences: Sequence[Branch], until: float) -> Operation:
        """Keep what is on the device until `until` (unix seconds); in the past: let go."""
        self.unpin(owner)
        nodes = [self.cache.match(self.cache.key(s.tokens, s.salt)) for s in sequences]
        pinned = max((slots.numel() for slots, _ in nodes), default=0)
        if until > time.time() and pinned:
            for _, node in nodes:
                self.cache.inc_lock_ref(node)
            self._pins[owner] = (until, [node for _, node in nodes])
        return {"source": {}, "target": "device", "tokens": pinned}
        yield                                        # an operation like the others, though it never waits

    def unpin(self, owner: str) -> None:
        _, nodes = self._pins.pop(owner, (0, []))
        for node in nodes:
            self.cache.dec_lock_ref(node)

    def report(self, owner: str | None, sequences: Sequence[Branch]) -> Operation:
        """Device figures of every session; with sequences, also where that session's chunks are below."""
        out: dict[str, Any] = {"epoch": self.cache.epoch, "sessions": self.cache.report()}
        if owner is None or not sequences:
            return out
        yield from self._settled(owner)
        out = {"epoch": self.cache.epoch, "sessions": self.cache.report()}
        totals = Counter(total=0, host=0, storage=0, reachable=0)
        answers = self.client is None or self.client.healthy
        seen: list[RadixKey] = []
        for sequence in sequences:
            key = self.cache.key(sequence.tokens, sequence.salt)
            # A branch counts only from where it leaves those counted before it.
            common = max((key.match(other, page_size=self.cache.page_size) for other in seen), default=0)
            seen.append(key)
            have = self.cache.match(key)[0].numel()
            reachable = have
            totals["total"] += len(key) - common
            if self.client is not None and answers and len(key) >= self.client.chunk_tokens:
                chunk = self.client.chunk_tokens
                where = yield self.client.where(list(key.token_ids), sequence.salt)
                for i, letter in enumerate(where):
                    counted = max(0, (i + 1) * chunk - max(i * chunk, common))
                    totals["host"] += counted if letter in "hb" else 0
                    totals["storage"] += counted if letter in "sb" else 0
                reached = have // chunk
                while reached < len(where) and where[reached] != "-":
                    reached += 1
                reachable = max(have, reached * chunk)
            totals["reachable"] += max(0, reachable - common)
        # A daemon that does not answer has not lost anything: what is below is unknown then, not zero.
        return {**out, "below": dict(totals) if answers else {"total": totals["total"]}}

    # ---- small things ------------------------------------------------------------------------------------------
    def _daemon(self) -> OffloadClient:
        if self.client is None:
            raise OffloadError("this engine runs without offload")
        if not self.client.healthy:
            raise OffloadError("the LMCache daemon does not answer")
        return self.client

    def _pages(self, slots: torch.Tensor) -> list[int]:
        """Page ids of whole pages of slots."""
        return (slots[::self.cache.page_size] // self.cache.page_size).tolist()

    @staticmethod
    def _leading(where: str, wanted: str) -> int:
        return next((i for i, letter in enumerate(where) if letter not in wanted), len(where))

    def _locked(self, node: TreeNode) -> Any:
        self.cache.inc_lock_ref(node)
        return lambda: self.cache.dec_lock_ref(node)

    def _quarantined(self, future: Any, release: Any) -> Any:
        """The daemon has not answered and may still touch these pages; returns a release that does nothing."""
        self._quarantine.append((future, self._daemon_incarnation(), release))
        if self.client is not None:
            self.client.suspect("it left a transfer unanswered")
        return lambda: None

    def _daemon_incarnation(self) -> str:
        return self.client.incarnation if self.client is not None else ""

    def _try_release(self, future: Any, incarnation: str, release: Any) -> bool:
        if future.query() or self._daemon_incarnation() != incarnation:
            release()
            return True
        return False

    @property
    def quarantined(self) -> int:
        return len(self._quarantine)
