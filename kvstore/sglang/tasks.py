"""Long operations in the scheduler thread without holding it up: generators that yield futures, polled once per step.

A future has query() -> bool and result(timeout). Only the scheduler thread runs the generators, so they may touch the
tree and the allocator; only futures wait.
"""

import logging
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

log = logging.getLogger("rekindle.tasks")


class Future(Protocol):
    def query(self) -> bool: ...
    def result(self, timeout: float | None = None) -> Any: ...


Operation = Generator[Future, Any, Any]


class Sleep:
    """A future that is done after some seconds."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def query(self) -> bool:
        return time.monotonic() >= self._until

    def result(self, timeout: float | None = None) -> None:
        """Nothing to return."""


class Task:
    """One operation under way. `done(result, error)` is called exactly once, in the scheduler thread."""

    def __init__(self, operation: Operation, done: Callable[[Any, BaseException | None], None], timeout_s: float) -> None:
        self._operation, self._done, self._timeout_s = operation, done, timeout_s
        self._future: Future | None = None
        self._deadline = 0.0
        self.longest_s = 0.0
        """The most scheduler time that one poll took."""

    def poll(self) -> bool:
        """Go on as far as possible without waiting. True when it is over."""
        began = time.monotonic()
        over = self._advance()
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        return over

    def _advance(self) -> bool:
        while True:
            try:
                if self._future is None:
                    self._future = next(self._operation)
                elif self._future.query():
                    self._future = self._resume(self._future)
                elif time.monotonic() > self._deadline:
                    self._future = self._operation.throw(TimeoutError(f"no answer within {self._timeout_s:g} s"))
                else:
                    return False
                self._deadline = time.monotonic() + self._timeout_s
            except StopIteration as end:
                self._done(end.value, None)
                return True
            except Exception as error:  # noqa: BLE001
                # The operation has cleaned up after itself (finally); whoever asked is told.
                self._done(None, error)
                return True

    def _resume(self, future: Future) -> Future:
        try:
            value = future.result(timeout=0)
        except Exception as error:  # noqa: BLE001  it belongs to the operation
            return self._operation.throw(error)
        return self._operation.send(value)


class Runner:
    """The tasks of one scheduler."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tasks: list[Task] = []
        self.polls = 0

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def start(self, operation: Operation, done: Callable[[Any, BaseException | None], None]) -> None:
        task = Task(operation, done, self._timeout_s)
        if not task.poll():
            self._tasks.append(task)

    def poll(self) -> None:
        """Once per scheduler step."""
        self.polls += 1
        if self._tasks:
            # A poll may start further tasks: they are appended to the list that is kept.
            tasks, self._tasks = self._tasks, []
            self._tasks = [task for task in tasks if not task.poll()] + self._tasks
