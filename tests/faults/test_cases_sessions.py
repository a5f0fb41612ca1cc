"""Sessions at their edges: two tabs, a closed session, idleness at the moment a turn begins, a stop with half-open peers, and
a peer that asks for its history and never reads it."""

import asyncio
import json
import logging
import time
from pathlib import Path

import pytest
import websockets
import websockets.asyncio.client

from tests.support.app import Running, ScriptedConfig, message, running

WORDS = " ".join(f"word{n}" for n in range(60))


@pytest.fixture
async def app(tmp_path: Path):
    async with running(tmp_path / "data") as app:
        yield app


# ---- upgrades ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("offered", "confirmed"), [
    (["rekindle.v1", "bearer.TOKEN"], "rekindle.v1"), (["bearer.TOKEN", "rekindle.v1"], "rekindle.v1"),
    (["rekindle.v1", "rekindle.v1"], "rekindle.v1"), (None, None), (["bearer.TOKEN"], 400), (["REKINDLE.V1"], 400),
])
async def test_only_the_known_subprotocol_is_confirmed(app: Running, caplog: pytest.LogCaptureFixture, offered, confirmed) -> None:
    """Once, never the token beside it; unknown ones alone are refused with 400, and that is no error of the server's."""
    headers = {"Authorization": f"Bearer {app.key}"}
    try:
        async with websockets.asyncio.client.connect(app.ws_url, subprotocols=offered, additional_headers=headers) as ws:
            assert ws.subprotocol == confirmed and json.loads(await ws.recv())["type"] == "connection.ready"
    except websockets.InvalidStatus as refused:
        assert refused.response.status_code == confirmed and b"TOKEN" not in refused.response.body
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_token_in_the_query_signs_nobody_in_and_is_logged_nowhere(app: Running, caplog: pytest.LogCaptureFixture,
                                                                        capsys: pytest.CaptureFixture) -> None:
    """A good key or a wrong one: the socket is not signed in, REST says 401, and no log or figure holds it."""
    caplog.set_level(logging.DEBUG)
    async with app.http("rk_none") as http:
        for secret in (app.key, "SECRET123"):
            async with websockets.asyncio.client.connect(f"{app.ws_url}?token={secret}") as ws:
                await ws.send('{"type":"session.create"}')
                assert json.loads(await ws.recv())["error"]["code"] == "unauthenticated"
            assert (await http.get(f"/v1/sessions?token={secret}")).status_code == 401
        figures = (await http.get("/metrics")).text
    theirs = [r for r in caplog.records if r.name.split(".")[0] not in ("websockets", "httpx", "httpcore")]     # of the client here
    said = "".join(r.getMessage() for r in theirs) + "".join(capsys.readouterr()) + figures
    assert app.key not in said and "SECRET123" not in said


# ---- two tabs ------------------------------------------------------------------------------------------------------
async def test_resuming_again_on_the_same_socket_repeats_nothing_live(app: Running) -> None:
    """Each live event comes once, however often the socket resumed; numbers rise without a gap in both tabs."""
    async with app.socket() as a, app.socket() as b:
        session_id = (await a.answer("session.create"))["session_id"]
        for _ in range(3):
            assert (await b.answer("session.resume", session_id=session_id, epoch=1, last_seq=1))["outcome"] == "lossless"
        await a.say(session_id, WORDS)
        await b.until("response.completed")
        for tab, first in ((a, 1), (b, 2)):
            seqs = [e["seq"] for e in tab.seen if "seq" in e and e["type"] != "session.resumed"]
            assert seqs == list(range(first, first + len(seqs)))


async def test_submits_on_different_branches_share_one_ceiling(app: Running) -> None:
    """Of four at once on three branches, with one turn left, exactly one runs, time after time."""
    async with app.client() as rk, app.http() as http:
        chat = await rk.session()
        await chat.ask("one")
        first = chat.last["id"]
        await chat.ask("two")
        for allowed in range(3, 13):
            await http.patch(f"/v1/sessions/{chat.id}/limits", json={"max_turns": allowed})
            answers = await asyncio.gather(*(
                http.post(f"/v1/sessions/{chat.id}/responses", json={"input": "x", "previous_response_id": previous})
                for previous in (first, "root", None, chat.last["id"])))
            assert sum(a.status_code == 200 for a in answers) == 1
            assert {a.json()["error"]["code"] for a in answers if a.status_code != 200} <= {
                "response_already_in_flight", "max_turns_reached"}
            assert (await app.services.store.totals(chat.id)).turns == allowed


# ---- a closed session ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "fields", "answer"), [
    ("response.create", {"input": message("x")}, "session_closed"), ("response.cancel", {}, "response_not_in_progress"),
    ("session.close", {}, "session_closed"), ("session.resume", {}, "session.resumed"),
    ("session.update", {"title": "t"}, "session.updated"),
])
async def test_frames_to_a_closed_session(app: Running, kind: str, fields: dict, answer: str) -> None:
    """Read and renamed it can be, nothing else; every watcher was told; the next session on the socket works."""
    async with app.socket() as a, app.socket() as b:
        session_id = (await a.answer("session.create"))["session_id"]
        await b.answer("session.resume", session_id=session_id)
        await a.say(session_id, "hello")
        await a.answer("session.close", session_id=session_id)
        assert (await b.until("session.closed"))["session_id"] == session_id
        got = await b.answer(kind, session_id=session_id, **fields)
        assert got.get("error", {}).get("code", got["type"]) == answer
        other = (await b.answer("session.create"))["session_id"]
        assert (await b.say(other, "hello"))["type"] == "response.completed"


# ---- idleness ------------------------------------------------------------------------------------------------------
async def test_a_turn_that_comes_as_the_spill_begins_is_answered_once_with_its_whole_context(tmp_path: Path) -> None:
    """At sixty offsets before, in and after a spill to either tier: the right answer, all that was stored reused, counted once."""
    idle = {"to_host_s": 1000, "to_storage_s": 2000}
    async with running(tmp_path / "data", ScriptedConfig(verb_delay_s=0.005), idle=idle) as app, app.client() as rk:
        chat = await rk.session()
        await chat.ask(WORDS)
        tiers: set[str] = set()
        for n in range(60):
            before = chat.usage["input_tokens"] + chat.usage["output_tokens"]
            spilling = asyncio.create_task(app.services.tiers.manager.tick(time.time() + (1500, 2500)[n % 2]))
            for _ in range(n // 2):
                await asyncio.sleep(0.0005)
            assert await chat.ask(f"question {n}") == f"question {n}"
            assert chat.usage["cached_tokens"] == (before - 1) // 16 * 16
            tiers |= {tier for tier, tokens in chat.usage["cached_tokens_details"].items() if tokens}
            await spilling
        assert (await app.services.store.totals(chat.id)).turns == 61 and tiers >= {"host", "storage"}


async def test_neither_a_running_turn_is_spilled_nor_does_a_ping_keep_pages(tmp_path: Path) -> None:
    """A turn much longer than the idle time sees no spill; the clock starts at its end, and pings do not stop it."""
    async with running(tmp_path / "data", idle={"to_host_s": 0.1, "to_storage_s": None, "check_s": 0.01}) as app, app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        app.config.token_delay_s = 0.02
        await ws.say(session_id, WORDS)
        assert not [e for e in ws.seen if e["type"] == "session.spilled"]
        while not [e for e in ws.seen if e["type"] == "session.spilled"]:
            await ws.answer("ping")
        assert app.services.tiers.ledger.state(session_id) == "warm"


# ---- ends ----------------------------------------------------------------------------------------------------------
async def test_a_stop_with_half_open_peers_tells_everybody_and_ends(tmp_path: Path) -> None:
    """Three streams, an idle socket, one before its login and three connections in mid-handshake: 1012 to every socket, each
    turn's end told before it, and nothing keeps the server."""
    async with running(tmp_path / "data") as app:
        app.config.token_delay_s = 0.05
        host, port = app.url.removeprefix("http://").split(":")
        half = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        half[1][1].write(b"GET /v1/chat HT")
        half[2][1].write(b"GET /v1/chat HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n")
        stranger = await websockets.asyncio.client.connect(app.ws_url)
        async with app.socket() as a, app.socket() as b, app.socket() as c, app.socket() as idle:
            streams = (a, b, c)
            for ws in streams:
                session_id = (await ws.answer("session.create"))["session_id"]
                await ws.send("response.create", session_id=session_id, input=message(WORDS))
                await ws.until("response.output_text.delta")
            app.server.should_exit = True
            assert [await ws.closed() for ws in (*streams, idle)] == [1012] * 4
            for ws in streams:
                (end,) = [e for e in ws.seen if e["type"] in ("response.completed", "response.incomplete", "response.failed")]
                assert end["response"]["status"] == "cancelled"
        with pytest.raises(websockets.ConnectionClosed):
            await stranger.recv()
        assert stranger.close_code == 1012
        for reader, writer in half:
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()


async def test_a_peer_that_asks_for_its_history_and_never_reads_holds_one_of_them(app: Running) -> None:
    """Hundreds of resumes wait on the wire, not as snapshots in the server; once it reads, each is answered."""
    async with app.client() as rk, app.socket() as ws:
        chat = await rk.session()
        for _ in range(4):
            await chat.ask("word " * 1000)
        (there,) = [s for s in app.services.sockets if s._outbox is not None and not s._watching]
        ws.ws.transport.pause_reading()
        for n in range(1200):
            await ws.send("session.resume", session_id=chat.id, event_id=f"r{n}")
            await asyncio.sleep(0)
            assert there._outbox.replaying <= 1
        ws.ws.transport.resume_reading()
        while (event := await ws.next()).get("event_id") != "r1199":
            assert event["type"] == "session.resumed"


async def test_an_upload_that_breaks_off_is_no_error_of_the_server(app: Running) -> None:
    """A body cut short by its sender leaves no file and counts as gone, not as internal_error."""
    host, port = app.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {app.key}\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head.encode() + b"\x89PNG")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    async with app.http() as http, asyncio.timeout(10):
        while 'reason="client_gone"' not in (figures := (await http.get("/metrics")).text):
            await asyncio.sleep(0.02)
    assert 'reason="internal_error"' not in figures and not list(app.services.images.folder.iterdir())
