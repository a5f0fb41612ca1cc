"""The server's side of an engine in a worker process: implements `base.Engine` over the channel.

When the worker is gone, by itself or by `close`, every running turn ends with Failed(engine_died, retryable), every call
raises EngineUnavailable, and the whole process tree is killed. One RemoteEngine is one life of one worker; the supervisor
makes the next.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvstore.receipt import Outcome, Receipt

from ..processes import Child, LogFile
from . import channel, unix
from .base import EngineStartError, EngineUnavailable, Listener
from .channel import (
    Abort,
    Channel,
    ChannelClosed,
    Dead,
    Delta,
    Failed,
    Finished,
    Generate,
    Message,
    Progress,
    Ready,
    ToServer,
    TurnEvent,
)
from .scripted import VERBS

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True)
class Timeouts:
    start_s: float = 600.0
    verb_s: float = 60.0
    call_s: float = 10.0
    """Of report and health."""
    stop_s: float = 5.0
    """What a worker is given to close before it is killed."""


class RemoteEngine:
    """`argv`: the worker's command line without its socket. `on_exit(returncode, reason)` is told, once, of a death after
    a successful start that nobody asked for."""

    def __init__(self, argv: Sequence[str], *, run_folder: Path, log_file: LogFile, env: Mapping[str, str],
                 timeouts: Timeouts = Timeouts(), on_exit: Callable[[int | None, str], None] | None = None) -> None:
        self._argv, self._run_folder, self._log_file, self._env = list(argv), run_folder, log_file, env
        self._timeouts, self._on_exit = timeouts, on_exit
        self._turns: dict[str, asyncio.Queue[TurnEvent]] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._child: Child | None = None
        self._channel: Channel | None = None
        self._living: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._down = "it has not been started"
        self._last_words = ""
        self.late_messages = 0
        """Answers to what nobody waits for any more."""

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    # ---- life --------------------------------------------------------------------------------------------------
    async def start(self, listen: Listener) -> Ready:
        """Raises EngineStartError where the engine says that it cannot, EngineUnavailable where its worker just died."""
        self._listen = listen
        path = self._run_folder / "engine.sock"
        connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if connected.done():
                writer.close()                                  # the worker connects once
            else:
                connected.set_result(Channel(reader, writer, ToServer))

        server = await asyncio.start_unix_server(accept, sock=unix.listen(path))
        try:
            self._child = await Child.spawn("engine", [*self._argv, "--socket", str(path)], run_folder=self._run_folder,
                                            log=self._log_file, env=self._env)
            async with asyncio.timeout(self._timeouts.start_s):
                link, ready = await self._become_ready(self._child, connected)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise EngineStartError(f"the engine was not ready within {self._timeouts.start_s:g} s") from error
            raise
        finally:
            server.close()
            path.unlink(missing_ok=True)
        self._down = ""
        self._living = asyncio.create_task(self._live(link, self._child), name="engine channel")
        return ready

    async def _become_ready(self, child: Child, connected: "asyncio.Future[Channel]") -> tuple[Channel, Ready]:
        exited = asyncio.create_task(child.wait())
        either: set[asyncio.Future[Any]] = {exited, connected}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not connected.done():
                raise EngineUnavailable(f"the worker exited with {exited.result()} before it connected")
            link = self._channel = connected.result()
            while True:
                match await link.receive():
                    case Ready() as ready:
                        return link, ready
                    case Dead() as dead:
                        raise EngineStartError(dead.message)
                    case message:
                        self._route(message)
        except ChannelClosed:
            raise EngineUnavailable(f"the worker exited with {await exited} while starting") from None
        finally:
            exited.cancel()

    async def _live(self, link: Channel, child: Child) -> None:
        """From Ready to the worker's end."""
        reading, exited = asyncio.create_task(self._read(link)), asyncio.create_task(child.wait())
        await asyncio.wait({reading, exited}, return_when=asyncio.FIRST_COMPLETED)
        # Its last words, or its exit: a forked grandchild may hold the socket open, a hung worker may outlive it.
        await asyncio.wait({reading, exited}, timeout=1)
        reading.cancel()
        asked_for = bool(self._down)
        if not asked_for:
            self._fail(self._last_words or f"its worker exited with {child.returncode}")
        await child.stop(self._timeouts.stop_s if asked_for else 0)
        await exited
        await link.close()
        if not asked_for and self._on_exit:
            self._on_exit(child.returncode, self._down)

    async def _read(self, link: Channel) -> None:
        try:
            while True:
                self._route(await link.receive())
        except ChannelClosed:
            return
        except msgspec.DecodeError as error:
            self._last_words = f"its worker said something that is no message: {error}"

    def _route(self, message: Message) -> None:
        match message:
            case channel.Done():
                self._answer(message.op_id, message.receipt)
            case channel.HealthReport() | channel.Drained():
                self._answer(message.op_id, message)
            case channel.Ledger() if message.op_id:
                self._answer(message.op_id, message)
            case channel.Ledger() | channel.Pressure() | Progress():
                self._listen(message)
            case Delta() | Finished() | Failed():
                if message.turn_id in self._turns:
                    self._turns[message.turn_id].put_nowait(message)
                else:
                    self.late_messages += 1
            case Dead():
                self._last_words = message.message
            case Ready():
                log.warning("the worker said Ready twice")

    def _answer(self, op_id: str, answer: Receipt | Message) -> None:
        future = self._calls.get(op_id)
        if future is None or future.done():
            self.late_messages += 1
        else:
            future.set_result(answer)

    def _fail(self, reason: str) -> None:
        self._down = reason
        for turn_id, events in self._turns.items():
            events.put_nowait(_died(turn_id, reason))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineUnavailable(reason))

    async def close(self) -> None:
        if not self._down:
            self._fail("it was closed")
        if self._living:
            if self._child and self._child.returncode is None:
                await self._child.stop(self._timeouts.stop_s)
            await asyncio.wait({self._living})
        elif self._child:                                       # it never became ready
            await self._child.stop(0)
            if self._channel:
                await self._channel.close()

    async def drain(self, timeout_s: float) -> None:
        """Let running turns end and the worker exit; new turns fail. Raises EngineUnavailable, also past the timeout."""
        await self._call(channel.Drain(op_id=_op_id()), channel.Drained, timeout_s)

    # ---- the port ----------------------------------------------------------------------------------------------
    async def generate(self, turn: Generate) -> AsyncIterator[TurnEvent]:
        self._check_up()
        events = self._turns[turn.turn_id] = asyncio.Queue()
        ended = False
        try:
            await self._send(turn)
            while not ended:
                event = await events.get()
                ended = not isinstance(event, Delta)
                yield event
        except ChannelClosed as error:
            ended = True
            yield _died(turn.turn_id, str(error))
        finally:
            del self._turns[turn.turn_id]
            if not ended and not self._down:
                self._later(self.abort(turn.turn_id))           # here a closing generator may not wait

    async def abort(self, turn_id: str) -> None:
        if not self._down:
            try:
                await self._send(Abort(turn_id=turn_id))
            except ChannelClosed as error:
                log.info("abort of %s: the worker is gone: %s", turn_id, error)

    async def run(self, verb: channel.Verb) -> Receipt:
        try:
            return await self._call(verb, Receipt, self._timeouts.verb_s)
        except TimeoutError:
            return Receipt(f"kv_{verb.op_id}", VERBS[type(verb)], verb.session_id, verb.generation, outcome=Outcome.FAILED,
                           reason=f"no answer from the engine within {self._timeouts.verb_s:g} s")

    async def report(self, request: channel.Report) -> channel.Ledger:
        return await self._ask(request, channel.Ledger)

    async def health(self) -> channel.HealthReport:
        return await self._ask(channel.Health(op_id=_op_id()), channel.HealthReport)

    # ---- calls -------------------------------------------------------------------------------------------------
    async def _ask(self, request: Any, kind: type[Answer]) -> Answer:
        try:
            return await self._call(request, kind, self._timeouts.call_s)
        except TimeoutError:
            raise EngineUnavailable(f"no answer from the engine within {self._timeouts.call_s:g} s") from None

    async def _call(self, request: Any, kind: type[Any], timeout_s: float) -> Any:
        """Raises TimeoutError and EngineUnavailable. The answer to a call that was given up is dropped and counted."""
        self._check_up()
        future = self._calls[request.op_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(request)
                answer = await future
        except ChannelClosed as error:
            raise EngineUnavailable(str(error)) from error
        finally:
            del self._calls[request.op_id]
            if future.done() and not future.cancelled():
                future.exception()                              # seen, also where the send failed first
        if not isinstance(answer, kind):
            raise EngineUnavailable(f"the engine answered {type(request).__name__} with {type(answer).__name__}")
        return answer

    async def _send(self, message: Message) -> None:
        assert self._channel is not None
        await self._channel.send(message)

    def _check_up(self) -> None:
        if self._down:
            raise EngineUnavailable(f"the engine is down: {self._down}")

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _died(turn_id: str, reason: str) -> Failed:
    return Failed(turn_id=turn_id, code="engine_died", message=f"the engine died: {reason}", retryable=True)


def _op_id() -> str:
    return f"op_{uuid.uuid4().hex}"
