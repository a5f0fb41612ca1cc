"""Operations as generators: polled, never waited for, and told exactly once how they end."""

from collections.abc import Generator
from typing import Any

import pytest

pytest.importorskip("torch")

from kvstore.sglang.tasks import Runner


class Promise:
    def __init__(self) -> None:
        self.value: Any = None
        self.done = False

    def query(self) -> bool:
        return self.done

    def result(self, timeout: float | None = None) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def set(self, value: Any) -> None:
        self.value, self.done = value, True


class Ends(list):
    def __call__(self, result: Any, error: BaseException | None) -> None:
        self.append((result, error))


def adding(*promises: Promise) -> Generator[Promise, int, int]:
    total = 0
    for promise in promises:
        total += yield promise
    return total


def test_an_operation_goes_on_only_when_its_future_is_done() -> None:
    """Polls before that change nothing; several finished futures in a row cost one poll."""
    first, second, ends, runner = Promise(), Promise(), Ends(), Runner(timeout_s=60)
    runner.start(adding(first, second), ends)
    runner.poll()
    assert runner and not ends
    first.set(2)
    second.set(3)
    runner.poll()
    assert not runner and ends == [(5, None)]


def test_one_that_never_waits_is_over_at_once() -> None:
    """An operation without a future is done when start returns."""
    ends, runner = Ends(), Runner(timeout_s=60)
    runner.start(adding(), ends)
    assert not runner and ends == [(0, None)]


def test_a_failed_future_is_raised_inside_and_cleaned_up() -> None:
    """The operation's own finally runs before its asker hears of the error, and other operations go on."""
    order: list[str] = []

    def failing(promise: Promise) -> Generator[Promise, Any, None]:
        try:
            yield promise
        finally:
            order.append("cleaned")

    def end(result: Any, error: BaseException | None) -> None:
        order.append(repr(error))

    broken, fine, ends, runner = Promise(), Promise(), Ends(), Runner(timeout_s=60)
    runner.start(failing(broken), end)
    runner.start(adding(fine), ends)
    broken.set(OSError("no daemon"))
    runner.poll()
    assert order == ["cleaned", "OSError('no daemon')"] and runner
    fine.set(1)
    runner.poll()
    assert ends == [(1, None)]


def test_silence_becomes_a_timeout_that_the_operation_may_survive() -> None:
    """A future past its time raises TimeoutError in the operation, which may go on to another."""
    second, ends, runner = Promise(), Ends(), Runner(timeout_s=0)

    def patient() -> Generator[Promise, Any, str]:
        try:
            yield Promise()
        except TimeoutError:
            return "recomputed"
        return "restored"

    runner.start(patient(), ends)
    for _ in range(10_000):
        if ends:
            break
        runner.poll()
    assert ends == [("recomputed", None)] and not second.done


def test_an_end_may_start_the_next_operation() -> None:
    """What `done` starts is kept and polled from the next step on."""
    gate, later, ends, runner = Promise(), Promise(), Ends(), Runner(timeout_s=60)
    runner.start(adding(gate), lambda result, error: runner.start(adding(later), ends))
    gate.set(1)
    runner.poll()
    assert runner and not ends
    later.set(7)
    runner.poll()
    assert ends == [(7, None)] and not runner
