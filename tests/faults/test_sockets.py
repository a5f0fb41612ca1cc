"""Sockets that misbehave, drop or do not read; and what a session makes of it."""

import asyncio
import json

import pytest
import websockets
import websockets.asyncio.client
from websockets.frames import Opcode

from server import socket as server_socket
from server import wire
from tests.support.app import Running, message, running

LONG = " ".join(f"word{n}" for n in range(60))


@pytest.fixture
async def app(tmp_path):
    async with running(tmp_path / "data", server={"frame_bytes": 4096, "grace_s": 30}) as app:
        yield app


# ---- before the upgrade --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("headers", "subprotocols", "status"), [
    ({"Origin": "https://evil.example"}, ["rekindle.v1"], 403),
    ({"Origin": "null"}, ["rekindle.v1"], 403),
    ({"Authorization": "Bearer rk_wrong"}, ["rekindle.v1"], 401),
    ({}, ["graphql-ws"], 400),
])
async def test_a_wrong_upgrade_is_refused_with_an_http_status(app: Running, headers: dict, subprotocols: list, status: int) -> None:
    """Origin, login and subprotocol are checked before the socket is accepted."""
    with pytest.raises(websockets.InvalidStatus) as refused:
        await websockets.asyncio.client.connect(app.ws_url, additional_headers=headers, subprotocols=subprotocols)
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["error"]["message"]
    assert not app.services.sockets


async def test_own_origin_and_no_subprotocol_are_accepted(app: Running) -> None:
    """A page of the server itself, and a plain client that offers no subprotocol."""
    headers = {"Authorization": f"Bearer {app.key}"}
    async with websockets.asyncio.client.connect(app.ws_url, additional_headers=headers, origin=app.url) as ws:
        assert json.loads(await ws.recv())["type"] == "connection.ready" and ws.subprotocol is None


async def test_a_ticket_is_good_once(app: Running) -> None:
    """Before the login nothing works; the ticket opens one socket, gives a REST token, and is refused the second time."""
    async with app.http() as http:
        ticket = (await http.post("/v1/tickets")).json()["ticket"]
    async with websockets.asyncio.client.connect(app.ws_url) as ws:
        await ws.send(json.dumps({"type": "session.create", "event_id": "early"}))
        early = json.loads(await ws.recv())
        assert early["error"]["code"] == "unauthenticated" and early["event_id"] == "early"
        await ws.send(json.dumps({"type": "authenticate", "ticket": ticket}))
        authenticated, ready = json.loads(await ws.recv()), json.loads(await ws.recv())
        assert (authenticated["type"], ready["type"]) == ("connection.authenticated", "connection.ready")
        async with app.http(authenticated["token"]) as http:
            assert (await http.get("/v1/sessions")).status_code == 200
    async with websockets.asyncio.client.connect(app.ws_url) as ws:
        await ws.send(json.dumps({"type": "authenticate", "ticket": ticket}))
        assert json.loads(await ws.recv())["type"] == "error"
        with pytest.raises(websockets.ConnectionClosed):
            await ws.recv()
        assert ws.close_code == 4500


# ---- frames --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("frame", [
    "", "not json", "[]", "null", "{}", '{"type": 3}', '{"type": "no.such"}', '{"type": "ping", "extra": 1}',
    '{"type": "response.create", "session_id": "s"}', '{"type": "response.create", "session_id": "s", "input": []}',
    '{"type": "authenticate", "ticket": "t"}', '{"type": "session.update", "session_id": "s", "title": 5}', b"\x00binary", b"{}",
])
async def test_a_bad_frame_gets_an_error_and_the_socket_stays(app: Running, frame: str | bytes) -> None:
    """Whatever is wrong with it: one error event, nothing changed, and the next good frame works."""
    async with app.socket() as ws:
        await ws.ws.send(frame)
        refused = await ws.next()
        assert refused["type"] == "error" and refused["error"]["type"] == "invalid_request" and refused["error"]["message"]
        assert (await ws.answer("ping"))["type"] == "pong"
        created = await ws.answer("session.create")
        assert (await ws.say(created["session_id"], "hello"))["type"] == "response.completed"


async def test_a_frame_above_the_limit_names_it_and_closes(app: Running) -> None:
    """4097 bytes where 4096 are allowed: an error with the number, then 1009; 4096 bytes are read."""
    async with app.socket() as ws:
        pad = 4096 - len(json.dumps({"type": "ping", "event_id": ""}))
        assert (await ws.answer("ping", event_id="x" * min(pad, 200)))["type"] == "pong"
        await ws.ws.send(" " * 4097)
        refused = await ws.next()
        assert (refused["error"]["param"], refused["error"]["limit"], refused["error"]["requested"]) == ("frame_bytes", 4096, 4097)
        assert await ws.closed() == 1009
    async with app.socket() as ws:
        await ws.ws.send(" " * 100_000)                  # far above: closed without a word
        assert await ws.closed() == 1009


async def test_bad_utf8_closes_with_1007(app: Running) -> None:
    """A text frame that is no text ends the connection, and that one only."""
    async with app.socket() as ws, app.socket() as other:
        async with ws.ws.send_context():
            ws.ws.protocol.send_frame(websockets.frames.Frame(Opcode.TEXT, b"\xff\xfe{"))
        assert await ws.closed() == 1007
        assert (await other.answer("ping"))["type"] == "pong"


# ---- drops ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cut_after", [1, 2, 5, 20])
async def test_a_dropped_socket_resumes_without_gap_or_repetition(app: Running, cut_after: int) -> None:
    """Cut after n events of a running turn; another socket resumes by (epoch, seq): every event once, in order; nothing
    of the answer is lost."""
    app.config.token_delay_s = 0.01
    async with app.socket() as ws:
        created = await ws.answer("session.create")
        session_id, epoch = created["session_id"], created["epoch"]
        await ws.send("response.create", session_id=session_id, input=message(LONG))
        while sum("seq" in e for e in ws.seen) < cut_after:
            await ws.next()
        seen = [e for e in ws.seen if "seq" in e]
        ws.ws.transport.abort()
    await app.until(lambda: not app.services.sockets)
    await asyncio.sleep(0.05)                            # the turn goes on meanwhile
    async with app.socket() as ws:
        resumed = await ws.answer("session.resume", session_id=session_id, epoch=epoch, last_seq=seen[-1]["seq"])
        assert resumed["outcome"] == "lossless" and resumed["from_seq"] == seen[-1]["seq"] + 1
        if not any(e["type"] == "response.completed" for e in seen):
            await ws.until("response.completed")
        events = seen + [e for e in ws.seen if "seq" in e and e["type"] != "session.resumed"]
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert text == LONG


@pytest.mark.parametrize("cut_after", [1, 7])
async def test_the_client_library_bridges_a_drop(app: Running, cut_after: int) -> None:
    """`say` goes on over a drop as if nothing had happened: the answer is whole, and the turn ran once."""
    app.config.token_delay_s = 0.01
    async with app.client() as rk:
        chat = await rk.session()
        pieces: list[str] = []
        async for piece in chat.say(LONG):
            pieces.append(piece)
            if len(pieces) == cut_after:
                rk._socket.transport.abort()
        assert "".join(pieces) == LONG and chat.last["status"] == "completed" and rk.reconnects == 1
        assert (await app.services.store.totals(chat.id)).turns == 1


async def test_a_drop_between_request_and_answer_is_sent_again_and_runs_once(app: Running) -> None:
    """The socket goes before response.created comes: the same key is sent again; one turn, one answer."""
    app.config.token_delay_s = 0.01
    async with app.client() as rk:
        chat = await rk.session()
        ask = asyncio.create_task(chat.ask(LONG))
        await asyncio.sleep(0)
        await app.until(lambda: app.services.turns.count == 1)
        rk._socket.transport.abort()
        assert await ask == LONG
        assert (await app.services.store.totals(chat.id)).turns == 1


async def test_a_late_watcher_gets_a_snapshot_with_the_running_answer(app: Running) -> None:
    """Without a position: history, the running response with its text so far, then every further event."""
    app.config.token_delay_s = 0.01
    async with app.socket() as ws, app.socket() as late:
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.say(session_id, "before")
        await ws.send("response.create", session_id=session_id, input=message(LONG))
        for _ in range(5):
            await ws.until("response.output_text.delta")
        resumed = await late.answer("session.resume", session_id=session_id)
        assert resumed["outcome"] == "snapshot" and [i["output_text"] for i in resumed["items"]] == ["before"]
        running_turn = resumed["in_progress"]
        assert running_turn["response"]["status"] == "in_progress" and LONG.startswith(running_turn["output_text"])
        end = await late.until("response.completed")
        rest = "".join(e["delta"] for e in late.seen if e["type"] == "response.output_text.delta")
        assert running_turn["output_text"] + rest == LONG == end["response"]["output"][0]["content"][0]["text"]


async def test_positions_that_cannot_be_resumed_get_a_snapshot_with_the_reason(app: Running) -> None:
    """Another epoch, a seq that never was: a snapshot that says why."""
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.say(session_id, "hello")
        for epoch, last_seq in ((99, 1), (1, 10_000)):
            resumed = await ws.answer("session.resume", session_id=session_id, epoch=epoch, last_seq=last_seq)
            assert resumed["outcome"] == "snapshot" and resumed["reason"] and len(resumed["items"]) == 1


async def test_a_buffer_that_ran_over_is_bridged_by_a_snapshot(tmp_path) -> None:
    """Older than the replay buffer: recovered, with the history."""
    async with running(tmp_path / "data", server={"replay_events": 4}) as app, app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.say(session_id, LONG)
        resumed = await ws.answer("session.resume", session_id=session_id, epoch=1, last_seq=2)
        assert resumed["outcome"] == "recovered" and [i["output_text"] for i in resumed["items"]] == [LONG]


# ---- grace ---------------------------------------------------------------------------------------------------------
async def test_with_no_grace_an_unwatched_turn_is_cancelled_and_keeps_what_it_had(tmp_path) -> None:
    """grace_s = 0: the last watcher goes, the engine stops, history has what was produced."""
    async with running(tmp_path / "data", server={"grace_s": 0}) as app:
        app.config.token_delay_s = 0.05
        async with app.socket() as ws:
            session_id = (await ws.answer("session.create"))["session_id"]
            await ws.send("response.create", session_id=session_id, input=message(LONG))
            await ws.until("response.output_text.delta")
        await app.until(lambda: app.services.turns.count == 0)
        (turn,) = await app.services.store.turns(session_id)
        assert turn.status == "cancelled" and turn.output_text and LONG.startswith(turn.output_text)
        assert not app.engine._turns


async def test_within_the_grace_a_turn_goes_on_and_completes(app: Running) -> None:
    """grace_s = 30: closing the socket changes nothing of the turn."""
    app.config.token_delay_s = 0.002
    async with app.socket() as ws:
        session_id = (await ws.answer("session.create"))["session_id"]
        await ws.answer("response.create", session_id=session_id, input=message(LONG))
    await app.until(lambda: app.services.turns.count == 0)
    (turn,) = await app.services.store.turns(session_id)
    assert turn.status == "completed" and turn.output_text == LONG


# ---- slow readers --------------------------------------------------------------------------------------------------
async def test_a_reader_that_does_not_read_is_detached_and_resumes(tmp_path) -> None:
    """Its outbox overflows: neither engine nor other watchers wait, it is closed with 4001, and a resume brings what it
    missed."""
    async with running(tmp_path / "data", server={"outbox_events": 16, "replay_events": 100_000}) as app, app.client() as rk:
        chat = await rk.session()
        async with app.socket() as slow:
            resumed = await slow.answer("session.resume", session_id=chat.id)
            slow.ws.transport.pause_reading()
            for n in range(300):                         # more than what the kernel and the transport take between them
                delta = wire.event("response.output_text.delta", response_id="r_other", delta="x" * 100_000)
                app.services.streams.publish(chat.id, delta)
                await asyncio.sleep(0)
            await app.until(lambda: len(app.services.streams._streams[chat.id].watchers) == 1)
            assert await chat.ask("hello") == "hello"
            slow.ws.transport.resume_reading()
            assert await slow.closed() == 4001
            last_seq = max(e["seq"] for e in slow.seen if "seq" in e)
        assert last_seq < 300
        async with app.socket() as again:
            resumed = await again.answer("session.resume", session_id=chat.id, epoch=1, last_seq=last_seq)
            assert resumed["outcome"] == "lossless"
            await again.until("response.completed")
            numbers = [e["seq"] for e in again.seen if "seq" in e and e["type"] != "session.resumed"]
            assert numbers == list(range(last_seq + 1, numbers[-1] + 1))


async def test_a_peer_that_never_reads_again_is_let_go(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its detaching it does not take even the close frame: the server ends the connection by itself."""
    monkeypatch.setattr(server_socket, "CLOSE_WITHIN_S", 0.1)
    async with running(tmp_path / "data", server={"outbox_events": 4}) as app, app.client() as rk:
        chat = await rk.session()
        async with app.socket() as slow:
            await slow.answer("session.resume", session_id=chat.id)
            slow.ws.transport.pause_reading()
            for _ in range(200):
                app.services.streams.publish(chat.id, wire.event("response.output_text.delta", response_id="r", delta="x" * 100_000))
                await asyncio.sleep(0)
            await app.until(lambda: len(app.services.sockets) == 1)
            slow.ws.transport.abort()
        assert await chat.ask("hello") == "hello"
