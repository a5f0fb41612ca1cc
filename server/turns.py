"""A turn's life, with one exit for every outcome.

    claim ─> prepare ─> generate ─> commit ─> leave
             (images, prompt, admission, reservation)

`claim` takes the session (one turn at a time) or answers from what is known; everything after it runs in a task of its own,
so that a socket that closes takes nothing with it. Whatever happens, `_leave` gives back the session and the reservation,
and says how it ended. A turn is committed before its end is announced.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import cast
from uuid import uuid4

import structlog

from sessions.budgets import Book
from sessions.errors import TurnInFlight
from sessions.lifecycle import TurnEvent, TurnState
from sessions.model import Session, Turn, TurnStatus
from sessions.store import SessionStore

from . import views, wire
from .auth import Principal
from .engines import channel
from .failures import error_object
from .preparing import Prepared, Preparer
from .run import Answered, EngineFailure, NotRunning, Run, SessionClosed, TurnCancelled
from .streams import Origin, Streams
from .telemetry import Metrics
from .tiers import Engines, Tiers

log = structlog.get_logger(__name__)

STOP_WITHIN_S = 2.0
"""An engine that has not stopped a cancelled turn by then is no longer waited for."""


class Turns:
    """`grace_s`: how long a turn goes on when nobody watches its session. `ended`: told of every committed turn."""

    def __init__(self, store: SessionStore, streams: Streams, tiers: Tiers, engines: Engines, preparer: Preparer, *,
                 grace_s: float, heartbeat_s: float, metrics: Metrics,
                 ended: Callable[[Session, Turn], None], clock: Callable[[], float] = time.time) -> None:
        self._store, self._streams, self._tiers, self._engines, self._preparer = store, streams, tiers, engines, preparer
        self._grace_s, self._heartbeat_s, self._metrics, self._ended, self._clock = grace_s, heartbeat_s, metrics, ended, clock
        self._running: dict[str, Run] = {}
        self._barred: set[str] = set()
        streams.watched = self._watched

    # ---- from outside
    async def claim(self, principal: Principal, frame: wire.ResponseCreate, origin: Origin | None = None) -> Run | Answered:
        """Take the session for one turn and start it. The result's `accepted` says whether it was let in.

        An idempotency key that was used answers from that turn. Raises SessionNotFound (also for another tenant's),
        SessionClosed, TurnInFlight; nothing is changed then.
        """
        session = await self._store.get(frame.session_id, tenant_id=principal.tenant_id)
        if (key := frame.idempotency_key) is not None:
            known = self._in_flight(session.id, key)
            turn = None if known else await self._store.find_by_key(session.id, key)
            if turn is not None:
                return Answered(views.response(turn))
            if known := known or self._in_flight(session.id, key):       # it may have begun while the store was asked
                return Answered(known.response, known)
        if session.id in self._barred or session.status != "open":
            raise SessionClosed(session.id)
        if session.id in self._running:
            raise TurnInFlight(f"{session.id} is answering {self._running[session.id].id}")
        run = self._running[session.id] = Run(session, frame, f"r_{uuid4().hex}", origin, self._clock())
        run.task = asyncio.create_task(self._live(run), name=run.id)
        return run

    def _in_flight(self, session_id: str, key: str) -> Run | None:
        run = self._running.get(session_id)
        return run if run is not None and run.frame.idempotency_key == key else None

    def running(self, session_id: str) -> Run | None:
        return self._running.get(session_id)

    @property
    def count(self) -> int:
        return len(self._running)

    def longest_tokens(self, besides: str) -> int:
        """Of the admitted turns of other sessions, the longest sequence that one may make."""
        return max((run.longest_tokens for session_id, run in self._running.items() if session_id != besides), default=0)

    def cancel(self, session_id: str, response_id: str | None = None, reason: str = "cancelled") -> None:
        """Stop the session's turn soon; what was shown of it is kept. Raises NotRunning."""
        if (run := self._running.get(session_id)) is None or response_id not in (None, run.id):
            raise NotRunning(f"{response_id or 'no response'} is not in progress")
        self._stop(run, reason)

    async def bar(self, session_id: str) -> None:
        """No new turns from now on, and the running one is stopped and waited for."""
        self._barred.add(session_id)
        if (run := self._running.get(session_id)) is not None:
            self._stop(run, "the session was closed")
            await asyncio.wait({run.done})

    def unbar(self, session_id: str) -> None:
        self._barred.discard(session_id)

    async def close(self, within_s: float) -> None:
        """Stop every turn, keeping what was shown; those that do not end in time are rolled back."""
        runs = tuple(self._running.values())
        for run in runs:
            self._stop(run, "the server stops")
        if runs:
            await asyncio.wait([run.done for run in runs], timeout=within_s)
        tasks = [run.task for run in runs if run.task is not None and not run.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- stopping
    def _stop(self, run: Run, reason: str) -> None:
        if run.cancel_reason is not None or not run.machine.allows(TurnEvent.CANCEL_REQUESTED):
            return
        run.cancel_reason = reason
        if run.machine.fire(TurnEvent.CANCEL_REQUESTED) is TurnState.ROLLED_BACK:
            run.interrupt()                              # the engine does not have it yet
            return
        run.aborting = asyncio.create_task(self._abort(run), name=f"abort {run.id}")

    async def _abort(self, run: Run) -> None:
        await self._engines.engine.abort(run.id)
        await asyncio.sleep(STOP_WITHIN_S)
        run.interrupt()                                  # _leave cancels this task where the engine did stop

    def _watched(self, session_id: str, has_watchers: bool) -> None:
        run = self._running.get(session_id)
        if run is not None and has_watchers:
            run.keep()
        elif run is not None:
            run.expire(self._grace_s, lambda: self._stop(run, "nobody was watching"))

    # ---- the life
    async def _live(self, run: Run) -> None:
        turn: Turn | None = None
        failure: Exception | None = None
        try:
            await self._streams.hold(run.session.id)
            run.held = True
            self._watched(run.session.id, self._streams.is_watched(run.session.id))
            prepared = await self._prepare(run)
            self._accept(run, prepared)
            async with self._tiers.manager.turn(run.session.id):
                finished = await self._generate(run, prepared)
                turn = await self._commit(run, prepared, finished)
        except asyncio.CancelledError:
            failure = TurnCancelled(run.cancel_reason or "the server stops")
        except Exception as error:                       # noqa: BLE001 - every outcome is told in _leave
            failure = error
        await self._leave(run, turn, failure)

    async def _prepare(self, run: Run) -> Prepared:
        """Everything that may refuse the turn before the engine is asked."""
        run.book = Book(await self._store.totals(run.session.id))
        prepared = await self._preparer.prepare(run, run.book)
        run.reserved = True
        run.machine.fire(TurnEvent.ADMITTED)
        return prepared

    def _accept(self, run: Run, prepared: Prepared) -> None:
        run.prepared = prepared
        run.response = wire.Response(id=run.id, status="in_progress", previous_response_id=prepared.parent_id)
        self._streams.publish(run.session.id, wire.event("response.created", response=run.response,
                                                         input=views.parts(prepared.prompt.parts)), run.origin)
        run.accepted.set_result(run.response)
        run.progress = asyncio.create_task(self._report_progress(run), name=f"progress {run.id}")

    async def _report_progress(self, run: Run) -> None:
        """Until the first text: at once where pages must come back, and every heartbeat."""
        session_id = run.session.id
        waits = str(self._tiers.ledger.state(session_id)) in ("warm", "cold", "restoring")
        await asyncio.sleep(0 if waits else self._heartbeat_s)
        while True:
            stage = "queued" if run.machine.state is TurnState.ADMITTED else "restoring" if waits else "prefilling"
            self._streams.publish(session_id, wire.event("response.progress", response_id=run.id, stage=stage))
            await asyncio.sleep(self._heartbeat_s)

    async def _generate(self, run: Run, prepared: Prepared) -> channel.Finished:
        """Raises EngineFailure, EngineUnavailable, TurnCancelled (stopped with nothing shown)."""
        engine = self._engines.engine
        run.sent_at = self._clock()
        run.machine.fire(TurnEvent.PREFILL_STARTED)
        finished: channel.Finished | None = None
        try:
            async with aclosing(cast(AsyncGenerator, engine.generate(prepared.generate(run.id, run.session)))) as events:
                async for event in events:
                    match event:
                        case channel.Delta():
                            run.machine.fire(TurnEvent.TOKEN)
                            run.output_ids += event.token_ids
                            self._show(run, prepared.detokeniser.push(event.token_ids))
                        case channel.Failed():
                            raise EngineFailure(event.code, event.message, event.retryable)
                        case channel.Finished():
                            finished = event
        except asyncio.CancelledError:
            if run.cancel_reason is None:
                raise
            run.uninterrupt()
            finished = prepared.cut_off(run.id, len(run.output_ids))
        if finished is None:
            raise EngineFailure("engine_incomplete", "the engine ended the turn without saying how", True)
        self._show(run, prepared.detokeniser.flush())
        if finished.reason == "abort":
            if run.cancel_reason is None:
                raise EngineFailure("engine_aborted", "the engine stopped the turn by itself", True)
            if not run.text:
                raise TurnCancelled(run.cancel_reason)
        if not run.output_ids:
            raise EngineFailure("engine_said_nothing", "the engine ended the turn without a token", True)
        return finished

    def _show(self, run: Run, text: str) -> None:
        if text and run.first_text_at is None:
            run.first_text_at = self._clock()
            run.stop_progress()
        if text:
            run.text += text
            self._streams.publish(run.session.id, wire.event("response.output_text.delta", response_id=run.id, delta=text))

    async def _commit(self, run: Run, prepared: Prepared, finished: channel.Finished) -> Turn:
        status = {"stop": TurnStatus.COMPLETED, "length": TurnStatus.INCOMPLETE, "abort": TurnStatus.CANCELLED}[finished.reason]
        run.committing = True
        turn = prepared.turn(run, status, finished, now=self._clock())
        run.finished = finished
        run.session = await self._store.commit_turn(turn, expected_head=prepared.head_id)
        run.machine.fire(TurnEvent.FINISHED)
        return turn

    async def _leave(self, run: Run, turn: Turn | None, failure: Exception | None) -> None:
        """The one exit: settle or release, free the session, tell how it ended."""
        session_id, book = run.session.id, run.book
        run.stop_timers()
        before = after = None
        try:
            if turn is not None and book is not None and run.prepared is not None:
                before, used = book.totals, turn.usage.added_tokens + turn.usage.output_tokens
                after = book.settle(run.id, tokens=used, images=len(run.prepared.prompt.images))
                await self._tiers.refresh(session_id)
            elif run.reserved and book is not None:
                book.release(run.id)
        finally:
            del self._running[session_id]
            try:
                if turn is not None:
                    self._say_committed(run, turn)
                else:
                    self._say_failed(run, failure or TurnCancelled("it did not end"))
                if before is not None and after is not None:
                    self._preparer.announce_budgets(self._streams, run.session, before, after)
            finally:
                if run.held:
                    self._streams.release(session_id)
                if not run.done.done():
                    run.done.set_exception(failure or EngineFailure("turn_lost", "the turn ended without a word", True))
        if turn is not None:
            self._ended(run.session, turn)

    def _say_committed(self, run: Run, turn: Turn) -> None:
        receipt = run.receipt
        if receipt is not None:
            self._streams.publish(run.session.id, wire.event("session.restored", receipt=receipt))
        usage = run.usage(turn, self._tiers.bytes_of(run.session.id))
        run.response = views.response(turn, usage, receipt)
        self._streams.publish(run.session.id, wire.event(views.end_event(run.response.status), response=run.response))
        self._metrics.turn_ended(run, turn)
        log.info("turn_committed", session_id=run.session.id, turn_id=run.id, status=str(turn.status),
                 input_tokens=turn.usage.input_tokens, output_tokens=turn.usage.output_tokens, reason=run.cancel_reason)
        run.done.set_result(run.response)

    def _say_failed(self, run: Run, failure: Exception) -> None:
        if run.machine.allows(TurnEvent.FAILED):
            run.machine.fire(TurnEvent.FAILED)
        error = error_object(failure)
        log.info("turn_rolled_back", session_id=run.session.id, turn_id=run.id, code=error.code, reason=str(failure),
                 exc_info=failure if error.type == "server" else None)
        if run.response is None:                         # refused: nothing was announced; whoever asked tells and counts it
            run.accepted.set_exception(failure)
        elif isinstance(failure, TurnCancelled):
            run.response = replace(run.response, status="cancelled", incomplete_reason="cancelled")
            self._streams.publish(run.session.id, wire.event("response.incomplete", response=run.response))
        else:
            self._metrics.turn_failed(error)
            run.response = replace(run.response, status="failed")
            self._streams.publish(run.session.id, wire.event("response.failed", response=run.response, error=error))
        run.error = failure
        if run.response is not None:
            run.done.set_result(run.response)            # else _leave sets what refused it


