"""PURE. What every owner has on which tier, and what is going on with it: the residency record.

Figures come from three sides: the engine's device figures (`apply_device`, the truth about the device), a report about
one owner's contents (`apply_report`, the truth about host and storage), and receipts (`apply_receipt`, an estimate that
holds until the next of those). All counts are tokens of whole pages.

Results can be late: an owner was forgotten, its KV dropped, or the engine restarted while a verb ran. Every incarnation
of an owner has a `generation`, unique in this ledger; a receipt of another generation changes nothing and is counted.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from .geometry import Tier
from .receipt import KvVerb, Outcome, Receipt


class Residency(StrEnum):
    EMPTY = "empty"
    """No KV yet."""
    HOT = "hot"
    """All of it is on the device."""
    WARM = "warm"
    """The rest is on the host."""
    COLD = "cold"
    """The rest, or a part of it, is only on storage."""
    RESTORING = "restoring"
    LOST = "lost"
    """Some must be recomputed."""


class IllegalStep(Exception):
    """A turn or verb was begun or ended where the owner's state has no such step; nothing was changed."""


class DeviceFigures(Protocol):
    """One owner's device pages, as an engine reports them."""

    @property
    def session_id(self) -> str: ...
    @property
    def device_tokens(self) -> int: ...
    @property
    def device_exclusive_tokens(self) -> int: ...
    @property
    def locked_tokens(self) -> int: ...


@dataclass(slots=True)
class Entry:
    owner: str
    generation: int
    total_tokens: int = 0
    """KV of the owner's whole content."""
    reachable_tokens: int = 0
    """Of total_tokens: those that some tier has."""
    device_tokens: int = 0
    device_exclusive_tokens: int = 0
    locked_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    last_used_s: float = 0.0
    pinned_until_s: float | None = None
    turns: int = 0
    """Running now; more than one only on different branches."""
    verb: KvVerb | None = None
    """In flight."""
    forgotten: bool = False
    """Only here until what still runs has ended."""

    @property
    def busy(self) -> bool:
        return self.turns > 0

    @property
    def state(self) -> Residency:
        if self.verb in (KvVerb.RESTORE, KvVerb.PREFETCH):
            return Residency.RESTORING
        if self.total_tokens == 0:
            return Residency.EMPTY
        if self.device_tokens >= self.total_tokens:
            return Residency.HOT
        if self.reachable_tokens < self.total_tokens:
            return Residency.LOST
        # Each tier's figure counts a prefix that it has by itself, so two tiers together reach as far as the longer one.
        return Residency.WARM if max(self.device_tokens, self.host_tokens) >= self.total_tokens else Residency.COLD


class Ledger:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._device_epoch = -1
        self._generations = 0
        self.late_results = 0
        """Receipts dropped because their owner's incarnation is over."""

    # ---- reading -----------------------------------------------------------------------------------------------
    def __contains__(self, owner: str) -> bool:
        return owner in self._entries

    def owners(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    def entry(self, owner: str) -> Entry:
        """The owner's entry, begun empty where there was none."""
        if owner not in self._entries:
            self._entries[owner] = Entry(owner, self._next_generation())
        return self._entries[owner]

    def state(self, owner: str) -> Residency:
        return self._entries[owner].state if owner in self._entries else Residency.EMPTY

    def totals(self) -> dict[Tier, int]:
        """Tokens by tier, shared pages counted once per owner."""
        entries = self._entries.values()
        return {Tier.DEVICE: sum(e.device_tokens for e in entries), Tier.HOST: sum(e.host_tokens for e in entries),
                Tier.STORAGE: sum(e.storage_tokens for e in entries)}

    def pinned_tokens(self, now_s: float, besides: str) -> int:
        """Device tokens that pins of other owners hold; the prefix that they share is counted once."""
        pinned = [e for e in self._entries.values()
                  if e.owner != besides and e.pinned_until_s is not None and e.pinned_until_s > now_s]
        return (sum(e.device_exclusive_tokens for e in pinned)
                + max((e.device_tokens - e.device_exclusive_tokens for e in pinned), default=0))

    def by_state(self) -> dict[Residency, int]:
        counts = Counter(entry.state for entry in self._entries.values())
        return {state: counts[state] for state in Residency}

    # ---- figures -----------------------------------------------------------------------------------------------
    def apply_device(self, epoch: int, figures: Iterable[DeviceFigures]) -> bool:
        """Lay the full list of device figures over the entries; who is not in it has nothing on the device.

        False, and no change, where a newer epoch is already here.
        """
        if epoch <= self._device_epoch:
            return False
        self._device_epoch = epoch
        by_owner = {f.session_id: f for f in figures}
        for owner in by_owner.keys() | self._entries.keys():
            entry, given = self.entry(owner), by_owner.get(owner)
            entry.device_tokens = given.device_tokens if given else 0
            entry.device_exclusive_tokens = given.device_exclusive_tokens if given else 0
            entry.locked_tokens = given.locked_tokens if given else 0
        return True

    def reset_device(self) -> None:
        """A new engine begins: the device is empty, epochs start again, and what the old one still says is late."""
        self._device_epoch = -1
        for entry in self._entries.values():
            entry.device_tokens = entry.device_exclusive_tokens = entry.locked_tokens = 0
            entry.reachable_tokens = min(entry.reachable_tokens, max(entry.host_tokens, entry.storage_tokens))
            entry.pinned_until_s = None
            entry.generation = self._next_generation()

    def apply_report(self, owner: str, *, device_tokens: int, device_exclusive_tokens: int, host_tokens: int,
                     storage_tokens: int, total_tokens: int, reachable_tokens: int) -> None:
        """What was found for the owner's whole contents, asked on every tier."""
        entry = self.entry(owner)
        entry.forgotten = False
        entry.device_tokens, entry.device_exclusive_tokens = device_tokens, device_exclusive_tokens
        entry.host_tokens, entry.storage_tokens = host_tokens, storage_tokens
        entry.total_tokens, entry.reachable_tokens = total_tokens, reachable_tokens

    def apply_receipt(self, receipt: Receipt, generation: int) -> bool:
        """Estimate the owner's figures from what a verb did. `generation`: the entry's, when the verb began.

        False, and no change, for a late one.
        """
        entry = self._entries.get(receipt.session_id)
        if entry is None or entry.generation != generation:
            self.late_results += 1
            return False
        if receipt.outcome in (Outcome.DONE, Outcome.PARTIAL):
            self._move(entry, receipt)
        return True

    def _move(self, entry: Entry, receipt: Receipt) -> None:
        left = {Tier(tier): tokens for tier, tokens in receipt.source.items()}
        known = max(entry.total_tokens, entry.device_tokens, entry.host_tokens, entry.storage_tokens)
        match receipt.verb:
            case KvVerb.SPILL | KvVerb.DEMOTE:
                upper = entry.device_tokens if receipt.verb is KvVerb.SPILL else entry.host_tokens
                moved_device = left.get(Tier.DEVICE, 0)
                if receipt.target == Tier.HOST:
                    entry.host_tokens = max(entry.host_tokens, upper)
                else:
                    entry.storage_tokens = max(entry.storage_tokens, upper, entry.host_tokens)
                    # A page freed on the device had its host copy freed as well, so every moved token counts here.
                    entry.host_tokens = max(0, entry.host_tokens - receipt.tokens)
                # What stayed because others share it is theirs now.
                entry.device_tokens = max(0, entry.device_tokens - moved_device - receipt.shared_kept_tokens)
                entry.device_exclusive_tokens = max(0, entry.device_exclusive_tokens - moved_device)
            case KvVerb.RESTORE | KvVerb.PREFETCH:
                before = entry.device_tokens
                entry.device_tokens = min(known, before + receipt.tokens)
                entry.device_exclusive_tokens += entry.device_tokens - before
            case KvVerb.DROP:
                entry.device_tokens = entry.device_exclusive_tokens = entry.locked_tokens = 0
                entry.host_tokens = entry.storage_tokens = entry.reachable_tokens = 0
                entry.pinned_until_s = None
                entry.generation = self._next_generation()
            case KvVerb.PIN:
                pass

    # ---- what is going on --------------------------------------------------------------------------------------
    def touch(self, owner: str, now_s: float) -> None:
        self.entry(owner).last_used_s = now_s

    def pin(self, owner: str, until_s: float | None) -> None:
        self.entry(owner).pinned_until_s = until_s

    def begin_turn(self, owner: str) -> None:
        """Raises IllegalStep while a verb is in flight."""
        entry = self.entry(owner)
        if entry.verb is not None:
            raise IllegalStep(f"{owner}: a turn cannot begin during {entry.verb}")
        entry.turns += 1
        entry.forgotten = False

    def end_turn(self, owner: str) -> None:
        """Raises IllegalStep where none runs."""
        entry = self._entries.get(owner)
        if entry is None or not entry.turns:
            raise IllegalStep(f"{owner}: no turn is running")
        entry.turns -= 1
        self._remove_if_over(entry)

    def begin_verb(self, owner: str, verb: KvVerb) -> int:
        """Returns the generation to hand to apply_receipt. Raises IllegalStep while a turn or another verb runs."""
        entry = self.entry(owner)
        if entry.busy or entry.verb is not None:
            raise IllegalStep(f"{owner}: {verb} cannot begin during {entry.verb or 'a turn'}")
        entry.verb = verb
        entry.forgotten = False
        return entry.generation

    def end_verb(self, owner: str) -> None:
        """Raises IllegalStep where none is in flight."""
        entry = self._entries.get(owner)
        if entry is None or entry.verb is None:
            raise IllegalStep(f"{owner}: no verb is in flight")
        entry.verb = None
        self._remove_if_over(entry)

    def forget(self, owner: str) -> None:
        """The owner is gone. What still runs for it keeps its place until it ends, and its result will be late."""
        entry = self._entries.pop(owner, None)
        if entry is not None and (entry.busy or entry.verb is not None):
            self._entries[owner] = Entry(owner, self._next_generation(), turns=entry.turns, verb=entry.verb, forgotten=True)

    def _remove_if_over(self, entry: Entry) -> None:
        if entry.forgotten and not entry.busy and entry.verb is None:
            del self._entries[entry.owner]

    def _next_generation(self) -> int:
        self._generations += 1
        return self._generations
