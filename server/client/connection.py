"""The connection: one WebSocket for any number of sessions, opened again after a drop, without loss or repetition."""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import websockets.asyncio.client
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

from .cursor import Cursor, Gap
from .errors import AuthenticationFailed, ConnectionLost, from_object
from .rest import Rest, http_url
from .session import Session

SUBPROTOCOL = "rekindle.v1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_REJECTED_STATUS = (400, 401, 403, 404)
_DEFAULT_LIMITS = {"frame_bytes": 16 << 20}


def ws_url(url: str) -> str:
    """Any form of the server's address as that of its WebSocket."""
    parts = urlsplit(http_url(url))
    return urlunsplit(("wss" if parts.scheme == "https" else "ws", parts.netloc, "/v1/chat", "", ""))


class Client:
    """Use `connect`. `reconnect_s`: how long to try again after a drop before ConnectionLost is raised."""

    def __init__(self, url: str, key: str | None, *, ticket: str | None = None, reconnect_s: float = 60.0) -> None:
        self._url, self._key, self._ticket, self._reconnect_s = ws_url(url), key, ticket, reconnect_s
        self._rest = Rest(url, key)
        self._ids = (f"c{n}" for n in itertools.count(1))
        self._waiting: dict[str, tuple[dict[str, Any], asyncio.Future[dict[str, Any]]]] = {}
        self._sessions: dict[str, Session] = {}
        self._socket: websockets.asyncio.client.ClientConnection | None = None
        self._online = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self.closed = False
        self.limits: dict[str, Any] = dict(_DEFAULT_LIMITS)
        """As announced by the server."""
        self.engine: dict[str, Any] = {}
        """State of engine and daemon as last announced."""
        self.reconnects = 0

    # ---- use
    async def session(self, **request: Any) -> Session:
        """A new session. `request`: instructions, title, max_turns, budgets."""
        event = await self.request({"type": "session.create", "session": request})
        return self._sessions[event["session_id"]]

    async def resume(self, session_id: str) -> Session:
        """An existing session, with its history in `items`."""
        await self.request({"type": "session.resume", "session_id": session_id})
        return self._sessions[session_id]

    async def sessions(self) -> list[dict[str, Any]]:
        return (await self.rest("GET", "/v1/sessions"))["data"]

    async def rest(self, method: str, path: str, body: Any = None) -> Any:
        return await asyncio.to_thread(self._rest.call, method, path, body)

    async def upload(self, image: bytes, media_type: str = "application/octet-stream") -> dict[str, Any]:
        return await asyncio.to_thread(self._rest.upload, image, media_type)

    async def request(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Send a frame and wait for its answer. Raises ApiError for an error event, ConnectionLost.

        After a drop the frame is sent again if that is safe (a turn carries an idempotency key; resume and update may be
        repeated); a session.create is not, and raises ConnectionLost.
        """
        event_id = next(self._ids)
        frame = {**frame, "event_id": event_id}
        answer = asyncio.get_running_loop().create_future()
        self._waiting[event_id] = (frame, answer)
        try:
            await self.send(frame)
            return await answer
        finally:
            self._waiting.pop(event_id, None)

    async def send(self, frame: dict[str, Any]) -> None:
        """Send without waiting for an answer. A frame that waits for an answer is sent again after a drop by itself."""
        if self.closed:
            raise ConnectionLost("the client is closed")
        if self._online.is_set() and self._socket is not None:
            try:
                await self._socket.send(json.dumps(frame))
            except ConnectionClosed:
                pass                                 # the reader sees it too and comes back

    # ---- life
    async def open(self) -> None:
        """Connect and wait for connection.ready. Raises ConnectionLost, AuthenticationFailed."""
        await self._dial()
        self._reader = asyncio.create_task(self._read())

    async def aclose(self) -> None:
        self.closed = True
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._give_up("the client was closed")

    async def _dial(self) -> None:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            socket = await websockets.asyncio.client.connect(
                self._url, additional_headers=headers, subprotocols=[Subprotocol(SUBPROTOCOL)], max_size=None, compression=None)
        except InvalidHandshake as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in _REJECTED_STATUS:
                raise AuthenticationFailed({"type": "authentication", "code": f"http_{status}",
                                            "message": "the server refused the connection"}) from error
            raise ConnectionLost(str(error)) from error
        except (OSError, EOFError, TimeoutError) as error:
            raise ConnectionLost(f"{self._url}: {error}") from error
        try:
            if self._ticket:
                await socket.send(json.dumps({"type": "authenticate", "ticket": self._ticket}))
            while (event := json.loads(await socket.recv()))["type"] != "connection.ready":
                if event["type"] == "error":
                    raise from_object(event["error"])
        except ConnectionClosed as error:
            raise ConnectionLost(str(error)) from error
        self.limits, self.engine = event["limits"], event.get("engine", {})
        self._socket = socket
        self._online.set()

    async def _read(self) -> None:
        while True:
            assert self._socket is not None
            try:
                async for raw in self._socket:
                    self._take(json.loads(raw))
                reason = f"the server closed the connection ({self._socket.close_code})"
            except ConnectionClosed as error:
                reason = str(error)
            except Gap as gap:
                reason = str(gap)
                await self._socket.close(4000, "gap")
            self._online.clear()
            code = self._socket.close_code or 1006
            if self.closed or code >= 4500 or code == 1008 or not await self._come_back():
                self._give_up(reason)
                return

    async def _come_back(self) -> bool:
        """Dial until it works, resume every session, send again what waits for an answer. False: time is up."""
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + self._reconnect_s, _FIRST_PAUSE_S
        while True:
            try:
                await self._dial()
                break
            except AuthenticationFailed:
                return False
            except ConnectionLost:
                if loop.time() + pause_s > until:
                    return False
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        self.reconnects += 1
        for session in self._sessions.values():
            await self.send({"type": "session.resume", "event_id": next(self._ids), "session_id": session.id,
                             "epoch": session.cursor.epoch, "last_seq": session.cursor.seq})
        for frame, answer in list(self._waiting.values()):
            if frame["type"] == "session.create":
                if not answer.done():
                    answer.set_exception(ConnectionLost("dropped while a session was being made; it may exist"))
            else:
                await self.send(frame)
        return True

    # ---- events
    def _take(self, event: dict[str, Any]) -> None:
        session_id: str = event.get("session_id") or ""
        kind = event["type"]
        if kind == "session.created":
            self._sessions[session_id] = Session(self, event["session"], Cursor(event["epoch"], event["seq"] - 1))
        elif kind == "session.resumed":
            known = self._sessions.get(session_id)
            if known is None:
                self._sessions[session_id] = Session(self, event["session"], Cursor(event["epoch"], event["from_seq"] - 1),
                                                     event["items"])
            else:
                known.resumed(event)
        elif kind == "engine.state":
            self.engine = event
        session = self._sessions.get(session_id)
        if session is not None and "seq" in event and kind != "session.resumed":
            session.feed(event)
        self._answer(event)

    def _answer(self, event: dict[str, Any]) -> None:
        _, answer = self._waiting.get(event.get("event_id") or "", (None, None))
        if answer is None or answer.done():
            return
        if event["type"] == "error":
            answer.set_exception(from_object(event["error"]))
        else:
            answer.set_result(event)

    def _give_up(self, reason: str) -> None:
        self.closed = True
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(reason))
        for session in self._sessions.values():
            session.tell({"type": "client.closed", "reason": reason})


@asynccontextmanager
async def connect(url: str = "http://127.0.0.1:8080", key: str | None = None, **options: Any) -> AsyncIterator[Client]:
    """`async with connect(url, key) as rk:`. `options`: ticket, reconnect_s."""
    client = Client(url, key, **options)
    await client.open()
    try:
        yield client
    finally:
        await client.aclose()
