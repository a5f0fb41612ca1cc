"""How much may be decoded at once, in bytes: a line with an end, so that a rush is told busy instead of filling the memory."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ImagesBusy(Exception):
    """Too many images wait to be decoded. Retryable; nothing was kept."""

    code = "images_busy"
    param: str | None = None
    retryable = True


class ByteGate:
    """Admits work while the bytes of all admitted work stay within a capacity; first come, first served.

    Work above the capacity runs alone. No more than `max_waiting` wait: one more raises ImagesBusy.
    """

    def __init__(self, capacity_bytes: int, max_waiting: int) -> None:
        self.capacity_bytes, self.max_waiting = capacity_bytes, max_waiting
        self.used_bytes = self.peak_bytes = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        size_bytes = min(size_bytes, self.capacity_bytes)
        if self._line or self.used_bytes + size_bytes > self.capacity_bytes:
            await self._wait(size_bytes)
        else:
            self._take(size_bytes)
        try:
            yield
        finally:
            self._give(size_bytes)

    async def _wait(self, size_bytes: int) -> None:
        if len(self._line) >= self.max_waiting:
            raise ImagesBusy(f"{len(self._line)} images wait to be decoded already")
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((size_bytes, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._line.remove((size_bytes, admitted))
                self._admit()                               # the next in line may fit
            else:
                self._give(size_bytes)                      # admitted and cancelled in the same moment
            raise

    def _take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _give(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._admit()

    def _admit(self) -> None:
        while self._line and self.used_bytes + self._line[0][0] <= self.capacity_bytes:
            size_bytes, admitted = self._line[0]
            if admitted.cancelled():
                return                                      # its own clean-up comes next and admits further
            self._line.popleft()
            self._take(size_bytes)
            admitted.set_result(None)
