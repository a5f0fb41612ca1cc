"""The chat over a real socket, on the scripted engine (which answers with the user's own words)."""

import asyncio
import base64
from itertools import pairwise

import pytest

from server.client import Conflict, InvalidRequest, LimitExceeded
from tests.support.app import Running, message, png, running

RED, GREEN, BLUE = (200, 30, 30), (30, 200, 30), (30, 30, 200)


@pytest.fixture
async def app(tmp_path):
    async with running(tmp_path / "data") as app:
        yield app


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def test_three_turns_with_images(app: Running) -> None:
    """Three turns, an image each, as bytes, data URL and file: streamed answers, growing usage, everything in the history."""
    async with app.client() as rk:
        chat = await rk.session(instructions="Be brief.")
        uploaded = await rk.upload(png(BLUE))
        images = [png(RED), url(png(GREEN)), uploaded["id"]]
        usages = []
        for n, image in enumerate(images):
            pieces = [piece async for piece in chat.say(f"what is shape {n}", images=[image])]
            assert "".join(pieces) == f"what is shape {n}" and len(pieces) > 1
            assert chat.last["status"] == "completed"
            usages.append(chat.usage)
        assert [u["image_tokens"] for u in usages] == [uploaded["tokens"] * n for n in (1, 2, 3)]
        assert all(u["input_tokens"] + u["output_tokens"] == u["total_tokens"] for u in usages)
        page = app.settings.engine.page_tokens
        for before, after in pairwise(usages):
            assert after["cached_tokens_details"] == {"device": (before["total_tokens"] - 1) // page * page, "host": 0, "storage": 0}
        history = await chat.history()
        assert [item["output_text"] for item in history] == [f"what is shape {n}" for n in range(3)]
        assert [item["input"][0]["type"] for item in history] == ["input_image"] * 3
        assert history[2]["input"][0]["file_id"] == uploaded["id"]
        assert chat.object["title"] == "what is shape 0"


async def test_the_first_events_are_those_of_the_contract(app: Running) -> None:
    """session.created is number 1, response.created 2, then deltas, then completed; numbers have no gap."""
    async with app.socket() as ws:
        created = await ws.answer("session.create", session={"max_turns": 50})
        assert created["type"] == "session.created" and created["seq"] == 1 and created["epoch"] == 1
        assert created["session"]["limits"]["max_turns"] == 50
        await ws.say(created["session_id"], "hello there friend")
        mine = [e for e in ws.seen if "seq" in e]
        assert [e["seq"] for e in mine] == list(range(1, len(mine) + 1))
        kinds = [e["type"] for e in mine]
        assert kinds[:3] == ["session.created", "response.created", "response.output_text.delta"]
        assert mine[1]["response"]["status"] == "in_progress" and mine[1]["input"] == [
            {"type": "input_text", "text": "hello there friend"}]


async def test_connection_ready_announces_the_limits(app: Running) -> None:
    """Limits, heartbeat and the engine's state are known before the first frame is sent."""
    async with app.socket() as ws:
        ready = ws.seen[0]
        assert ready["limits"]["frame_bytes"] == app.settings.server.frame_bytes
        assert ready["limits"]["images_per_message"] == app.settings.limits.images_per_message
        assert ready["heartbeat_s"] == app.settings.server.heartbeat_s and ready["engine"]["state"] == "ready"
        assert ws.ws.subprotocol == "rekindle.v1"


async def test_the_tokens_of_a_branch_are_kept_and_only_ever_extended(app: Running) -> None:
    """What the second turn sends begins with exactly what the first sent and got."""
    async with app.client() as rk:
        chat = await rk.session()
        await chat.ask("first words")
        await chat.ask("second words")
        first, second = await app.services.store.turns(chat.id)
        assert second.usage.input_tokens == len(first.input_ids) + len(first.output_ids) + len(second.input_ids)
        assert first.output_ids[-1] in app.services.info.stop_token_ids
        assert first.usage.output_tokens == len(first.output_ids)


async def test_several_sockets_see_the_same_numbers(app: Running) -> None:
    """Two watchers of one session get the same events; only the asker's answer carries its event_id."""
    async with app.socket() as a, app.socket() as b:
        created = await a.answer("session.create")
        session_id = created["session_id"]
        assert (await b.answer("session.resume", session_id=session_id))["outcome"] == "snapshot"
        end = await a.say(session_id, "one two three")
        await b.ended(end["response"]["id"])
        of = [[e for e in frames.seen if e.get("seq", 0) > 1 and e["type"] != "session.resumed"] for frames in (a, b)]
        plain = [[{k: v for k, v in e.items() if k != "event_id"} for e in events] for events in of]
        shortest = min(len(p) for p in plain)
        assert plain[0][:shortest] == plain[1][:shortest] and shortest >= 4
        assert any("event_id" in e for e in of[0]) and not any("event_id" in e for e in of[1])


async def test_the_same_key_never_runs_twice(app: Running) -> None:
    """In flight and afterwards, the same idempotency key answers with the same response id, and the turn counts once."""
    app.config.token_delay_s = 0.01
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        ask = {"session_id": session_id, "input": message("one two three four five"), "idempotency_key": "k1"}
        first = await ws.answer("response.create", **ask)
        again = await ws.answer("response.create", **ask)
        assert again["type"] == "response.created" and again["response"]["id"] == first["response"]["id"] and "seq" not in again
        end = await ws.ended(first["response"]["id"])
        after = await ws.answer("response.create", **ask)
        assert after["type"] == "response.completed" and after["response"]["id"] == first["response"]["id"]
        assert after["response"]["output"] == end["response"]["output"]
        totals = await app.services.store.totals(session_id)
        assert totals.turns == 1


async def test_a_second_turn_is_refused_while_one_runs(app: Running) -> None:
    """response_already_in_flight, on that session alone; the running turn is not disturbed and the next one works."""
    app.config.token_delay_s = 0.01
    async with app.client() as rk:
        chat, other = await rk.session(), await rk.session()
        pieces = chat.say("one two three four five six")
        first = await anext(pieces)
        with pytest.raises(Conflict) as refused:
            await chat.ask("me too")
        assert refused.value.code == "response_already_in_flight" and refused.value.retryable
        assert await other.ask("elsewhere") == "elsewhere"
        assert first + "".join([p async for p in pieces]) == "one two three four five six"
        assert await chat.ask("now") == "now"
        assert (await app.services.store.totals(chat.id)).turns == 2


async def test_branches_edit_and_regenerate(app: Running) -> None:
    """previous_response_id answers after that turn; root begins anew; an unknown one is refused; the head follows."""
    async with app.client() as rk:
        chat = await rk.session()
        await chat.ask("one")
        first = chat.last["id"]
        await chat.ask("two")
        await chat.ask("other two", previous_response_id=first)
        assert chat.last["previous_response_id"] == first
        await chat.ask("from scratch", previous_response_id="root")
        assert chat.last["previous_response_id"] is None and chat.usage["input_tokens"] < 100
        with pytest.raises(Exception, match="previous_response_not_found"):
            await chat.ask("nowhere", previous_response_id="r_unknown")
        history = await chat.history()
        assert [i["output_text"] for i in history] == ["one", "two", "other two", "from scratch"]
        assert history[2]["previous_response_id"] == history[1]["previous_response_id"] == first


@pytest.mark.parametrize("at_piece", [1, 3])
async def test_a_cancelled_turn_keeps_exactly_what_was_shown(app: Running, at_piece: int) -> None:
    """Cancel after n pieces: incomplete, reason cancelled; history holds what the client saw; the next turn builds on it."""
    app.config.token_delay_s = 0.05
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.send("response.create", session_id=session_id, input=message(" ".join(f"word{n}" for n in range(100))))
        for _ in range(at_piece):
            await ws.until("response.output_text.delta")
        await ws.send("response.cancel", session_id=session_id)
        end = await ws.until("response.incomplete")
        assert end["response"]["status"] == "cancelled" and end["response"]["incomplete_reason"] == "cancelled"
        shown = "".join(e["delta"] for e in ws.seen if e["type"] == "response.output_text.delta")
        (turn,) = await app.services.store.turns(session_id)
        assert turn.output_text == shown == end["response"]["output"][0]["content"][0]["text"] and turn.status == "cancelled"
        assert len(shown.split()) < 50
        app.config.token_delay_s = 0
        assert (await ws.say(session_id, "go on"))["type"] == "response.completed"


async def test_a_turn_cancelled_before_anything_was_shown_never_was(app: Running) -> None:
    """Cancelled before the first token: no turn, nothing counted, and the session is free."""
    app.config.token_delay_s = 0.5
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.answer("response.create", session_id=session_id, input=message("hello"))
        await ws.send("response.cancel", session_id=session_id)
        end = await ws.until("response.incomplete")
        assert end["response"]["status"] == "cancelled" and end["response"]["output"] == []
        assert (await app.services.store.totals(session_id)).turns == 0
        app.config.token_delay_s = 0
        assert (await ws.say(session_id, "hello"))["type"] == "response.completed"


async def test_cancelling_nothing_is_an_error_that_changes_nothing(app: Running) -> None:
    """response.cancel without a running response, or of another one, is refused."""
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        refused = await ws.answer("response.cancel", session_id=session_id)
        assert refused["error"]["code"] == "response_not_in_progress" and refused["session_id"] == session_id


async def test_stopping_the_iteration_cancels(app: Running) -> None:
    """A program that stops reading `say` stops the turn; what was read is kept."""
    app.config.token_delay_s = 0.01
    async with app.client() as rk:
        chat = await rk.session()
        pieces = chat.say("one two three four five six seven eight nine ten")
        await anext(pieces)
        await pieces.aclose()
        await app.until(lambda: app.services.turns.running(chat.id) is None)
        (turn,) = await app.services.store.turns(chat.id)
        assert turn.status == "cancelled"


async def test_a_length_limit_ends_as_incomplete(app: Running) -> None:
    """max_output_tokens reached: response.incomplete with its reason; the answer is kept and counted."""
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        end = await ws.say(session_id, "one two three four five", max_output_tokens=2)
        assert (end["type"], end["response"]["status"], end["response"]["incomplete_reason"]) == (
            "response.incomplete", "incomplete", "max_output_tokens")
        assert end["response"]["usage"]["output_tokens"] == 2


async def test_rename_close_delete(app: Running) -> None:
    """A closed session takes no turns, its transcript stays readable; a deleted one is gone."""
    async with app.client() as rk:
        chat = await rk.session()
        await chat.ask("remember this")
        await chat.rename("Mine")
        assert chat.object["title"] == "Mine"
        await chat.close()
        with pytest.raises(Conflict) as refused:
            await chat.ask("more")
        assert refused.value.code == "session_closed"
        assert [i["output_text"] for i in await chat.history()] == ["remember this"]
        await app.services.tiers.refresh(chat.id)        # a report that comes late
        assert chat.id not in app.services.tiers.ledger and app.services.pressure.used_pages == 0
        await chat.delete()
        with pytest.raises(Exception, match="session_not_found"):
            await chat.history()
        await app.services.tiers.refresh(chat.id)
        assert chat.id not in app.services.tiers.ledger


async def test_closing_stops_the_running_turn_and_keeps_what_was_shown(app: Running) -> None:
    """session.close in mid-answer: the turn ends as cancelled, then the session is closed."""
    app.config.token_delay_s = 0.01
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.send("response.create", session_id=session_id, input=message("one two three four five six seven eight"))
        await ws.until("response.output_text.delta")
        await ws.answer("session.close", session_id=session_id)
        kinds = [e["type"] for e in ws.seen]
        assert kinds.index("response.incomplete") < kinds.index("session.closed")
        (turn,) = await app.services.store.turns(session_id)
        assert turn.status == "cancelled"


async def test_an_empty_message_and_a_wrong_image_change_nothing(app: Running) -> None:
    """Refusals before the engine is asked: the error says why, and the next good turn works."""
    async with app.client() as rk:
        chat = await rk.session()
        for images, text in (([], ""), ([url(b"not an image")], "what"), (["0" * 64], "what")):
            with pytest.raises(Exception) as refused:
                await chat.ask(text, images=images)
            assert isinstance(refused.value, InvalidRequest) or refused.value.code == "file_not_found"
        assert (await app.services.store.totals(chat.id)).turns == 0
        assert await chat.ask("fine") == "fine"


async def test_budget_events_at_80_percent_and_at_the_ceiling(app: Running) -> None:
    """budget.warning once when 80% is passed, budget.reached when the ceiling is; then the refusal names limit and value."""
    async with app.client() as rk:
        chat = await rk.session(max_turns=5)
        told: list[dict] = []

        async def listen() -> None:
            async for event in chat.events():
                if event["type"].startswith("budget."):
                    told.append(event)

        listener = asyncio.create_task(listen())
        for n in range(5):
            await chat.ask(f"turn {n}")
        await app.until(lambda: len(told) == 2)
        listener.cancel()
        assert [(e["type"], e["name"], e["limit"], e["used"]) for e in told] == [
            ("budget.warning", "max_turns", 5, 4), ("budget.reached", "max_turns", 5, 5)]
        with pytest.raises(LimitExceeded) as refused:
            await chat.ask("one more")
        assert (refused.value.code, refused.value.param, refused.value.limit, refused.value.requested) == (
            "max_turns_reached", "max_turns", 5, 6)
