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
Clock = Callable[[], float]
"""Monotonic seconds."""


class Sleep:
    """A future that is done after some seconds."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._until, self._clock = clock() + seconds, clock

    def query(self) -> bool:
        return self._clock() >= self._until

    def result(self, timeout: float | None = None) -> None:
        """Nothing to return."""


class Task:
    """One operation under way. `done(result, error)` is called exactly once, in the scheduler thread."""

    def __init__(self, operation: Operation, done: Callable[[Any, BaseException | None], None], timeout_s: float, clock: Clock) -> None:
        self._operation, self._done, self._timeout_s, self._clock = operation, done, timeout_s, clock
        self._future: Future | None = None
        self._deadline = 0.0

    def poll(self) -> bool:
        """Go on as far as possible without waiting. True when it is over."""
        while True:
            try:
                if self._future is None:
                    self._future = next(self._operation)
                elif not self._answered(self._future):
                    return False
                self._deadline = self._clock() + self._timeout_s
            except StopIteration as end:
                self._done(end.value, None)
                return True
            except Exception as error:  # noqa: BLE001
                # The operation has cleaned up after itself (finally); whoever asked is told.
                self._done(None, error)
                return True

    def _answered(self, future: Future) -> bool:
        """Hand the operation what came of the future, if anything did; an error belongs to the operation, too."""
        try:
            if future.query():
                value = future.result(timeout=0)
            elif self._clock() > self._deadline:
                raise TimeoutError(f"no answer within {self._timeout_s:g} s")
            else:
                return False
        except Exception as error:  # noqa: BLE001
            self._future = self._operation.throw(error)
        else:
            self._future = self._operation.send(value)
        return True


class Runner:
    """The tasks of one scheduler."""

    def __init__(self, timeout_s: float, clock: Clock = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._tasks: list[Task] = []
        self.polls = 0

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def start(self, operation: Operation, done: Callable[[Any, BaseException | None], None]) -> None:
        task = Task(operation, done, self._timeout_s, self._clock)
        if not task.poll():
            self._tasks.append(task)

    def poll(self) -> None:
        """Once per scheduler step."""
        self.polls += 1
        if self._tasks:
            # A poll may start further tasks: they are appended to the list that is kept.
            tasks, self._tasks = self._tasks, []
            self._tasks = [task for task in tasks if not task.poll()] + self._tasks
