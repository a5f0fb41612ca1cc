"""PURE. Whose pages go first: the least recently used, and with equal times the smaller owner id, so that a plan is repeatable."""

from collections.abc import Iterable

from .ledger import Entry


def coldest_first(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.last_used_s, entry.owner))
