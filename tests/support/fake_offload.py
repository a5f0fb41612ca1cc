"""A daemon in which every answer waits until the test gives it: OffloadClient's interface over dictionaries.

KV is a number per slot, a function of salt and all tokens up to it, so that a page that was copied to the wrong place, too
early or too late is seen as what it is.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Chunk = tuple[str, tuple[int, ...]]
"""(salt, all tokens from the first to the chunk's last)"""


def kv(salt: str, tokens: Sequence[int]) -> list[int]:
    """What the model would compute for each token."""
    out, state = [], hash(salt)
    for token in tokens:
        state = hash((state, token)) % 1_000_003 + 1
        out.append(state)
    return out


class Promise:
    """A future that the test answers. `answer` does the daemon's work at that moment, not before."""

    def __init__(self, kind: str, work: Callable[[], Any], slots: Sequence[int] = ()) -> None:
        self.kind, self._work, self.slots = kind, work, frozenset(slots)
        self._done = False
        self._value: Any = None

    def answer(self) -> None:
        self._value, self._done = self._work(), True

    def query(self) -> bool:
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        assert self._done, "asked before it was done"
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


@dataclass
class Lookup:
    chunks: list[Chunk]
    locked: list[Chunk] | None = None
    """None while it is loading."""
    asked: bool = False


@dataclass
class FakeOffload:
    page: int
    chunk_tokens: int
    memory: dict[int, int]
    """The device: slot -> KV."""
    healthy: bool = True
    incarnation: str = "1"
    failing: bool = False
    """Transfers are refused."""
    full: bool = False
    """As LMCache does with a full host tier: a store succeeds and keeps nothing."""
    fingerprint: str = "f"
    host_bytes: int = 0
    host: dict[Chunk, list[int]] = field(default_factory=dict)
    storage: dict[Chunk, list[int]] = field(default_factory=dict)
    locks: Counter[Chunk] = field(default_factory=Counter)
    lookups: dict[str, Lookup] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    """Request ids that the daemon has heard of and that were not ended."""
    ttl: set[str] = field(default_factory=set)
    """Request ids whose locks were given back unused: they may stay open."""
    unanswered: list[Promise] = field(default_factory=list)
    abandoned: list[Promise] = field(default_factory=list)
    """Of a daemon that died: it will never touch these pages again."""

    def suspect(self, why: object) -> None:
        self.healthy = False

    def die(self) -> None:
        """Host memory is gone; what was not answered never will be."""
        self.healthy = False
        self.abandoned += self.unanswered
        self.unanswered, self.host, self.lookups = [], {}, {}
        self.locks.clear()
        self.open.clear()

    def come_back(self) -> None:
        self.incarnation = str(int(self.incarnation) + 1)
        self.healthy = True

    def write_down(self) -> None:
        """What is on the host reaches storage."""
        self.storage |= self.host

    def lose_from_host(self, index: int) -> None:
        """LRU in the daemon: what is being read stays."""
        free = [chunk for chunk in self.host if not self.locks[chunk]]
        if free:
            del self.host[free[index % len(free)]]

    # ---- OffloadClient -----------------------------------------------------------------------------------------
    def _promise(self, kind: str, work: Callable[[], Any], slots: Sequence[int] = ()) -> Promise:
        promise = Promise(kind, work, slots)
        self.unanswered.append(promise)
        return promise

    def chunks(self, tokens: Sequence[int], salt: str) -> list[Chunk]:
        n = self.chunk_tokens
        return [(salt, tuple(tokens[:end])) for end in range(n, len(tokens) + 1, n)]

    def letters(self, tokens: Sequence[int], salt: str) -> str:
        return "".join("-hsb"[(c in self.host) + 2 * (c in self.storage)] for c in self.chunks(tokens, salt))

    def where(self, tokens: Sequence[int], salt: str) -> Promise:
        return self._promise("where", lambda: self.letters(tokens, salt))

    def delete(self, tokens: Sequence[int], salt: str, chunks: Sequence[int], tiers: Sequence[str]) -> Promise:
        def work() -> dict[str, int]:
            doomed, locked = [self.chunks(tokens, salt)[i] for i in chunks], 0
            for chunk in doomed:
                if "host" in tiers and self.locks[chunk]:
                    locked += 1
                elif "host" in tiers:
                    self.host.pop(chunk, None)
                if "storage" in tiers:
                    self.storage.pop(chunk, None)
            return {"host": len(doomed) - locked, "storage": len(doomed), "locked": locked}

        return self._promise("delete", work)

    def lookup(self, tokens: Sequence[int], end: int, request_id: str, salt: str) -> Promise:
        def work() -> None:
            self.open.add(request_id)
            self.lookups[request_id] = Lookup(self.chunks(tokens[:end], salt))

        return self._promise("lookup", work)

    def loaded(self, request_id: str) -> Promise:
        """The first question finds it loading, the second loads what storage has and locks the prefix that is there."""
        def work() -> int | None:
            job = self.lookups.get(request_id)
            if job is None:
                return 0                             # another daemon, which has never heard of it
            if not job.asked:
                job.asked = True
                return None
            job.locked = []
            for chunk in job.chunks:
                if chunk not in self.host and chunk not in self.storage:
                    break
                self.host.setdefault(chunk, self.storage.get(chunk, []))
                self.locks[chunk] += 1
                job.locked.append(chunk)
            return len(job.locked)

        return self._promise("loaded", work)

    def unlock(self, tokens: Sequence[int], start: int, end: int, request_id: str, salt: str) -> None:
        job = self.lookups.get(request_id)
        if start < end and self.healthy and job is not None and job.locked is not None:
            self._release(self.chunks(tokens[:end], salt)[start // self.chunk_tokens:], job)
            self.ttl.add(request_id)

    def _release(self, chunks: list[Chunk], job: Lookup) -> None:
        for chunk in chunks:
            if job.locked and chunk in job.locked:
                job.locked.remove(chunk)
                self.locks[chunk] -= 1

    def retrieve(self, tokens: Sequence[int], start: int, end: int, pages: Sequence[int], skip_tokens: int, request_id: str, salt: str) -> Promise:
        slots = [page * self.page + i for page in pages for i in range(self.page)]
        assert len(slots) == end - start and start % self.chunk_tokens == end % self.chunk_tokens == 0

        def work() -> bool:
            wanted, job = self.chunks(tokens[:end], salt)[start // self.chunk_tokens:], self.lookups.get(request_id)
            there = all(chunk in self.host and self.locks[chunk] for chunk in wanted) and not self.failing
            if there:
                values = [value for chunk in wanted for value in self.host[chunk]]
                for slot, value in list(zip(slots, values, strict=True))[skip_tokens:]:
                    self.memory[slot] = value
            if job is not None:
                self._release(wanted, job)
            return there

        return self._promise("retrieve", work, slots[skip_tokens:])

    def store(self, tokens: Sequence[int], start: int, end: int, pages: Sequence[int], request_id: str, salt: str) -> Promise:
        slots = [page * self.page + i for page in pages for i in range(self.page)]
        assert len(slots) == end - start and start % self.chunk_tokens == end % self.chunk_tokens == 0

        def work() -> bool:
            self.open.add(request_id)
            if self.failing:
                return False
            expected = kv(salt, tokens[:end])
            for i, chunk in enumerate(self.chunks(tokens[:end], salt)[start // self.chunk_tokens:]):
                begin = i * self.chunk_tokens
                values = [self.memory[slot] for slot in slots[begin:begin + self.chunk_tokens]]
                assert values == expected[start + begin:start + begin + self.chunk_tokens], "stored what was not its KV"
                if not self.full:
                    self.host.setdefault(chunk, values)
            return True

        return self._promise("store", work, slots)

    def end(self, request_id: str) -> None:
        if self.healthy:
            self.open.discard(request_id)
            self.lookups.pop(request_id, None)


def sequence(words: Sequence[int]) -> array:
    """Tokens of some words, three each, so that words and pages do not line up."""
    return array("q", [word * 10 + i for word in words for i in range(3)])
