"""PURE. Which pages should move, as data: from the ledger, the device's pressure and the time to a list of actions.

Two reasons to act. Idleness: an owner without a turn for `to_host_s` leaves the device, after `to_storage_s` the host too.
Pressure: when the share of the device pool in use reaches `high`, idle owners leave the device, least recently used first,
until `low` would be reached; between the two marks nothing happens, so that one page more or less does not make it swing.
Never touched: an owner with a running turn, a verb in flight, or a pin that has not expired.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .geometry import Tier
from .ledger import Entry
from .policy import coldest_first


@dataclass(frozen=True, slots=True)
class Pressure:
    """The device pool in pages: free + used + in_flight == total."""

    free_pages: int
    used_pages: int
    in_flight_pages: int
    total_pages: int

    @property
    def occupied(self) -> float:
        """Share of the pool that is not free."""
        return 1 - self.free_pages / self.total_pages if self.total_pages else 0.0

    def relieved(self, pages: int) -> "Pressure":
        """The same pool after so many of the used pages were freed."""
        pages = min(pages, self.used_pages)
        return replace(self, free_pages=self.free_pages + pages, used_pages=self.used_pages - pages)


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """Times are seconds since the owner's last use; None: never. `high` and `low` are shares of the device pool."""

    to_host_s: float | None
    to_storage_s: float | None
    high: float
    low: float
    page_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"the marks need 0 < low <= high <= 1, not low={self.low} and high={self.high}")
        if self.to_host_s is not None and self.to_storage_s is not None and self.to_storage_s < self.to_host_s:
            raise ValueError(f"to_storage_s={self.to_storage_s} comes before to_host_s={self.to_host_s}")


@dataclass(frozen=True, slots=True)
class SpillTo:
    owner: str
    to: Tier
    reason: str


@dataclass(frozen=True, slots=True)
class DemoteOwner:
    owner: str
    reason: str


Action = SpillTo | DemoteOwner


def plan(entries: Iterable[Entry], pressure: Pressure | None, policy: PlanPolicy, now_s: float) -> tuple[Action, ...]:
    """The actions for now, coldest owner first. Without a pressure reading only idleness counts."""
    movable = [e for e in coldest_first(entries) if is_movable(e, now_s)]
    actions: dict[str, Action] = {e.owner: action for e in movable if (action := _for_idleness(e, policy, now_s))}
    if pressure is None or pressure.occupied < policy.high:
        return tuple(actions.values())
    reason = f"{pressure.occupied:.0%} of the device pool is in use"
    for entry in movable:
        if isinstance(actions.get(entry.owner), SpillTo):
            pressure = pressure.relieved(_pages(entry, policy))
    for entry in movable:
        if pressure.occupied <= policy.low:
            break
        if _pages(entry, policy) and not isinstance(actions.get(entry.owner), SpillTo):
            actions[entry.owner] = SpillTo(entry.owner, Tier.HOST, reason)
            pressure = pressure.relieved(_pages(entry, policy))
    return tuple(actions.values())


def is_movable(entry: Entry, now_s: float) -> bool:
    return not entry.busy and entry.verb is None and not (entry.pinned_until_s is not None and entry.pinned_until_s > now_s)


def _for_idleness(entry: Entry, policy: PlanPolicy, now_s: float) -> Action | None:
    idle_s = now_s - entry.last_used_s
    if policy.to_storage_s is not None and idle_s >= policy.to_storage_s:
        reason = f"idle for {policy.to_storage_s:g} s"
        if entry.device_exclusive_tokens:
            return SpillTo(entry.owner, Tier.STORAGE, reason)
        return DemoteOwner(entry.owner, reason) if entry.host_tokens else None
    if policy.to_host_s is not None and idle_s >= policy.to_host_s and entry.device_exclusive_tokens:
        return SpillTo(entry.owner, Tier.HOST, f"idle for {policy.to_host_s:g} s")
    return None


def _pages(entry: Entry, policy: PlanPolicy) -> int:
    """Pages that a spill of the owner would free."""
    return entry.device_exclusive_tokens // policy.page_tokens
