"""One conversation as a client holds it: say something, read the answer, move its pages."""

import asyncio
import base64
import mimetypes
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cursor import Cursor
from .errors import ConnectionLost, ResponseLost, from_object

if TYPE_CHECKING:
    from .connection import Client

Image = str | Path | bytes
"""A path, a data: URL, a file id (64 hex digits) or the bytes of an image file."""

_DELTA = "response.output_text.delta"
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_FRAME_SPARE_BYTES = 4096
"""Left in a frame for all that is not image data."""


class Session:
    """Made by `Client.session` and `Client.resume`."""

    def __init__(self, client: "Client", object: dict[str, Any], cursor: Cursor, items: Sequence[dict[str, Any]] = ()) -> None:
        self.id: str = object["id"]
        self.object = object
        """The session object as last seen."""
        self.items = list(items)
        """The history as of the last snapshot."""
        self.last: dict[str, Any] | None = None
        """The last finished response of `say`: status, output, usage, receipt."""
        self.receipts: list[dict[str, Any]] = []
        """Receipts of spills and restores, in the order they were announced."""
        self.state: str = object.get("kv", {}).get("state", "empty")
        self.cursor = cursor
        self.dropped = 0
        """Events that came twice and were let through once."""
        self._client = client
        self._readers: set[asyncio.Queue[dict[str, Any]]] = set()

    # ---- events (fed by the client)
    def feed(self, event: dict[str, Any]) -> None:
        """A numbered event. Raises Gap."""
        if not self.cursor.accept(event):
            self.dropped += 1
            return
        match event["type"]:
            case "session.updated" | "session.created":
                self.object = event["session"]
            case "session.state":
                self.state = event["state"]
            case "session.spilled" | "session.restored":
                self.receipts.append(event["receipt"])
        self.tell(event)

    def tell(self, event: dict[str, Any]) -> None:
        for reader in self._readers:
            reader.put_nowait(event)

    def resumed(self, event: dict[str, Any]) -> None:
        """The answer to a resume. After a snapshot, running readers are told so that they can find their turn in it."""
        if event["outcome"] != "lossless":
            self.object, self.items = event["session"], list(event["items"])
            self.cursor.restart(event["epoch"], event["from_seq"] - 1)
            self.tell(event)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Every new event of the session, each once and in order, across reconnects, until the client closes."""
        reader: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._readers.add(reader)
        try:
            while True:
                event = await reader.get()
                if event["type"] == "client.closed":
                    raise ConnectionLost(event["reason"])
                yield event
        finally:
            self._readers.discard(reader)

    # ---- talking
    async def say(self, text: str = "", *, images: Sequence[Image] = (), **options: Any) -> AsyncGenerator[str, None]:
        """One message and its answer, as it comes. Stopping the iteration early cancels the turn.

        `options`: max_output_tokens, temperature, top_p, seed, previous_response_id, idempotency_key. A drop in the
        middle is bridged. The finished response is in `last`. Raises ApiError, ResponseLost, ConnectionLost.
        """
        content = [await self._image_part(image) for image in images]
        if text or not content:
            content.append({"type": "input_text", "text": text})
        frame = {"type": "response.create", "session_id": self.id, "input": [{"type": "message", "role": "user", "content": content}],
                 "idempotency_key": uuid.uuid4().hex, **options}
        reader: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._readers.add(reader)
        response_id, finished = None, False
        try:
            answer = await self._client.request(frame)
            response_id = answer["response"]["id"]
            if answer["type"] in _ENDS:              # the key had been used, and that turn is over
                finished = True
                yield self._finish(answer["response"])
                return
            async for piece in self._follow(response_id, reader):
                yield piece
            finished = True
        finally:
            self._readers.discard(reader)
            if response_id and not finished and not self._client.closed:
                await self._client.send({"type": "response.cancel", "session_id": self.id, "response_id": response_id})

    async def ask(self, text: str = "", *, images: Sequence[Image] = (), **options: Any) -> str:
        """`say`, waiting for the whole answer."""
        return "".join([piece async for piece in self.say(text, images=images, **options)])

    async def _follow(self, response_id: str, reader: asyncio.Queue[dict[str, Any]]) -> AsyncIterator[str]:
        seen = ""
        while True:
            event = await reader.get()
            kind = event["type"]
            if kind == _DELTA and event["response_id"] == response_id:
                seen += event["delta"]
                yield event["delta"]
            elif kind in _ENDS and event["response"]["id"] == response_id:
                if kind == "response.failed":
                    self.last = event["response"]
                    raise from_object(event["error"])
                self._finish(event["response"])
                return
            elif kind == "session.resumed":
                found = self._find(event, response_id)
                if found is None:
                    raise ResponseLost(f"{response_id} is not in the history: the server restarted in its middle")
                text, done = found
                if done:
                    yield text[len(seen):]
                    return
                seen = _keep_up(seen, text)
                if len(text) > len(seen):
                    yield text[len(seen):]
                    seen = text
            elif kind == "client.closed":
                raise ConnectionLost(event["reason"])

    def _find(self, snapshot: dict[str, Any], response_id: str) -> tuple[str, bool] | None:
        """(its text so far, whether it is over) of a response in a snapshot."""
        for item in snapshot["items"]:
            if item["response_id"] == response_id:
                self.last = {"id": response_id, "status": item["status"], "usage": item.get("usage"), "output": [
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": item["output_text"]}]}]}
                return item["output_text"], True
        running = snapshot.get("in_progress")
        return (running["output_text"], False) if running and running["response"]["id"] == response_id else None

    def _finish(self, response: dict[str, Any]) -> str:
        self.last = response
        return _text(response)

    @property
    def usage(self) -> dict[str, Any] | None:
        """Of the last finished response."""
        return self.last.get("usage") if self.last else None

    async def _image_part(self, image: Image) -> dict[str, str]:
        if isinstance(image, str) and image.startswith("data:"):
            return {"type": "input_image", "image_url": image}
        if isinstance(image, str) and len(image) == 64 and all(c in "0123456789abcdef" for c in image):
            return {"type": "input_image", "file_id": image}
        name = "" if isinstance(image, bytes) else str(image)
        data = image if isinstance(image, bytes) else await asyncio.to_thread(Path(image).read_bytes)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        if len(data) * 4 // 3 + _FRAME_SPARE_BYTES > self._client.limits["frame_bytes"] // 8:
            return {"type": "input_image", "file_id": (await self._client.upload(data, kind))["id"]}
        return {"type": "input_image", "image_url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}

    # ---- the rest
    async def cancel(self) -> None:
        """Stop the running turn; what was shown of it is kept."""
        await self._client.send({"type": "response.cancel", "session_id": self.id})

    async def typing(self) -> None:
        """A hint that a turn is coming: pages are brought back ahead of it."""
        await self._client.send({"type": "input.typing", "session_id": self.id})

    async def rename(self, title: str) -> None:
        await self._client.request({"type": "session.update", "session_id": self.id, "title": title})

    async def close(self) -> None:
        """End it for good: its KV is dropped, its transcript stays readable."""
        await self._client.request({"type": "session.close", "session_id": self.id})

    async def delete(self) -> None:
        await self._client.rest("DELETE", f"/v1/sessions/{self.id}")

    async def history(self) -> list[dict[str, Any]]:
        return (await self._client.rest("GET", f"/v1/sessions/{self.id}/items"))["data"]

    async def kv(self) -> dict[str, Any]:
        """Where its pages are, in tokens and bytes by tier."""
        return await self._client.rest("GET", f"/v1/sessions/{self.id}/kv")

    async def spill(self, to: str = "host") -> dict[str, Any]:
        """Free its device pages now (to "host" or "storage"); the receipt."""
        return await self._client.rest("POST", f"/v1/sessions/{self.id}/spill", {"to": to})

    async def move(self, verb: str, **body: Any) -> dict[str, Any]:
        """Another KV verb: restore, prefetch, demote, drop, pin (seconds=...); the receipt."""
        return await self._client.rest("POST", f"/v1/sessions/{self.id}/{verb}", body or None)


def _text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for message in response.get("output") or () for part in message["content"])


def _keep_up(seen: str, text: str) -> str:
    """After a snapshot the running answer starts again at `text`; what was shown of it is not shown twice."""
    return seen if text.startswith(seen) else text
