"""PURE. Sockets that have not signed in yet: few in all, fewer from one address."""

from collections import Counter


class WaitingRoom:
    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._here: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._here.total()

    def enter(self, address: str) -> bool:
        """False: it is full, for everybody or for that address, and nobody entered."""
        if len(self) >= self._most or self._here[address] >= self._most_per_address:
            return False
        self._here[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Whoever entered leaves once, signed in or not."""
        self._here[address] -= 1
        if self._here[address] <= 0:
            del self._here[address]
