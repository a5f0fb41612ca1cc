"""What can go wrong with a turn, and that the next good one works."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from server.client import ApiError, ConnectionLost, EngineFailed, connect
from sessions.errors import StoreUnavailable
from tests.support.app import Running, ScriptedConfig, message, running

LONG = " ".join(f"word{n}" for n in range(60))


@pytest.fixture
async def app(tmp_path):
    async with running(tmp_path / "data") as app:
        yield app


async def nothing_left(app: Running, session_id: str, turns: int) -> None:
    """The session is free, and history and sums hold exactly so many turns."""
    assert app.services.turns.count == 0 and not app.services.tiers.ledger.entry(session_id).busy
    assert (await app.services.store.totals(session_id)).turns == turns
    assert len(await app.services.store.all_turns(session_id)) == turns


async def test_an_engine_that_dies_in_the_middle_fails_the_turn_and_the_next_works(app: Running) -> None:
    """response.failed, retryable; nothing is kept or counted; after the restart the same key runs, once."""
    app.config.die_after_tokens = 5
    async with app.client() as rk:
        chat = await rk.session()
        shown: list[str] = []
        with pytest.raises(EngineFailed) as failed:
            async for piece in chat.say(LONG, idempotency_key="k"):
                shown.append(piece)
        assert failed.value.code == "engine_died" and failed.value.retryable and shown
        assert chat.last["status"] == "failed"
        await nothing_left(app, chat.id, 0)
        app.config.die_after_tokens = None
        await app.services.supervisor.wait_ready(20)
        assert len(app.engines) == 2
        assert await chat.ask(LONG, idempotency_key="k") == LONG
        await nothing_left(app, chat.id, 1)


async def test_without_an_engine_a_turn_is_refused_and_everything_else_works(tmp_path: Path) -> None:
    """engine_unavailable, retryable; sessions can be made and read; /readyz says why, /healthz is well."""
    async with running(tmp_path / "data", ScriptedConfig(start_error="no such device")) as app, app.client() as rk, app.http() as http:
        chat = await rk.session()
        with pytest.raises(EngineFailed) as refused:
            await chat.ask("hello")
        assert refused.value.code == "engine_unavailable" and refused.value.retryable and refused.value.retry_after_ms
        await nothing_left(app, chat.id, 0)
        ready = await http.get("/readyz")
        assert ready.status_code == 503 and "no such device" in ready.json()["detail"]
        assert (await http.get("/healthz")).status_code == 200
        receipt = await http.post(f"/v1/sessions/{chat.id}/spill", json={})
        assert receipt.json()["error"]["code"] == "engine_unavailable"


async def test_a_commit_that_fails_rolls_the_turn_back(app: Running) -> None:
    """The answer was shown, but it is not in history: failed, not completed; nothing is counted; the next turn works."""
    store = app.services.turns._store

    class FullDisk:
        def __getattr__(self, name: str):
            return getattr(store, name)

        async def commit_turn(self, *_: object, **__: object) -> None:
            raise StoreUnavailable("the disk is full")

    async with app.client() as rk:
        chat = await rk.session()
        app.services.turns._store = FullDisk()
        with pytest.raises(ApiError) as failed:
            await chat.ask("hello")
        assert failed.value.code == "store_unavailable" and failed.value.retryable
        app.services.turns._store = store
        await nothing_left(app, chat.id, 0)
        assert await chat.ask("hello again") == "hello again"
        await nothing_left(app, chat.id, 1)


async def test_an_engine_that_does_not_stop_is_not_waited_for(app: Running) -> None:
    """Cancelled, and the engine is stuck: after a bounded time the turn ends as cancelled with what was shown."""
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        app.config.token_delay_s = 0.02
        await ws.send("response.create", session_id=session_id, input=message(LONG))
        await ws.until("response.output_text.delta")
        app.config.token_delay_s = 3600
        await ws.send("response.cancel", session_id=session_id)
        end = await ws.until("response.incomplete")
        assert end["response"]["status"] == "cancelled"
        app.config.token_delay_s = 0
        await nothing_left(app, session_id, 1)
        assert (await ws.say(session_id, "go on"))["type"] == "response.completed"


async def test_a_handler_that_fails_unexpectedly_tells_no_details(app: Running) -> None:
    """internal_error, on REST and on the socket; the session is free and the next turn works."""
    prepare = app.services.turns._preparer.prepare

    async def broken(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    async with app.client() as rk, app.http() as http:
        chat = await rk.session()
        app.services.turns._preparer.prepare = broken
        with pytest.raises(ApiError) as failed:
            await chat.ask("hello")
        answer = await http.post(f"/v1/sessions/{chat.id}/responses", json={"input": "hello"})
        assert failed.value.code == answer.json()["error"]["code"] == "internal_error" and answer.status_code == 500
        assert "secret" not in str(failed.value) + answer.text
        app.services.turns._preparer.prepare = prepare
        assert await chat.ask("hello") == "hello"


# ---- pages ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("to", "state"), [("host", "warm"), ("storage", "cold")])
async def test_spilled_pages_come_back_with_the_next_turn(app: Running, to: str, state: str) -> None:
    """The receipt, the events, the state; then the next turn reports the restored tokens by tier, with a receipt."""
    async with app.client() as rk:
        chat = await rk.session()
        await chat.ask(LONG)
        await app.until(lambda: chat.state == "hot")
        kept = (chat.usage["total_tokens"] - 1) // 16 * 16
        receipt = await chat.spill(to)
        assert (receipt["outcome"], receipt["to"], receipt["tokens"]) == ("done", to, kept)
        await app.until(lambda: chat.state == state and bool(chat.receipts))
        assert chat.receipts[-1] == receipt
        kv = await chat.kv()
        assert kv["state"] == state and kv["device_tokens"] == 0 and kv["bytes"][to] > 0
        assert await chat.ask("and now") == "and now"
        assert chat.usage["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 0} | {to: kept}
        assert chat.last["receipt"]["from"] == {to: kept}
        await app.until(lambda: chat.state == "hot")
        assert chat.receipts[-1] == chat.last["receipt"]


async def test_a_verb_during_a_turn_is_a_refused_receipt(app: Running) -> None:
    """Nothing moves, the turn is not disturbed."""
    app.config.token_delay_s = 0.01
    async with app.client() as rk:
        chat = await rk.session()
        asking = asyncio.create_task(chat.ask(LONG))
        await app.until(lambda: app.services.tiers.ledger.entry(chat.id).busy)
        receipt = await chat.spill("host")
        assert (receipt["outcome"], receipt["reason"]) == ("refused", "a turn is running")
        assert await asking == LONG


async def test_idle_sessions_are_spilled_by_themselves(tmp_path: Path) -> None:
    """After to_host_s the pages leave the device, and the watchers are told."""
    async with running(tmp_path / "data", idle={"to_host_s": 0.2, "to_storage_s": None, "check_s": 0.05}) as app, app.client() as rk:
        chat = await rk.session()
        await chat.ask(LONG)
        await app.until(lambda: chat.state == "warm" and bool(chat.receipts))
        assert chat.receipts[0]["verb"] == "spill" and app.services.pressure.used_pages == 0


# ---- restarts ------------------------------------------------------------------------------------------------------
async def test_after_a_restart_the_history_is_there_and_the_tokens_go_on(tmp_path: Path) -> None:
    """Same folder, new server: the turns, the head, the epoch raised; the next prompt extends the very same token ids."""
    async with running(tmp_path / "data") as app, app.client() as rk:
        chat = await rk.session(title="kept")
        await chat.ask("first")
        first = (await app.services.store.turns(chat.id))[0]
        key, session_id, cursor = app.key, chat.id, (chat.cursor.epoch, chat.cursor.seq)
    async with running(tmp_path / "data") as app, app.socket(key) as ws:
        resumed = await ws.answer("session.resume", session_id=session_id, epoch=cursor[0], last_seq=cursor[1])
        assert resumed["outcome"] == "snapshot" and resumed["epoch"] > cursor[0] and resumed["session"]["title"] == "kept"
        assert [i["output_text"] for i in resumed["items"]] == ["first"]
        await ws.say(session_id, "second")
        before, after = await app.services.store.turns(session_id)
        assert before == first
        assert after.usage.input_tokens == len(first.input_ids) + len(first.output_ids) + len(after.input_ids)


def serve(data: Path, *args: str) -> subprocess.Popen:
    env = os.environ | {"REKINDLE_ENGINE__KIND": "scripted", "REKINDLE_DATA": str(data), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen([sys.executable, "-m", "server", "serve", "--port", "0", *args], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2])


def address(process: subprocess.Popen) -> tuple[str, str]:
    """(address, ticket), read from what the server prints."""
    for line in process.stdout:
        if found := re.search(r"open (http://\S+)/#ticket=(\S+)", line):
            return found[1], found[2]
    raise AssertionError(f"the server ended with {process.wait()}")


async def test_killed_and_started_again_and_stopped_by_a_signal(tmp_path: Path) -> None:
    """The real process: the printed ticket signs in; kill -9 loses no committed turn; SIGTERM ends it with 0; a second
    server on the same folder is refused; the admin key is in its file, for its owner only."""
    data = tmp_path / "data"
    process = serve(data)
    try:
        url, ticket = await asyncio.to_thread(address, process)
        key_file = data / "admin.key"
        assert key_file.stat().st_mode & 0o777 == 0o600
        key = key_file.read_text().strip()
        async with connect(url, ticket=ticket) as rk:
            chat = await rk.session()
            assert await chat.ask("remember me") == "remember me"
        second = await asyncio.to_thread(subprocess.run, [sys.executable, "-m", "server", "serve", "--port", "0", "--data", str(data)],
                                         env=os.environ | {"REKINDLE_ENGINE__KIND": "scripted"}, capture_output=True, text=True,
                                         cwd=Path(__file__).parents[2], timeout=60)
        assert second.returncode == 1 and "another server" in second.stdout
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        process = serve(data)
        url, _ = await asyncio.to_thread(address, process)
        async with connect(url, key) as rk:
            chat = await rk.resume(chat.id)
            assert [i["output_text"] for i in chat.items] == ["remember me"]
            assert await chat.ask("and this") == "and this"
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        process.wait()


async def test_shutdown_keeps_what_a_running_turn_has_shown(tmp_path: Path) -> None:
    """A graceful stop in mid-answer: the turn is committed as cancelled, and the sockets are told to come back."""
    async with running(tmp_path / "data") as app:
        app.config.token_delay_s = 0.05
        async with app.socket() as ws:
            session_id = (await ws.answer("session.create"))["session_id"]
            await ws.send("response.create", session_id=session_id, input=message(LONG))
            await ws.until("response.output_text.delta")
            app.server.should_exit = True
            assert await ws.closed() in (1001, 1012)
            assert any(e["type"] == "response.incomplete" for e in ws.seen)
    async with running(tmp_path / "data") as app:
        (turn,) = await app.services.store.turns(session_id)
        assert turn.status == "cancelled" and LONG.startswith(turn.output_text)


async def test_a_client_whose_server_is_gone_says_so(tmp_path: Path) -> None:
    """ConnectionLost after the time to reconnect is up; nothing hangs."""
    async with running(tmp_path / "data") as app:
        app.config.token_delay_s = 0.05
        async with app.client(reconnect_s=0.3) as rk:
            chat = await rk.session()
            asking = asyncio.create_task(chat.ask(LONG))
            await app.until(lambda: app.services.turns.count == 1)
            app.server.should_exit = True
            with pytest.raises(ConnectionLost):
                while True:
                    await asking
                    asking = asyncio.create_task(chat.ask("more"))


async def test_the_page_and_the_figures_are_served(app: Running) -> None:
    """The page with its policy, static files, metrics on loopback, status, models; unknown routes in the one error shape."""
    async with app.http() as http, httpx.AsyncClient(base_url=app.url, trust_env=False) as nobody:
        page = await nobody.get("/")
        assert page.status_code == 200 and "text/html" in page.headers["content-type"] and page.headers["content-security-policy"]
        assert (await nobody.get("/static/app.js")).status_code == 200
        assert "rekindle_sessions" in (await nobody.get("/metrics")).text
        assert (await nobody.get("/v1/status")).status_code == 401
        status = (await http.get("/v1/status")).json()
        assert status["engine"]["state"] == "ready" and set(status["tiers"]) == {"device", "host", "storage"}
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == app.services.info.name
        unknown = await http.get("/v1/nothing")
        assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found"


async def test_deleting_in_the_middle_of_an_answer_ends_it(app: Running) -> None:
    """The turn is stopped first, then everything of the session is gone; the engine runs nothing of it."""
    app.config.token_delay_s = 0.02
    async with app.socket() as ws, app.http() as http:
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.send("response.create", session_id=session_id, input=message(LONG))
        await ws.until("response.output_text.delta")
        assert (await http.delete(f"/v1/sessions/{session_id}")).status_code == 204
        await ws.until("session.closed")
        assert any(e["type"] == "response.incomplete" for e in ws.seen)
        assert app.services.turns.count == 0 and not app.engine._turns and session_id not in app.services.tiers.ledger
        assert (await ws.say(session_id, "still there?"))["error"]["code"] == "session_not_found"


async def test_progress_is_told_while_nothing_comes(tmp_path: Path) -> None:
    """Every heartbeat a response.progress with its stage, until the first text; none after it."""
    async with running(tmp_path / "data", server={"heartbeat_s": 0.1}) as app, app.socket() as ws:
        app.config.token_delay_s = 0.5
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.send("response.create", session_id=session_id, input=message("one two three"))
        first = await ws.until("response.progress")
        assert first["stage"] == "prefilling"
        await ws.until("response.completed")
        kinds = [e["type"] for e in ws.seen]
        assert "response.progress" not in kinds[kinds.index("response.output_text.delta"):]
