"""uvicorn's two protocols with patience that ends: a peer that sends no request, never reads or never answers a close costs
a descriptor for seconds, not for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

REQUEST_WITHIN_S = 10.0
"""A connection that has brought no whole request head for so long, and waits for no answer, is closed."""
CLOSE_WITHIN_S = 2.0
"""How long a peer may take to answer a close, or to read what was sent before it."""
MAX_UNREAD_BYTES = 1 << 20
"""A peer that pings and does not read the answers is cut off here."""


class Http(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two classes, by what is installed
    _seen: Any = None
    """The request that was there at the last look."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(REQUEST_WITHIN_S, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()                   # what it does not read keeps it open otherwise
        elif self.transport.get_protocol() is self:  # else it has become a WebSocket
            answered = self.cycle is None or self.cycle.response_complete
            if answered and self.cycle is self._seen:
                self.transport.close()
            self._seen = self.cycle
            self._look_later()


class WebSocket(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = CLOSE_WITHIN_S

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._end()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True           # refused with an answer of ours; uvicorn would log it as an error

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._end()

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self._end()

    def _end(self) -> None:
        """A closing transport waits until all is read; this one does not wait longer than the peer is given."""
        self.loop.call_later(self.close_timeout + 0.1, self.transport.abort)

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        """Bad UTF-8 is the peer's mistake, no error of ours: closed with 1007, without a trace in the log."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                self.frames = [b"".join(self.frames)]
                self.frames[0].decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()
