"""The typed messages between the server and an engine, and their framing (msgpack, length-prefixed, over a Unix socket).

The same messages serve SGLang, vLLM and the scripted engine. Every request carries an id (`turn_id` or `op_id`) and is
answered by messages that carry the same id, so any number of requests is in flight at once.
"""

import asyncio
import struct
from collections.abc import Mapping
from typing import Literal

import msgspec

from kvstore.receipt import Receipt

MAX_MESSAGE_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the class name travels as the tag."""


class ImageRef(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt. Its pixels are a file named by the digest, in the image folder both sides know."""

    digest: str
    """sha256 (hex) of what the model sees: size and 8-bit RGB pixels."""
    width: int
    height: int
    grid: tuple[int, int, int]
    """Patches: time, rows, columns, after the model's own resize."""
    tokens: int
    start: int
    """Index of its first token in token_ids; its span is [start, start + tokens)."""


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """A token sequence, whole: what KV is the KV of."""

    token_ids: list[int]
    """With image placeholders expanded: one image token id per image token."""
    images: tuple[ImageRef, ...] = ()
    salt: str = ""
    """Derived from the tenant by the server. Other salt: no sharing."""
    private_from: int = 0
    """Index of the first token that belongs to this session alone (what is before it is a common system prompt)."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


# ---- server -> engine ------------------------------------------------------------------------------------------
class Generate(Message):
    turn_id: str
    session_id: str
    generation: int
    branch_id: str
    content: Content
    sampling: Sampling
    priority: int = 0


class Abort(Message):
    turn_id: str


class Verb(Message, tag=False):
    """Base of the KV verbs. `contents`: the session's branches, each as its whole token sequence."""

    op_id: str
    session_id: str
    generation: int
    contents: tuple[Content, ...]


class Spill(Verb, tag="Spill"):
    to: Literal["host", "storage"]


class Restore(Verb, tag="Restore"):
    pass


class Prefetch(Verb, tag="Prefetch"):
    pass


class Demote(Verb, tag="Demote"):
    pass


class Drop(Verb, tag="Drop"):
    pass


class Pin(Verb, tag="Pin"):
    until: float
    """Unix time, seconds; in the past: unpin."""


class Report(Message):
    """Where a session's pages are. Without contents: device figures of every session only."""

    op_id: str
    session_id: str | None = None
    contents: tuple[Content, ...] = ()


class Health(Message):
    op_id: str


class Drain(Message):
    """Finish what runs, accept nothing new, exit."""

    op_id: str


# ---- engine -> server ------------------------------------------------------------------------------------------
class Cached(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that were not computed, by the tier on which they were found."""

    device: int = 0
    host: int = 0
    storage: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    cached: Cached = Cached()


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    queue_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


class Delta(Message):
    turn_id: str
    token_ids: list[int]


class Finished(Message):
    turn_id: str
    reason: Literal["stop", "length", "abort"]
    usage: Usage
    timings: Timings = Timings()
    receipt: Receipt | None = None
    """Of the restore that this turn needed, if any."""


class Failed(Message):
    turn_id: str
    code: str
    message: str
    retryable: bool


class Done(Message):
    """Answer to a KV verb."""

    op_id: str
    receipt: Receipt


class SessionPages(msgspec.Struct, frozen=True, kw_only=True):
    """What one session has where, in tokens of whole pages. host/storage are None where they were not asked for."""

    session_id: str
    device_tokens: int = 0
    device_exclusive_tokens: int = 0
    """Of device_tokens: those freed if this session goes."""
    locked_tokens: int = 0
    """Of device_tokens: in use by a running turn."""
    host_tokens: int | None = None
    storage_tokens: int | None = None
    total_tokens: int | None = None
    """Whole-page tokens of the contents asked about."""
    reachable_tokens: int | None = None
    """Of total_tokens: those that some tier still has, counted as a prefix. Less than total: some must be recomputed."""


class Pressure(Message):
    """The device pool in pages: free + cached + in_flight == total when nothing runs."""

    free_pages: int
    used_pages: int
    in_flight_pages: int
    total_pages: int
    daemon_healthy: bool
    host_bytes: int = 0
    """Bytes LMCache holds in host memory."""
    storage_bytes: int = 0


class Ledger(Message):
    """Device pages by session. Sent unasked when something changed (op_id empty), and as the answer to a Report."""

    epoch: int
    """Rises by one with every change; starts again with the engine."""
    entries: tuple[SessionPages, ...]
    op_id: str = ""


class HealthReport(Message):
    op_id: str
    running_turns: int
    pressure: Pressure


class Drained(Message):
    op_id: str


class Ready(Message):
    """The engine accepts turns. Sent once, first."""

    engine: str
    model: str
    fingerprint: str
    page_tokens: int
    token_bytes: int
    device_tokens: int
    context_tokens: int
    capabilities: tuple[str, ...]
    """Of: spill, restore, prefetch, demote, drop, pin, images."""
    hooks: Mapping[str, str]
    """Hook name -> where it was proved to have applied."""


class Dead(Message):
    """The engine cannot start or go on; the worker exits after it."""

    code: str
    message: str


class Progress(Message):
    """While starting: what is being done, for people."""

    stage: str
    detail: str = ""


ToEngine = Generate | Abort | Spill | Restore | Prefetch | Demote | Drop | Pin | Report | Health | Drain
ToServer = Delta | Finished | Failed | Done | Ledger | Pressure | HealthReport | Drained | Ready | Dead | Progress
TurnEvent = Delta | Finished | Failed


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Channel:
    """One framed, typed connection. `receive` is for one reader; `send` may be called from any task of the loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: type) -> None:
        self._reader, self._writer = reader, writer
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(incoming).decode

    async def send(self, message: Message) -> None:
        """Raises ChannelClosed when the peer is gone, ValueError for a message above MAX_MESSAGE_BYTES."""
        data = self._encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is above the channel's {MAX_MESSAGE_BYTES}")
        try:
            self._writer.write(_LENGTH.pack(len(data)) + data)
            await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise ChannelClosed(str(error)) from error

    async def receive(self) -> Message:
        """The next message. Raises ChannelClosed at the end of the stream, msgspec.DecodeError for a foreign one."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_MESSAGE_BYTES:
                raise ChannelClosed(f"a message of {length} bytes is above the channel's {MAX_MESSAGE_BYTES}")
            return self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChannelClosed(str(error)) from error

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass                                     # it was closed from the other side: the same end
