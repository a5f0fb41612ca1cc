"""SessionOps in the cases that are too rare for the random machine of stateful/test_session_ops, which lends its parts."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.sglang.tasks import Runner
from tests.stateful.test_session_ops import PAGES, TIMEOUT_S, SessionOpsMachine

PAGE_TOKENS = 4


@pytest.fixture
def machine() -> Iterator[SessionOpsMachine]:
    """Three sessions that have said something, all of it stored on the host; what must hold is checked at the end."""
    machine = SessionOpsMachine()
    machine.everybody_has_said_something()
    yield machine
    machine.every_page_is_in_one_place()
    machine.the_tree_holds_the_right_kv()
    machine.the_books_balance()
    machine.teardown()


def asked(machine: SessionOpsMachine, kind: str) -> Any:
    """The daemon's next question of that kind, not answered."""
    machine.until(kind)
    return next(promise for promise in machine.daemon.unanswered if promise.kind == kind)


def test_a_daemon_that_restarted_before_its_silence_was_noticed(machine: SessionOpsMachine) -> None:
    """Pages of a transfer that died with the old daemon come back, although the new one was there when it timed out."""
    machine.spill("c", "host", 12)
    machine.daemon.write_down()
    machine.restore("c", 0)
    asked(machine, "retrieve")
    machine.daemon.die()
    machine.daemon.come_back()
    machine.time_passes(TIMEOUT_S + 0.1)
    machine.the_daemon_is_back()
    machine.a_step()
    assert machine.ops.quarantined == 0 and not machine.ops.busy


def test_a_silent_daemon_keeps_the_pages(machine: SessionOpsMachine) -> None:
    """A retrieve that was not answered holds its pages until it is, however late, and what it writes then harms nobody."""
    machine.spill("c", "host", 12)
    machine.restore("c", 0)
    late = asked(machine, "retrieve")
    machine.time_passes(TIMEOUT_S + 0.1)
    assert machine.ops.quarantined == 1
    free = machine.pool.available_size()
    machine.time_passes(60.0)
    assert machine.ops.quarantined == 1 and machine.pool.available_size() == free
    machine.answer(late)
    machine.a_step()
    assert machine.ops.quarantined == 0 and machine.pool.available_size() == free + len(late.slots)


def test_a_store_that_was_not_answered_keeps_its_pages_locked(machine: SessionOpsMachine) -> None:
    """Nobody evicts or frees pages that the daemon may still read."""
    machine.a_turn("c", [2, 2, 2, 2], True, 0)
    late = asked(machine, "store")
    machine.time_passes(TIMEOUT_S + 0.1)
    machine.something_happens("room", PAGES * PAGE_TOKENS)
    machine.cache.release("c")
    assert not late.slots & machine.free_slots()
    machine.answer(late)
    machine.a_step()
    machine.something_happens("room", PAGES * PAGE_TOKENS)
    assert late.slots <= machine.free_slots()


def test_a_spill_to_a_full_daemon_frees_nothing(machine: SessionOpsMachine) -> None:
    """A store that succeeded and kept nothing is found out before anything is freed."""
    machine.daemon.host.clear()
    machine.daemon.storage.clear()
    machine.daemon.full = True
    told: list[str] = []
    machine.ops.tasks.start(machine.ops.spill("c", [machine.branch("c")], "host"), lambda result, error: told.append(str(error)))
    machine.go_on(12)
    machine.time_passes(11.0)
    machine.go_on(3)
    assert told == ["only 0 of 16 tokens are on host; nothing was freed"] and machine.on_device("c") == 16


def test_a_pin_does_not_outlive_a_flush(machine: SessionOpsMachine) -> None:
    """SGLang may flush while pages are pinned; unpinning afterwards touches nothing of the new tree."""
    machine.other_verb("a", "pin", 1)
    machine.something_happens("flushed", 0)
    machine.a_turn("a", [1, 1], True, 12)
    machine.other_verb("a", "unpin", 1)
    assert machine.cache.protected_size_ == 0


def test_a_restore_that_cannot_fit_takes_nobody_elses_pages(machine: SessionOpsMachine) -> None:
    """It says how much room there would be, and evicts nothing for a load that will not happen."""
    machine.spill("c", "host", 12)
    machine.daemon.write_down()
    machine.other_verb("a", "pin", 1)
    machine.a_turn_begins("b", [2] * 26, True)       # with a's pin it leaves less than c needs
    room = machine.pool.available_size() + machine.cache.evictable_size_
    assert "b" in machine.requests and room < 16
    told: list[dict[str, Any]] = []
    cached = machine.cache.evictable_size_
    machine.start("c", "restore", machine.ops.restore("c", [machine.branch("c")]), 12, told.append)
    assert told[0]["tokens"] == 0 and f"{room} tokens to spare, 16 are needed" in told[0]["reason"]
    assert machine.cache.evictable_size_ == cached


def test_two_restores_of_the_same_pages(machine: SessionOpsMachine) -> None:
    """Both load what both share; the pages that came second are given back."""
    machine.spill("a", "host", 12)
    machine.spill("b", "host", 12)
    machine.restore("a", 0)
    machine.restore("b", 0)
    machine.go_on(12)
    assert machine.on_device("a") == machine.on_device("b") == 16
    assert machine.cache.report()["a"] == machine.cache.report()["b"]


def test_an_answer_that_cannot_be_read_ends_the_operation() -> None:
    """An error while asking a future is raised inside the operation, whose cleaning up has happened when its asker is told."""
    order: list[str] = []

    class Unreadable:
        def query(self) -> bool:
            raise OSError("no such event")

        def result(self, timeout: float | None = None) -> None:
            raise AssertionError("not done")

    def operation() -> Any:
        try:
            yield Unreadable()
        finally:
            order.append("cleaned")

    runner = Runner(timeout_s=60)
    runner.start(operation(), lambda result, error: order.append(str(error)))
    assert order == ["cleaned", "no such event"] and not runner


def test_pages_of_turns_that_were_not_kept_are_freed_without_contents(machine: SessionOpsMachine) -> None:
    """A spill or drop of a session without a kept turn frees what it owns, daemon or not."""
    machine.daemon.die()
    before, (_, exclusive, _) = machine.pool.available_size(), machine.cache.report()["c"]
    machine.start("c", "spill", machine.ops.spill("c", [], "storage"), 1)
    machine.start("a", "drop", machine.ops.drop("a", []), 1)
    assert "c" not in machine.cache.report() and "a" not in machine.cache.report()
    assert machine.pool.available_size() - before == exclusive == 16
