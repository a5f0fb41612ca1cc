"""A supervised component: its table of states, its backoff, its lives."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.components import TRANSITIONS, Backoff, Component, Restarts, State, Step
from server.engines.base import EngineStartError, EngineUnavailable

BACKOFF = Backoff(first_s=1, cap_s=8, stable_s=60, crash_deaths=5, crash_within_s=60, retry_s=60)


def test_the_wait_doubles_up_to_its_cap_and_starts_again():
    """Waits are 1, 2, 4, 8, 8 seconds; a life that served for stable_s makes the next wait short."""
    restarts, now_s, waits = Restarts(BACKOFF), 0.0, []
    for _ in range(6):
        now_s += 100
        waits.append(restarts.after_death(now_s, now_s - 59))
    assert waits == [1, 2, 4, 8, 8, 8]
    assert restarts.after_death(1000, 940) == 1
    assert restarts.after_death(1100, None) == 2


@given(st.lists(st.floats(0.1, 40), max_size=40))
def test_a_crash_loop_is_five_deaths_within_a_minute(gaps):
    """The wait is None exactly at the fifth death within a minute, counted anew after each crash loop."""
    restarts, now_s, recent = Restarts(BACKOFF), 0.0, []
    for gap in gaps:
        now_s += gap
        recent = [*recent, now_s][-5:]
        looping = len(recent) == 5 and now_s - recent[0] <= 60
        wait_s = restarts.after_death(now_s, None)
        assert (wait_s is None) == looping
        assert looping or 1 <= wait_s <= 8
        if looping:
            recent = []


def test_every_state_has_a_way_out():
    """From each state something can happen, and a failed component can be tried again."""
    assert {state for state, _ in TRANSITIONS} == set(State)
    assert TRANSITIONS[State.FAILED, Step.RETRY] is State.RESTARTING
    assert {step for _, step in TRANSITIONS} == set(Step)


def component(lives: list, seen: list, **backoff) -> Component:
    async def life(up) -> str:
        if not lives:
            await asyncio.Event().wait()
        end = lives.pop(0)
        if isinstance(end, Exception):
            raise end
        up()
        return end

    quick = {"first_s": 0.0, "cap_s": 0.0, "retry_s": 0.0, "stable_s": 1e9, "crash_within_s": 1e9} | backoff
    part = Component("thing", life, backoff=Backoff(**quick), tail=lambda: "last lines", clock=lambda: 0.0,
                     changed=lambda: seen.append((part.state, part.detail)))
    return part


async def run(lives: list, **backoff) -> list:
    seen: list = []
    keeper = asyncio.create_task(component(lives, seen, **backoff).keep())
    async with asyncio.timeout(5):
        while lives:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
    assert not keeper.done()
    keeper.cancel()
    return seen


async def test_death_and_recovery():
    """A life that ends, or an engine that is unavailable, restarts; each change is told with its reason."""
    assert await run(["killed", EngineUnavailable("exited with 1"), "killed again"]) == [
        (State.READY, ""), (State.RESTARTING, "killed"), (State.RESTARTING, "exited with 1"),
        (State.READY, ""), (State.RESTARTING, "killed again")]


@pytest.mark.parametrize("error", [EngineStartError("half-hooked"), FileNotFoundError("half-hooked")])
async def test_a_hopeless_start_is_failed_and_tried_again(error):
    """What cannot start is failed with the reason and the end of its log, and tried again later all the same."""
    assert await run([error, "killed"]) == [
        (State.FAILED, "half-hooked\nlast lines"), (State.RESTARTING, "half-hooked"), (State.READY, ""), (State.RESTARTING, "killed")]


async def test_a_crash_loop_is_failed_and_tried_again():
    """The third death in a row fails the component where three are a crash loop; its next life can be a good one."""
    seen = await run(["1", "2", "3", "4"], crash_deaths=3)
    assert [state for state, _ in seen] == [State.READY, State.RESTARTING, State.READY, State.RESTARTING, State.READY,
                                            State.FAILED, State.RESTARTING, State.READY, State.RESTARTING]
