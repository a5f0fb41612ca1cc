"""The WebSocket shell of `protocol.py`: the upgrade, one reader, one bounded writer, the commands."""

import asyncio
from collections.abc import Callable

import structlog
from fastapi import Response, WebSocket, WebSocketDisconnect

from . import codec, views, wire
from .auth import AuthError, Forbidden, Principal
from .failures import RETRY_AFTER_MS, error_object
from .outbox import Outbox
from .protocol import (
    Announce,
    Attach,
    CheckTicket,
    Command,
    Connection,
    Hangup,
    IllegalInput,
    Run,
    Send,
    State,
    error_event,
)
from .run import Answered
from .run import Run as Turn
from .runtime import Services
from .streams import Event, Origin

log = structlog.get_logger(__name__)

CLOSE_WITHIN_S = 5.0
"""How long a closing socket may take to read what is queued for it."""


async def chat(websocket: WebSocket, services: Services) -> None:
    """GET /v1/chat. Origin, subprotocol and a login in the header are checked before the upgrade."""
    refusal = await _refuse_upgrade(websocket, services)
    if isinstance(refusal, Response):
        await websocket.send_denial_response(refusal)
        return
    address = websocket.client.host if websocket.client is not None else ""
    if refusal is None and not services.waiting.enter(address):
        told = wire.ErrorObject("overloaded", "too_many_waiting", "too many sockets wait to be signed in", retryable=True,
                                retry_after_ms=RETRY_AFTER_MS)
        await websocket.send_denial_response(services.refusal(told))
        return
    leave = Once(lambda: services.waiting.leave(address) if refusal is None else None)
    try:
        offered = websocket.scope.get("subprotocols") or []
        await websocket.accept(subprotocol=wire.SUBPROTOCOL if offered else None)
        await Socket(websocket, services, principal=refusal, signed_in=leave).serve()
    finally:
        leave()


class Once:
    """Calls it at the first call, and never again."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


async def _refuse_upgrade(websocket: WebSocket, services: Services) -> Response | Principal | None:
    """The HTTP answer that refuses, or who asks (None: not known yet, a ticket must come)."""
    offered = websocket.scope.get("subprotocols") or []
    if offered and wire.SUBPROTOCOL not in offered:
        return services.refusal(wire.ErrorObject("invalid_request", "subprotocol_unknown", f"this server speaks {wire.SUBPROTOCOL}",
                                                 param="Sec-WebSocket-Protocol"), 400)
    try:
        services.auth.check_origin(websocket.headers.get("origin"), websocket.headers.get("host"))
        header = websocket.headers.get("authorization")
        if header is None:
            return None
        principal = await services.auth.bearer(header)
        if not principal.may_chat:
            raise Forbidden("this key reads metrics only")
        return principal
    except AuthError as error:
        return services.refusal(error_object(error))


class Socket:
    """A watcher of any number of sessions."""

    def __init__(self, websocket: WebSocket, services: Services, principal: Principal | None, signed_in: Callable[[], None]) -> None:
        self._websocket, self._services, self._principal, self._signed_in = websocket, services, principal, signed_in
        self._connection = Connection(frame_bytes=services.settings.server.frame_bytes)
        self._outbox = Outbox(services.settings.server.outbox_events)
        self._queued, self._sent = asyncio.Event(), asyncio.Event()
        self._hangup: Hangup | None = None
        self._closing = asyncio.Event()
        self._watching: set[str] = set()
        self._started: set[asyncio.Task[None]] = set()

    # ---- a watcher
    def deliver(self, event: Event) -> None:
        if self._hangup is not None:
            return
        if self._outbox.put(event):
            self._queued.set()
            return
        log.info("slow_reader_detached", waiting_events=len(self._outbox))
        self._services.metrics.slow_reader()
        self._outbox.clear()                         # it resumes by seq
        for command in self._connection.slow_reader():
            self._do_now(command)

    def replay(self, events: list[Event]) -> None:
        if self._hangup is None:
            self._outbox.replay(events)
            self._queued.set()

    def announce(self, event: Event) -> None:
        """An event that is for every client, engine.state say."""
        if self._connection.state is State.READY:
            self.deliver(event)

    # ---- life
    async def serve(self) -> None:
        self._services.sockets.add(self)
        writer = asyncio.create_task(self._write(), name="socket writer")
        reader = asyncio.create_task(self._read(), name="socket reader")
        closing = asyncio.create_task(self._closing.wait(), name="socket closing")
        try:
            await asyncio.wait({writer, reader, closing}, return_when=asyncio.FIRST_COMPLETED)
            if self._hangup is not None and not writer.done():
                await asyncio.wait({writer}, timeout=CLOSE_WITHIN_S)     # a slow reader may never take what is queued
        finally:
            self._services.sockets.discard(self)
            self._connection.lost()
            self._detach_all()
            tasks = (reader, writer, closing, *self._started)
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                    log.error("socket_failed", exc_info=result)

    def shutdown(self) -> None:
        """The server goes down."""
        for command in self._connection.shutdown():
            self._do_now(command)

    def _tick(self) -> None:
        for command in self._connection.tick(asyncio.get_running_loop().time()):
            self._do_now(command)

    async def _write(self) -> None:
        while True:
            event = self._outbox.pop()
            if event is not None:
                await self._websocket.send_text(codec.encode_event(event))
                self._sent.set()
            elif self._hangup is not None:
                await self._websocket.close(self._hangup.code, self._hangup.reason)
                return
            else:
                self._queued.clear()
                await self._queued.wait()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        await self._do(self._connection.opened(authenticated=self._principal is not None, now_s=loop.time()))
        if self._connection.deadline_s is not None:
            loop.call_at(self._connection.deadline_s + 0.001, self._tick)        # after the login it finds nothing to do
        while self._hangup is None:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            size = len(message["bytes"]) if text is None else len(text.encode())
            if size > self._connection.frame_limit_bytes:
                await self._do(self._connection.too_big(size))
            elif text is None:
                await self._do(self._connection.refuse(wire.ErrorObject("invalid_request", "binary_frame", "frames are JSON text")))
            else:
                await self._take(text)
        await asyncio.Event().wait()                 # the writer ends the connection

    async def _take(self, text: str) -> None:
        try:
            frame = codec.decode_frame(text)
        except codec.BadFrame as error:
            self._services.refused(error_object(error), error)
            await self._do(self._connection.refuse(error_object(error), error.event_id))
            return
        try:
            await self._do(self._connection.receive(frame))
        except Exception as error:                   # noqa: BLE001 - whatever a frame caused is that frame's answer
            self._refuse(error, frame.event_id, getattr(frame, "session_id", None))

    # ---- commands
    async def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case CheckTicket():
                    await self._check_ticket(command)
                case Attach():
                    await self._services.conversations.attach(self._who, command.session_id, self)
                    self._watch(command.session_id)
                case Run():
                    await self._run(command.frame)
                case _:
                    self._do_now(command)

    def _do_now(self, command: Command) -> None:
        match command:
            case Send():
                self.deliver(command.event)
            case Announce():
                self.deliver(self._services.ready_event())
            case Hangup():
                self._hangup = command
                self._detach_all()
                self._queued.set()
                self._closing.set()

    async def _check_ticket(self, command: CheckTicket) -> None:
        try:
            self._principal = await self._services.auth.redeem(command.ticket)
        except AuthError as error:
            await self._do(self._connection.ticket_refused(error_object(error), command.event_id))
            return
        self._signed_in()
        await self._do(self._connection.ticket_accepted(
            tenant=self._who.tenant_id, role=str(self._who.role), token=self._services.auth.token_for(self._who),
            event_id=command.event_id))

    @property
    def _who(self) -> Principal:
        assert self._principal is not None           # the protocol runs nothing before the login
        return self._principal

    async def _run(self, frame: wire.ClientFrame) -> None:
        services, who, origin = self._services, self._who, Origin(self, frame.event_id)
        match frame:
            case wire.SessionCreate():
                self._watch((await services.conversations.create(who, frame.session, self, frame.event_id)).id)
            case wire.SessionResume():
                while self._outbox.replaying:        # one at a time: a peer that asks and does not read holds one snapshot
                    self._sent.clear()
                    await self._sent.wait()
                await services.conversations.resume(who, frame, self)
                self._watch(frame.session_id)
            case wire.SessionUpdate():
                await services.conversations.rename(who, frame.session_id, frame.title, origin)
            case wire.SessionClose():
                await services.conversations.close(who, frame.session_id, origin)
            case wire.InputTyping():
                await services.conversations.typing(who, frame.session_id)
            case wire.ResponseCancel():
                session = await services.conversations.find(who, frame.session_id)
                services.turns.cancel(session.id, frame.response_id)
            case wire.ResponseCreate():
                claimed = await services.turns.claim(who, frame, origin)
                task = asyncio.create_task(self._answer(claimed, frame))
                self._started.add(task)
                task.add_done_callback(self._started.discard)

    async def _answer(self, claimed: Turn | Answered, frame: wire.ResponseCreate) -> None:
        """Tell a refusal; and for a used idempotency key the response it belongs to."""
        run = claimed.run if isinstance(claimed, Answered) else claimed
        try:
            response = await asyncio.shield(run.accepted) if run is not None else claimed.response
        except Exception as error:                   # noqa: BLE001 - the same
            self._refuse(error, frame.event_id, frame.session_id)
            return
        if isinstance(claimed, Answered) and response is not None:
            kind = "response.created" if response.status == "in_progress" else views.end_event(response.status)
            self.deliver(wire.event(kind, session_id=frame.session_id, response=response) | (
                {} if frame.event_id is None else {"event_id": frame.event_id}))

    def _refuse(self, error: Exception, event_id: str | None, session_id: str | None) -> None:
        told = error_object(error)
        self._services.refused(told, error)
        self.deliver(error_event(told, event_id=event_id, session_id=session_id))

    # ---- attachments
    def _watch(self, session_id: str) -> None:
        self._watching.add(session_id)
        try:
            self._connection.attached(session_id)
        except IllegalInput:                         # it was closed while the services worked
            self._services.streams.detach(session_id, self)

    def _detach_all(self) -> None:
        for session_id in self._watching:
            self._services.streams.detach(session_id, self)
        self._watching.clear()
