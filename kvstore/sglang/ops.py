"""What can be done with a session's pages, without a request and without holding up the scheduler.

Each operation is a generator (tasks.py) over the tree (cache.py) and copies (transfer.py). An operation that ends early, by
an error or a silent daemon, leaves the tree as it was.
"""

import logging
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from kvstore.lmcache.client import OffloadClient, OffloadError

from .cache import SessionRadixCache
from .tasks import Clock, Operation, Runner, Sleep
from .transfer import POLL_S, Transfers, leading

log = logging.getLogger("rekindle.ops")


@dataclass(frozen=True, slots=True)
class Branch:
    """A token sequence: padded tokens (images replaced by their digest), salt, and where it stops being common property."""

    tokens: array
    salt: str
    private_from: int = 0


class SessionOps:
    """All methods run in the scheduler thread. client is None where no offload is configured."""

    def __init__(self, cache: SessionRadixCache, client: OffloadClient | None, timeout_s: float, clock: Clock = time.monotonic) -> None:
        self.cache, self.client, self._clock = cache, client, clock
        self.tasks = Runner(timeout_s, clock)
        self._transfers = Transfers(cache, client, clock)
        self._storing: Counter[str] = Counter()
        self._pins: dict[str, tuple[float, list[TreeNode]]] = {}
        cache.on_finished, cache.on_reset = self._write_through, self._pins.clear

    # ---- the scheduler's hooks ---------------------------------------------------------------------------------
    def poll(self) -> None:
        """Once per scheduler step."""
        self.tasks.poll()
        self._transfers.poll()
        now = time.time()
        for owner in [o for o, (until, _) in self._pins.items() if until <= now]:
            self.unpin(owner)

    @property
    def busy(self) -> bool:
        """Pages are held outside the tree: not a leak, and not the time to sleep."""
        return bool(self.tasks) or self.quarantined > 0

    @property
    def quarantined(self) -> int:
        """Transfers whose pages are held because the daemon never answered."""
        return self._transfers.quarantined

    # ---- write-through -----------------------------------------------------------------------------------------
    def _write_through(self, owner: str, key: RadixKey, node: TreeNode) -> None:
        """Every finished turn is copied down at once, so that a spill only has to free."""
        if self.client is None or not self.client.healthy:
            return
        self._storing[owner] += 1

        def done(_: Any, error: BaseException | None) -> None:
            self._storing[owner] -= 1
            if not self._storing[owner]:
                del self._storing[owner]
            if error is not None:
                log.warning("write-through of %s failed: %r", owner, error)

        self.tasks.start(self._transfers.store(key), done)

    def _settled(self, owner: str) -> Operation:
        while self._storing[owner] > 0:
            yield Sleep(POLL_S, self._clock)

    # ---- verbs -------------------------------------------------------------------------------------------------
    def spill(self, owner: str, sequences: Sequence[Branch], to: str) -> Operation:
        """Copy down, verify, then free the device pages that only this session owns; to storage: its host chunks, too."""
        yield from self._settled(owner)
        keys = [self.cache.key(s.tokens, s.salt) for s in sequences]
        on_device, unstored = [], 0
        for key in keys:
            count, stored = yield from self._transfers.store(key, to_storage=to == "storage")
            rest = count - stored
            if rest >= self._transfers.daemon().chunk_tokens:
                raise OffloadError(f"only {stored} of {count} tokens are on {to}; nothing was freed")
            on_device.append(count)
            unstored += rest
        self.unpin(owner)
        shared = [self.cache.shared_prefix_tokens(owner, key) for key in keys]
        freed, kept = self.cache.release(owner)
        host = left = 0
        if to == "storage":
            host, left = yield from self._free_host(sequences, keys, shared, on_device)
        reason = "; ".join(filter(None, [
            f"{unstored} tokens beyond the last whole chunk were not stored" if unstored else "",
            f"{left} tokens stay on the host, storage does not have them" if left else ""]))
        source = {tier: n for tier, n in (("device", freed), ("host", host)) if n}
        return {"source": source, "target": to, "tokens": freed + host, "kept": kept, "reason": reason}

    def demote(self, owner: str, sequences: Sequence[Branch]) -> Operation:
        """Free the host chunks of a session that storage holds as well."""
        yield from self._settled(owner)
        keys = [self.cache.key(s.tokens, s.salt) for s in sequences]
        shared = [self.cache.shared_prefix_tokens(owner, key) for key in keys]
        host, left = yield from self._free_host(sequences, keys, shared, [0] * len(keys))
        return {"source": {"host": host} if host else {}, "target": "storage", "tokens": host,
                "reason": f"{left} tokens stay on the host, storage does not have them" if left else ""}

    def _free_host(self, sequences: Sequence[Branch], keys: Sequence[RadixKey], shared: Sequence[int],
                   on_device: Sequence[int]) -> Operation:
        """(host tokens freed that were not on the device as well, host tokens that stay: they are nowhere else)"""
        freed = left = 0
        for sequence, key, shared_tokens, above in zip(sequences, keys, shared, on_device, strict=True):
            client = self._transfers.daemon()
            tokens = list(key.token_ids)
            where = yield client.where(tokens, sequence.salt)
            first = max(shared_tokens, sequence.private_from) // client.chunk_tokens     # a chunk is its last token's
            doomed = [i for i in range(first, len(where)) if where[i] == "b"]
            left += where[first:].count("h") * client.chunk_tokens
            if doomed:
                answer = yield client.delete(tokens, sequence.salt, doomed, ["host"])
                left += answer["locked"] * client.chunk_tokens
                freed += sum(i * client.chunk_tokens >= above for i in doomed) * client.chunk_tokens
        return freed, left

    def drop(self, owner: str, sequences: Sequence[Branch]) -> Operation:
        """Forget the session's KV on every tier; what others share stays."""
        yield from self._settled(owner)
        self.unpin(owner)
        keys = [self.cache.key(s.tokens, s.salt) for s in sequences]
        on_device = [self.cache.match(key)[0].numel() for key in keys]
        shared = [self.cache.shared_prefix_tokens(owner, key) for key in keys]
        freed, kept = self.cache.release(owner)
        source = Counter({"device": freed})          # a token that was on several tiers counts once, as of the uppermost
        if self.client is not None:
            for sequence, key, shared_tokens, above in zip(sequences, keys, shared, on_device, strict=True):
                client = self._transfers.daemon()
                tokens = list(key.token_ids)
                where = yield client.where(tokens, sequence.salt)
                first = max(shared_tokens, sequence.private_from) // client.chunk_tokens     # a chunk is its last token's
                doomed = [i for i in range(first, len(where)) if where[i] != "-"]
                yield client.delete(tokens, sequence.salt, doomed, ["host", "storage"])
                for i in doomed:
                    if i * client.chunk_tokens >= above:
                        source["storage" if where[i] == "s" else "host"] += client.chunk_tokens
        source = {tier: n for tier, n in source.items() if n}
        return {"source": source, "target": None, "tokens": sum(source.values()), "kept": kept}

    def restore(self, owner: str, sequences: Sequence[Branch]) -> Operation:
        """Bring back what is below of each sequence's longest stored prefix. Loads nothing that is on the device."""
        yield from self._settled(owner)
        source, reasons = Counter(), []
        for sequence in sequences:
            loaded, reason = yield from self._restore(owner, sequence)
            source.update(loaded)
            reasons += [reason] if reason and reason not in reasons else []
        return {"source": dict(source), "target": "device", "tokens": sum(source.values()), "reason": "; ".join(reasons)}

    def _restore(self, owner: str, sequence: Branch) -> Operation:
        """(tokens by tier, why there are not more)"""
        key = self.cache.key(sequence.tokens, sequence.salt)
        slots, node = self.cache.match(key)
        have, loaded, reason = slots.numel(), {}, ""
        release = self._transfers.locked(node)       # what is on the device stays there while the rest is loaded
        try:
            client = self.client
            end = len(key) // client.chunk_tokens * client.chunk_tokens if client is not None else 0
            if client is not None and end > have and client.healthy:
                tokens = list(key.token_ids)
                where = yield client.where(tokens[:end], sequence.salt)
                if leading(where, "hsb") * client.chunk_tokens > have:
                    loaded, reason = yield from self._transfers.load(key, tokens, where, slots)
            elif end > have:
                reason = "the LMCache daemon does not answer"
            reached = have + sum(loaded.values())
            if reached:
                self.cache.tag(owner, self.cache.match(key[:reached])[1])
        finally:
            release()
        return loaded, reason

    def pin(self, owner: str, sequences: Sequence[Branch], until: float) -> Operation:
        """Keep what is on the device until `until` (unix seconds); in the past: let go."""
        self.unpin(owner)
        nodes = [self.cache.match(self.cache.key(s.tokens, s.salt)) for s in sequences]
        pinned = max((slots.numel() for slots, _ in nodes), default=0)
        if until > time.time() and pinned:
            for _, node in nodes:
                self.cache.inc_lock_ref(node)
            self._pins[owner] = (until, [node for _, node in nodes])
        return {"source": {"device": pinned} if pinned else {}, "target": "device", "tokens": pinned}
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
