"""Room on the device: what can never fit is refused at once, and who waits is never waited for by those who fit."""

import asyncio
from pathlib import Path

import pytest

from server.admission import ENGINE_SPARE_TOKENS
from server.client import LimitExceeded
from tests.support.app import Running, ScriptedConfig, running

POOL_TOKENS, PAGE_TOKENS = 1024, 16
ROOM_TOKENS = POOL_TOKENS - 2 * PAGE_TOKENS
"""SGLang leaves a turn waiting for ever, and all behind it, unless there is room to spare."""
WORDS = " ".join(f"word{n}" for n in range(60))


@pytest.fixture
async def app(tmp_path: Path):
    config = ScriptedConfig(device_tokens=POOL_TOKENS)
    async with running(tmp_path / "data", config, engine={"device_tokens": POOL_TOKENS}) as app:
        yield app


async def test_what_is_above_the_pool_is_refused_at_once_and_others_go_on(app: Running) -> None:
    """Named with the pool's size and the need; while it is refused, and after it, a small turn of another is answered."""
    async with app.client() as rk:
        big, small = await rk.session(), await rk.session()
        with pytest.raises(LimitExceeded) as refused:
            await big.ask("hello", max_output_tokens=POOL_TOKENS)
        assert (refused.value.code, refused.value.limit) == ("device_tokens_exceeded", ROOM_TOKENS)
        fits = POOL_TOKENS - (refused.value.requested - ROOM_TOKENS)
        with pytest.raises(LimitExceeded) as refused:
            await big.ask("hello", max_output_tokens=fits + 1)
        assert refused.value.requested == ROOM_TOKENS + 1
        assert await big.ask("hello", max_output_tokens=fits, previous_response_id="root") == "hello"
        assert await small.ask("small") == "small" and await big.ask("hello") == "hello"


async def test_pages_that_others_have_pinned_are_no_room(app: Running) -> None:
    """A turn that fits into the pool, but not beside the pins of others, is refused with what they leave; unpinned, it runs.
    The pin of the session itself takes nothing from it."""
    async with app.client() as rk:
        pinned, other = await rk.session(), await rk.session()
        await pinned.ask(WORDS * 4, max_output_tokens=8)
        pages = (await pinned.kv())["device_tokens"]
        assert (await rk.rest("POST", f"/v1/sessions/{pinned.id}/pin", {"seconds": 600}))["outcome"] == "done"
        with pytest.raises(LimitExceeded) as refused:
            await other.ask("hello", max_output_tokens=POOL_TOKENS - pages)
        assert (refused.value.code, refused.value.limit) == ("device_tokens_exceeded", ROOM_TOKENS - pages)
        assert await other.ask("small", max_output_tokens=16) == "small"
        assert await pinned.ask("mine", max_output_tokens=ROOM_TOKENS - pages - 64) == "mine"
        await rk.rest("POST", f"/v1/sessions/{pinned.id}/pin", {"seconds": 0})
        assert await other.ask("hello", max_output_tokens=ROOM_TOKENS - pages) == "hello"


async def test_a_pin_does_not_take_the_room_of_a_turn_that_runs(app: Running) -> None:
    """Refused with the reason while the turn runs, done afterwards."""
    async with app.client() as rk:
        pinned, other = await rk.session(), await rk.session()
        await pinned.ask(WORDS, max_output_tokens=8)
        app.config.token_delay_s = 0.01
        asking = asyncio.create_task(other.ask(WORDS, max_output_tokens=700))
        await app.until(lambda: app.services.turns.longest_tokens(pinned.id) > 700)
        receipt = await rk.rest("POST", f"/v1/sessions/{pinned.id}/pin", {"seconds": 600})
        assert (receipt["outcome"], receipt["reason"]) == ("refused", "a turn that is running or waiting needs the room")
        assert await asking == WORDS
        assert (await rk.rest("POST", f"/v1/sessions/{pinned.id}/pin", {"seconds": 600}))["outcome"] == "done"


async def test_the_engine_is_given_more_context_than_is_announced(app: Running) -> None:
    """SGLang keeps a few positions for itself, so that what is announced can be used to the last token."""
    told = app.services.supervisor._config
    assert told.context_tokens == app.services.context_tokens + ENGINE_SPARE_TOKENS <= app.services.info.context_tokens


async def test_pages_that_somebody_asked_back_stay_for_a_while(tmp_path: Path) -> None:
    """Typing, or a restore, of a session that was spilled for idleness begins its idleness anew: it is not spilled again at
    the next look."""
    idle = {"to_host_s": 1.0, "to_storage_s": None, "check_s": 0.02}
    async with running(tmp_path / "data", idle=idle) as app, app.client() as rk:
        chat = await rk.session()
        await chat.ask(WORDS)
        for bring_back in (chat.typing, lambda: rk.rest("POST", f"/v1/sessions/{chat.id}/restore")):
            await app.until(lambda: chat.state == "warm")
            used_s = app.services.tiers.ledger.entry(chat.id).last_used_s
            await bring_back()
            await app.until(lambda: chat.state == "hot")
            assert app.services.tiers.ledger.entry(chat.id).last_used_s >= used_s + 1.0
            ticks = 0
            while ticks < 10:                                  # of the planner, all within to_host_s
                await app.services.tiers.manager.tick(app.services.tiers.ledger.entry(chat.id).last_used_s + 0.9)
                ticks += 1
            assert app.services.tiers.ledger.state(chat.id) == "hot"
