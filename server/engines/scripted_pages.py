"""The pages of the scripted engine: three tiers with a real prefix rule, and no bytes behind them.

A page's key chains the salt, every token before its end and the images it covers, so two sessions share a page exactly if
their contents agree up to there. Sessions own pages; a page goes when its last owner does. Counts are pages inside, and
tokens in figures and receipts.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.geometry import Geometry, Tier

from .channel import Content, Pressure, SessionPages

Key = bytes


@dataclass(slots=True)
class Page:
    depth: int
    used: int
    """When it was last used, as a count of uses."""
    owners: set[str] = field(default_factory=set)
    locks: list[str] = field(default_factory=list)
    """One session id for each running turn that reads it."""


@dataclass(slots=True)
class Moved:
    """What a verb did. `source`: pages by the uppermost tier they left, or by the tier they came from."""

    source: dict[Tier, int] = field(default_factory=dict)
    shared_kept: int = 0
    missing: int = 0
    """Pages that were asked for and could not be had."""
    keys: set[Key] = field(default_factory=set)

    @property
    def pages(self) -> int:
        return sum(self.source.values())

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"".join(sorted(self.keys))).hexdigest()[:16] if self.keys else ""

    def add(self, tier: Tier, key: Key) -> None:
        """A page counts once, where it was first met."""
        if key not in self.keys:
            self.keys.add(key)
            self.source[tier] = self.source.get(tier, 0) + 1

    def merge(self, other: "Moved") -> None:
        for tier, pages in other.source.items():
            self.source[tier] = self.source.get(tier, 0) + pages
        self.missing += other.missing
        self.keys |= other.keys


class Pages:
    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.total = geometry.device_tokens // geometry.page_tokens
        self.in_flight = 0
        self.device: dict[Key, Page] = {}
        self.lower: dict[Tier, dict[Key, set[str]]] = {Tier.HOST: {}, Tier.STORAGE: {}}
        self.pinned_until_s: dict[str, float] = {}
        self._uses = itertools.count(1)

    @property
    def free(self) -> int:
        return self.total - len(self.device) - self.in_flight

    def keys(self, content: Content) -> list[Key]:
        """Of the pages that can be kept of this sequence, first to last."""
        size, out, last = self.geometry.page_tokens, [], hashlib.sha256(content.salt.encode()).digest()
        for start in range(0, self.geometry.kept_tokens(len(content.token_ids)), size):
            covered = [(i.digest, i.start - start) for i in content.images if i.start < start + size and start < i.start + i.tokens]
            last = hashlib.sha256(last + repr((content.token_ids[start : start + size], covered)).encode()).digest()
            out.append(last)
        return out

    def found(self, keys: Sequence[Key]) -> list[Tier]:
        """The uppermost tier of each page of the longest prefix that some tier has."""
        tiers: list[Tier] = []
        for key in keys:
            tier = Tier.DEVICE if key in self.device else next((t for t in self.lower if key in self.lower[t]), None)
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    # ---- turns -------------------------------------------------------------------------------------------------
    def lock(self, session: str, keys: Iterable[Key]) -> None:
        used = next(self._uses)
        for key in keys:
            page = self.device[key]
            page.used = used
            page.owners.add(session)
            page.locks.append(session)

    def unlock(self, session: str, keys: Iterable[Key]) -> None:
        for key in keys:
            self.device[key].locks.remove(session)

    def reserve(self, pages: int, now_s: float) -> bool:
        """Set pages aside for a running turn, evicting old ones where it must. False: not enough, nothing changed."""
        if not self._make_room(pages, now_s):
            return False
        self.in_flight += pages
        return True

    def insert(self, session: str, keys: Sequence[Key]) -> None:
        """Keep a finished sequence on the device, written through to the host. What has no room is left out."""
        used = next(self._uses)
        for depth, key in enumerate(keys):
            if key not in self.device:
                if self.free < 1:
                    break
                self.device[key] = Page(depth, used)
            self.device[key].used = used
            self.device[key].owners.add(session)
            self.lower[Tier.HOST].setdefault(key, set()).add(session)

    def _make_room(self, pages: int, now_s: float) -> bool:
        pinned = {session for session, until in self.pinned_until_s.items() if until > now_s}
        victims = sorted((p.used, -p.depth, key) for key, p in self.device.items() if not p.locks and not p.owners & pinned)
        short = pages - self.free
        if short > len(victims):
            return False
        for _, _, key in victims[: max(0, short)]:
            del self.device[key]
        return True

    # ---- verbs -------------------------------------------------------------------------------------------------
    def load(self, session: str, keys: Sequence[Key], now_s: float) -> Moved:
        """Bring the prefix `keys` to the device from wherever it is."""
        tiers = self.found(keys)
        held = [key for key, tier in zip(keys, tiers, strict=False) if tier is Tier.DEVICE]
        wanted = [(depth, key, tier) for depth, (key, tier) in enumerate(zip(keys, tiers, strict=False)) if tier is not Tier.DEVICE]
        moved = Moved(missing=len(keys) - len(tiers))
        self.lock(session, held)                                          # so that making room spares them
        if not self._make_room(len(wanted), now_s):
            moved.missing += len(wanted)
            wanted = []
        used = next(self._uses)
        for depth, key, tier in wanted:
            self.device[key] = Page(depth, used, {session})
            self.lower[Tier.HOST].setdefault(key, set()).add(session)     # what comes from storage stays in memory too
            moved.add(tier, key)
        self.unlock(session, held)
        return moved

    def spill(self, session: str, to: Tier) -> Moved:
        """Free the session's own pages above `to`, after copying them there."""
        moved = Moved()
        for key, page in [(key, page) for key, page in self.device.items() if session in page.owners]:
            if page.owners != {session} or page.locks:
                moved.shared_kept += 1
                continue
            del self.device[key]
            self.lower[to].setdefault(key, set()).add(session)
            moved.add(Tier.DEVICE, key)
        if to is Tier.STORAGE:
            for key in self.demote(session, spare=self.device.keys()).keys:
                moved.add(Tier.HOST, key)
        return moved

    def demote(self, session: str, spare: Iterable[Key] = ()) -> Moved:
        """Free the session's own host pages, after copying them to storage; not those in `spare`."""
        moved, kept, host = Moved(), set(spare), self.lower[Tier.HOST]
        for key in [key for key, owners in host.items() if session in owners and key not in kept]:
            self.lower[Tier.STORAGE].setdefault(key, set()).add(session)
            if host[key] == {session}:
                del host[key]
                moved.add(Tier.HOST, key)
            else:
                moved.shared_kept += 1
        return moved

    def drop(self, session: str) -> Moved:
        """Take the session off every page on every tier; a page that nobody owns any more goes."""
        moved, shared = Moved(), set[Key]()
        for tier in Tier:
            holders = {key: page.owners for key, page in self.device.items()} if tier is Tier.DEVICE else self.lower[tier]
            for key in [key for key, owners in holders.items() if session in owners]:
                holders[key].discard(session)
                if holders[key]:
                    shared.add(key)
                else:
                    del (self.device if tier is Tier.DEVICE else holders)[key]
                    moved.add(tier, key)
        moved.shared_kept = len(shared)
        self.pinned_until_s.pop(session, None)
        return moved

    def pin(self, session: str, until_s: float) -> Moved:
        """Spare the session's pages when room is made, up to that time."""
        moved = Moved()
        for key, page in self.device.items():
            if session in page.owners:
                moved.add(Tier.DEVICE, key)
        if moved.pages:
            self.pinned_until_s[session] = until_s
        return moved

    # ---- figures -----------------------------------------------------------------------------------------------
    def sessions(self) -> tuple[SessionPages, ...]:
        """Device figures of every session that has pages there."""
        return tuple(self.session(owner) for owner in sorted(set().union(*(p.owners for p in self.device.values()))))

    def session(self, session: str, contents: Sequence[Content] | None = None) -> SessionPages:
        mine = [page for page in self.device.values() if session in page.owners]
        size = self.geometry.page_tokens
        device = {"device_tokens": len(mine) * size,
                  "device_exclusive_tokens": sum(page.owners == {session} for page in mine) * size,
                  "locked_tokens": sum(session in page.locks for page in mine) * size}
        if contents is None:
            return SessionPages(session_id=session, **device)
        sequences = [self.keys(content) for content in contents]
        total = set(itertools.chain.from_iterable(sequences))
        reachable = set(itertools.chain.from_iterable(keys[: len(self.found(keys))] for keys in sequences))
        return SessionPages(session_id=session, **device, total_tokens=len(total) * size, reachable_tokens=len(reachable) * size,
                            host_tokens=len(total & self.lower[Tier.HOST].keys()) * size,
                            storage_tokens=len(total & self.lower[Tier.STORAGE].keys()) * size)

    def pressure(self, daemon_healthy: bool) -> Pressure:
        size = self.geometry.page_tokens * self.geometry.token_bytes
        return Pressure(free_pages=self.free, used_pages=len(self.device), in_flight_pages=self.in_flight, total_pages=self.total,
                        daemon_healthy=daemon_healthy, host_bytes=len(self.lower[Tier.HOST]) * size,
                        storage_bytes=len(self.lower[Tier.STORAGE]) * size)

