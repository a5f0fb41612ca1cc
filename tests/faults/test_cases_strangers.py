"""Peers that never sign in, never send a request, never read or never answer: few, for seconds, and then gone."""

import asyncio
import base64
import json
import os
import struct
from pathlib import Path

import pytest
import websockets
import websockets.asyncio.client
from hypothesis import given
from hypothesis import strategies as st

from server import protocol, transports
from server.waiting import WaitingRoom
from tests.support.app import Running, running

UPGRADE = (b"GET /v1/chat HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
           b"Sec-WebSocket-Key: " + base64.b64encode(bytes(16)) + b"\r\n")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "AUTHENTICATE_WITHIN_S", 0.5)
    monkeypatch.setattr(transports, "CLOSE_WITHIN_S", 0.2)
    monkeypatch.setattr(transports, "REQUEST_WITHIN_S", 0.5)


@pytest.fixture
async def app(tmp_path: Path):
    async with running(tmp_path / "data", server={"waiting_sockets": 12, "waiting_sockets_per_address": 8}) as app:
        yield app


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def dial(app: Running, request: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = app.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    return reader, writer


def masked(opcode: int, payload: bytes) -> bytes:
    """One whole frame of a client, with a mask of zeros."""
    length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + struct.pack(">H", len(payload))
    return bytes([0x80 | opcode]) + length + bytes(4) + payload


async def test_sockets_that_never_sign_in_are_few_and_go_by_themselves(app: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 from one address 8 are let in and 52 told busy (503); an own key is served beside them; all are closed in time
    though none answers the close, and every descriptor comes back."""
    monkeypatch.setattr(protocol, "AUTHENTICATE_WITHIN_S", 5.0)     # all 60 come before the first must go
    before = descriptors()
    peers = [await dial(app, UPGRADE + b"\r\n") for _ in range(60)]
    heads = [await reader.readline() for reader, _ in peers]
    assert sum(b" 101 " in head for head in heads) == 8 and sum(b" 503 " in head for head in heads) == 52
    async with app.client() as rk:
        assert await (await rk.session()).ask("hello") == "hello"
    await app.until(lambda: not app.services.sockets and not len(app.services.waiting))
    for reader, _ in peers:                                    # the server ends the connections: nobody here has closed one
        async with asyncio.timeout(20):
            await reader.read()
    for _, writer in peers:
        writer.close()
    await app.until(lambda: descriptors() <= before)


async def test_a_place_is_free_again_once_somebody_signs_in_or_leaves(app: Running) -> None:
    """Signed-in sockets do not count, and one that leaves makes room at once."""
    async with app.http() as http:
        tickets = [(await http.post("/v1/tickets")).json()["ticket"] for _ in range(10)]
    signed_in = []
    for ticket in tickets:                                     # more than may wait at once
        ws = await websockets.asyncio.client.connect(app.ws_url)
        await ws.send(json.dumps({"type": "authenticate", "ticket": ticket}))
        assert json.loads(await ws.recv())["type"] == "connection.authenticated"
        signed_in.append(ws)
    assert len(app.services.waiting) == 0 and len(app.services.sockets) == 10
    for _ in range(10):
        async with websockets.asyncio.client.connect(app.ws_url):
            assert len(app.services.waiting) == 1
        await app.until(lambda: not len(app.services.waiting))
    for ws in signed_in:
        await ws.close()


async def test_before_the_login_only_a_small_frame_is_read(app: Running) -> None:
    """4097 bytes are refused by the number and end the connection with 1009; after the login they are read."""
    async with websockets.asyncio.client.connect(app.ws_url) as ws:
        await ws.send(" " * 4097)
        told = json.loads(await ws.recv())
        assert (told["error"]["param"], told["error"]["limit"], told["error"]["requested"]) == ("frame_bytes", 4096, 4097)
        with pytest.raises(websockets.ConnectionClosed):
            await ws.recv()
        assert ws.close_code == 1009
    async with app.socket() as frames:
        await frames.ws.send(" " * 4097)
        assert (await frames.next())["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", UPGRADE, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_connection_without_a_request_is_closed(app: Running, sent: bytes) -> None:
    """Nothing, half a request head, half a handshake, or an answered request and nothing more."""
    reader, writer = await dial(app, sent)
    async with asyncio.timeout(20):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200") if sent.endswith(b"\r\n\r\n") else answer == b""
    writer.close()


async def test_a_slow_answer_is_not_cut(app: Running) -> None:
    """A request whose answer takes longer than a request may take to come is answered."""
    app.config.token_delay_s = 0.4
    async with app.http() as http:
        session = (await http.post("/v1/sessions", json={})).json()
        answer = await http.post(f"/v1/sessions/{session['id']}/responses", json={"input": "one two three four five"})
    assert answer.json()["output_text"] == "one two three four five"


async def test_a_peer_that_pings_and_never_reads_is_cut_off(app: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers it does not read are bounded; other sockets go on."""
    monkeypatch.setattr(transports, "MAX_UNREAD_BYTES", 1 << 16)
    reader, writer = await dial(app, UPGRADE + f"Authorization: Bearer {app.key}\r\n\r\n".encode())
    await reader.readline()
    writer.transport.pause_reading()
    pings = masked(0x9, bytes(125)) * 1000
    with pytest.raises(ConnectionError):
        for _ in range(2000):
            writer.write(pings)
            async with asyncio.timeout(20):
                await writer.drain()
    await app.until(lambda: not app.services.sockets)
    async with app.socket() as frames:
        assert (await frames.answer("ping"))["type"] == "pong"
    writer.close()


async def test_bad_utf8_leaves_no_trace_in_the_log(app: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Whole or in fragments: 1007 and no record of an error; a character cut by a fragment is none."""
    for frames, code in ((masked(1, b"\xff\xfe"), 1007), (b"\x01\x81" + bytes(4) + b"\xc3" + masked(0, b"("), 1007),
                         (b"\x01\x81" + bytes(4) + b"\xc3" + masked(0, b"\xa9"), None)):
        reader, writer = await dial(app, UPGRADE + f"Authorization: Bearer {app.key}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"}}")                          # connection.ready
        writer.write(frames)
        async with asyncio.timeout(20):
            if code is None:
                assert b"invalid_json" in await reader.readuntil(b"invalid_json")
            else:
                assert b"\x88\x02" + struct.pack(">H", code) in await reader.read()
        writer.close()
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL") or record.exc_info]


# ---- the room ------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=80))
def test_the_room_never_holds_more_than_it_may(steps: list[tuple[bool, str]]) -> None:
    """At most 5 in all and 3 of one address; who is refused could not have been let in; who left makes room."""
    room, inside = WaitingRoom(5, 3), []
    for enters, address in steps:
        if enters:
            fits = len(inside) < 5 and inside.count(address) < 3
            assert room.enter(address) is fits
            inside += [address] * fits
        elif address in inside:
            room.leave(address)
            inside.remove(address)
        assert len(room) == len(inside)
