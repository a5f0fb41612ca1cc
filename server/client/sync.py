"""The same for programs without asyncio: a few lines over the async client, run on a loop of its own thread."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, Self

from .connection import Client
from .session import Session


class Rekindle:
    """`with Rekindle(url, key) as rk: chat = rk.session(); print(chat.ask("Hello"))`."""

    def __init__(self, url: str = "http://127.0.0.1:8080", key: str | None = None, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rekindle-client", daemon=True)
        self._thread.start()
        self._client = self._run(_make(url, key, options))

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        self._run(self._client.open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def session(self, **request: Any) -> "Chat":
        return Chat(self, self._run(self._client.session(**request)))

    def resume(self, session_id: str) -> "Chat":
        return Chat(self, self._run(self._client.resume(session_id)))


class Chat:
    """A session, blocking. `session` is the async one: `usage`, `last`, `receipts`, `state` are read from it."""

    def __init__(self, owner: Rekindle, session: Session) -> None:
        self._owner, self.session = owner, session

    def say(self, text: str = "", **options: Any) -> Iterator[str]:
        """The answer, piece by piece."""
        pieces = self.session.say(text, **options)
        try:
            while True:
                try:
                    yield self._owner._run(anext(pieces))
                except StopAsyncIteration:
                    return
        finally:
            self._owner._run(pieces.aclose())

    def ask(self, text: str = "", **options: Any) -> str:
        """The whole answer."""
        return self._owner._run(self.session.ask(text, **options))

    def spill(self, to: str = "host") -> dict[str, Any]:
        return self._owner._run(self.session.spill(to))


async def _make(url: str, key: str | None, options: dict[str, Any]) -> Client:
    return Client(url, key, **options)               # on the loop it will live on
