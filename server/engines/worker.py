"""The process that hosts one engine: `python -m server.engines.worker --socket PATH --kind KIND --config JSON_OR_FILE`.

It connects to the socket on which the server listens, starts the engine, says Ready (or Dead, and exits), and then serves
the channel's messages, each in a task of its own. It exits when the server closes the channel, on SIGTERM, and when the
engine has died: a worker without an engine is of no use, and its exit is what the supervisor watches.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from kvstore.receipt import Outcome, Receipt

from . import config, unix
from .base import Engine, EngineStartError, EngineUnavailable
from .channel import (
    Abort,
    Channel,
    ChannelClosed,
    Dead,
    Done,
    Drain,
    Drained,
    Failed,
    Generate,
    Health,
    Message,
    Report,
    ToEngine,
    Verb,
)
from .scripted import VERBS, ScriptedConfig, ScriptedEngine

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""The longest that the engine may take to close, and the last messages to leave."""


def build(kind: str, text: str) -> Engine:
    """`text`: the kind's configuration as JSON. Raises ValueError (msgspec's, naming the field) where it does not fit."""
    if kind == "scripted":
        return ScriptedEngine(msgspec.json.decode(text, type=ScriptedConfig))
    if kind == "sglang":
        from .sglang import SGLangEngine  # loads torch

        return SGLangEngine(config.decode(text))
    raise ValueError(f"{kind} is no kind of engine")


class Worker:
    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: set[asyncio.Task[None]] = set()
        self._draining = False
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stop(self, code: int = 0) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    async def serve(self) -> int:
        """Until the channel closes, `stop` is called or the engine dies. Returns the exit code."""
        sender = asyncio.create_task(self._send())
        self._spawn(self._receive(), fatal=True)
        self._spawn(self._start(), fatal=True)
        code = await self._exit
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = asyncio.gather(self._engine.close(), self._outbox.join())
        try:
            await asyncio.wait_for(closing, CLOSE_S)
        except TimeoutError:
            log.warning("the engine did not close within %g s", CLOSE_S)
        sender.cancel()
        await self._channel.close()
        return code

    async def _start(self) -> None:
        try:
            ready = await self._engine.start(self._outbox.put_nowait)
        except EngineStartError as error:
            self._die("engine_start_failed", str(error))
        else:
            self._outbox.put_nowait(ready)

    async def _send(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._channel.send(message)
            except ChannelClosed:
                self.stop()                                          # nobody is left to tell; what is queued is dropped
            finally:
                self._outbox.task_done()

    async def _receive(self) -> None:
        try:
            while True:
                self._dispatch(await self._channel.receive())
        except ChannelClosed:
            self.stop()

    def _dispatch(self, message: Message) -> None:
        match message:
            case Generate():
                task = self._spawn(self._generate(message))
                self._turns.add(task)
                task.add_done_callback(self._turns.discard)
            case Abort():
                self._spawn(self._engine.abort(message.turn_id))
            case Verb():
                self._spawn(self._run(message))
            case Report():
                self._spawn(self._report(message))
            case Health():
                self._spawn(self._health(message))
            case Drain():
                self._draining = True
                self._spawn(self._drain(message))

    async def _generate(self, turn: Generate) -> None:
        if self._draining:
            self._outbox.put_nowait(Failed(turn_id=turn.turn_id, code="draining", message="the engine accepts no new turns", retryable=True))
            return
        try:
            async for event in self._engine.generate(turn):
                self._outbox.put_nowait(event)
                if isinstance(event, Failed) and event.code == "engine_died":
                    self._die(event.code, event.message)
        except EngineUnavailable as error:
            self._outbox.put_nowait(Failed(turn_id=turn.turn_id, code="engine_died", message=str(error), retryable=True))
            raise
        except Exception as error:
            log.exception("turn %s", turn.turn_id)
            self._outbox.put_nowait(Failed(turn_id=turn.turn_id, code="engine_error", message=f"{type(error).__name__}: {error}", retryable=False))

    async def _run(self, verb: Verb) -> None:
        try:
            receipt = await self._engine.run(verb)
        except EngineUnavailable:
            raise
        except Exception as error:
            log.exception("%s", type(verb).__name__)
            receipt = Receipt(f"kv_{verb.op_id}", VERBS[type(verb)], verb.session_id, verb.generation, outcome=Outcome.FAILED, reason=str(error))
        self._outbox.put_nowait(Done(op_id=verb.op_id, receipt=receipt))

    async def _report(self, request: Report) -> None:
        self._outbox.put_nowait(msgspec.structs.replace(await self._engine.report(request), op_id=request.op_id))

    async def _health(self, request: Health) -> None:
        self._outbox.put_nowait(msgspec.structs.replace(await self._engine.health(), op_id=request.op_id))

    async def _drain(self, request: Drain) -> None:
        if self._turns:
            await asyncio.wait(self._turns)
        self._outbox.put_nowait(Drained(op_id=request.op_id))
        self.stop()

    def _die(self, code: str, message: str) -> None:
        if not self._exit.done():
            self._outbox.put_nowait(Dead(code=code, message=message))
            self.stop(1)

    def _spawn(self, work: Coroutine[Any, Any, None], *, fatal: bool = False) -> asyncio.Task[None]:
        """Run it beside the others. An error in it is logged, and ends the worker if it is `fatal` or the engine's death."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled() or (error := task.exception()) is None:
                return
            log.error("the worker could not do its work", exc_info=error)
            if fatal or isinstance(error, EngineUnavailable):
                self._die("engine_died", f"{type(error).__name__}: {error}")

        task.add_done_callback(ended)
        return task


async def serve(engine: Engine, socket_path: Path) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=unix.connect(socket_path))
    worker = Worker(engine, Channel(reader, writer, ToEngine))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    return await worker.serve()


def main() -> None:
    parser = argparse.ArgumentParser(prog="rekindle engine worker")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket on which the server listens")
    parser.add_argument("--kind", required=True, help="sglang or scripted")
    parser.add_argument("--config", default="{}", help="the engine's configuration: a JSON object, or the name of a file with one")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    text = args.config if args.config.lstrip().startswith("{") else Path(args.config).read_text()
    sys.exit(asyncio.run(serve(build(args.kind, text), args.socket)))


if __name__ == "__main__":
    main()
