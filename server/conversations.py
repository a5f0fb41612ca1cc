"""What can be done with a session besides talking: make, list, read, watch, rename, limit, close, delete, move its pages."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

from kvstore.geometry import Tier
from kvstore.receipt import KvVerb, Receipt
from sessions import budgets
from sessions.model import Limits, Session, SessionStatus, Totals, Turn
from sessions.store import SessionStore
from sessions.stream import Resume

from . import admission, prompt, views, wire
from .auth import Principal
from .codec import BadFrame
from .modelinfo import ModelInfo
from .run import Run, SessionClosed
from .settings import LimitSettings
from .streams import Event, Origin, Streams, Watcher
from .tiers import Tiers
from .turns import Turns

LIMIT_NAMES = tuple(asdict(Limits()))
_FIRST_EPOCH = _FIRST_GENERATION = 1
_TOTALS_KEPT = 10_000
_SNAPSHOT_TRIES = 10


class Conversations:
    """Another tenant's session answers like an unknown one, everywhere; `anyone`: except to an admin."""

    def __init__(self, store: SessionStore, streams: Streams, tiers: Tiers, turns: Turns, info: ModelInfo, *,
                 defaults: Limits, context_tokens: int, clock: Callable[[], float] = time.time) -> None:
        self._store, self._streams, self._tiers, self._turns, self._info = store, streams, tiers, turns, info
        self._defaults, self._context_tokens, self._clock = defaults, context_tokens, clock
        self._totals: dict[str, tuple[float, Totals]] = {}

    # ---- reading
    async def find(self, principal: Principal, session_id: str, *, anyone: bool = False) -> Session:
        """Raises SessionNotFound."""
        tenant_id = None if anyone and principal.is_admin else principal.tenant_id
        return await self._store.get(session_id, tenant_id=tenant_id)

    async def show(self, session: Session) -> wire.SessionObject:
        return views.session(session, budgets.effective(self._defaults, session.limits), await self._used(session),
                             self._tiers.entry(session.id), busy=self._turns.running(session.id) is not None)

    async def page(self, principal: Principal, *, limit: int, before: float | None) -> list[wire.SessionObject]:
        found = await self._store.list(tenant_id=principal.tenant_id, limit=limit, before=before)
        return [await self.show(session) for session in found]

    async def items(self, principal: Principal, session_id: str) -> list[wire.Item]:
        """Every turn, in the order of their commits; a branch follows previous_response_id back from the last."""
        session = await self.find(principal, session_id)
        return [views.item(turn) for turn in await self._store.all_turns(session.id)]

    async def _used(self, session: Session) -> Totals:
        known = self._totals.get(session.id)
        if known is None or known[0] != session.updated_at:
            if len(self._totals) >= _TOTALS_KEPT:
                self._totals.clear()
            known = self._totals[session.id] = (session.updated_at, await self._store.totals(session.id))
        return known[1]

    # ---- making and changing
    async def create(self, principal: Principal, request: wire.SessionRequest, watcher: Watcher | None = None,
                     event_id: str | None = None) -> wire.SessionObject:
        """Raises LimitExceeded, InvalidLimit, PromptRefused, TurnRefused (instructions above the context)."""
        await self._check_instructions(request.instructions)
        now = self._clock()
        session = Session(
            id=f"s_{uuid4().hex}", tenant_id=principal.tenant_id, owner_id=principal.tenant_id, status=SessionStatus.OPEN,
            title=request.title, instructions=request.instructions, epoch=_FIRST_EPOCH, generation=_FIRST_GENERATION,
            limits=budgets.clamp_request(self._defaults, views.asked_limits(request)), head_turn_id=None,
            created_at=now, updated_at=now)
        await self._store.create(session)
        shown = await self.show(session)
        self._streams.begin(session)
        if watcher is not None:
            self._streams.attach(session.id, watcher)
        self._streams.publish(session.id, wire.event("session.created", epoch=session.epoch, session=shown),
                              Origin(watcher, event_id) if watcher is not None else None)
        return shown

    async def _check_instructions(self, text: str) -> None:
        """There must be room for a message of one token and an answer of one. Raises PromptRefused, TurnRefused."""
        if not text:
            return
        admission.check_text(len(text.encode()), self._info.longest_token_bytes, self._context_tokens)
        needed = len(await asyncio.to_thread(prompt.opening, self._info, text)) + 2
        if needed > self._context_tokens:
            raise admission.TurnRefused(admission.Refuse(
                "context_tokens", self._context_tokens, needed,
                f"with these instructions the shortest turn has {needed} tokens; the context has {self._context_tokens}"))

    async def rename(self, principal: Principal, session_id: str, title: str, origin: Origin | None = None) -> wire.SessionObject:
        session = await self.find(principal, session_id)
        return await self._updated(await self._store.update(session.id, title=title), origin)

    async def set_limits(self, session: Session, changes: Mapping[str, int | None]) -> wire.SessionObject:
        """For an admin: no ceiling of the server's applies. None: back to the server's default. Raises InvalidLimit, BadFrame."""
        if unknown := set(changes) - set(LIMIT_NAMES):
            raise BadFrame("limit_unknown", f"there are {', '.join(LIMIT_NAMES)}", min(unknown))
        limits = replace(session.limits, **changes)
        budgets.clamp_request(Limits(), limits)
        return await self._updated(await self._store.update(session.id, limits=limits))

    async def _updated(self, session: Session, origin: Origin | None = None) -> wire.SessionObject:
        shown = await self.show(session)
        self._streams.publish(session.id, wire.event("session.updated", session=shown), origin)
        return shown

    async def turn_ended(self, session: Session, turn: Turn) -> None:
        """Gives a session without a title the first words of its first message."""
        if not session.title and turn.parent_id is None and (title := views.title_from(turn.input)):
            await self._updated(await self._store.update(session.id, title=title))

    async def close(self, principal: Principal, session_id: str, origin: Origin | None = None) -> None:
        """Ends it for good: a running turn is stopped and kept, the KV goes, the transcript stays. Raises SessionClosed."""
        session = await self.find(principal, session_id)
        if session.status is SessionStatus.CLOSED:
            raise SessionClosed(session.id)
        await self._end(session, lambda: self._store.update(session.id, close=True), origin)

    async def delete(self, principal: Principal, session_id: str) -> None:
        session = await self.find(principal, session_id)
        await self._end(session, lambda: self._store.delete(session.id))
        self._streams.forget(session.id)
        self._totals.pop(session.id, None)

    async def _end(self, session: Session, write: Callable[[], Any], origin: Origin | None = None) -> None:
        await self._turns.bar(session.id)
        try:
            await self._tiers.drop(session)
            await write()
            self._tiers.forget(session.id)
        finally:
            self._turns.unbar(session.id)
        self._streams.publish(session.id, wire.event("session.closed"), origin)

    # ---- watching
    async def attach(self, principal: Principal, session_id: str, watcher: Watcher) -> None:
        """Watch from now on; nothing that was missed is told."""
        session = await self.find(principal, session_id)
        await self._streams.open(session.id)
        self._streams.attach(session.id, watcher)

    async def resume(self, principal: Principal, frame: wire.SessionResume, watcher: Watcher) -> None:
        """Give the watcher session.resumed, what it missed, and from then on every event."""
        session = await self.find(principal, frame.session_id)
        stream = await self._streams.hold(session.id)
        try:
            replay = stream.log.replay(frame.epoch, frame.last_seq)
            if replay.outcome is Resume.LOSSLESS:
                resumed, missed = wire.event("session.resumed"), [numbered.event for numbered in replay.events]
                at = replay.from_seq - 1
            else:
                resumed, missed, at = await self._snapshot(session)
            watcher.replay([resumed | {
                "session_id": session.id, "epoch": stream.log.epoch, "outcome": str(replay.outcome), "from_seq": at + 1,
                "seq": stream.log.seq, "reason": replay.reason} | ({"event_id": frame.event_id} if frame.event_id else {}),
                *missed])
            self._streams.attach(session.id, watcher)
        finally:
            self._streams.release(session.id)

    async def _snapshot(self, session: Session) -> tuple[Event, list[Event], int]:
        """(the session as of a position, the events since then, the position's seq).

        Reading the store takes a while, in which the stream goes on: so the snapshot is of the time before, and a turn that
        was committed meanwhile is left out of it; its events tell it.
        """
        stream = await self._streams.open(session.id)
        for _ in range(_SNAPSHOT_TRIES):
            at, run = stream.log.seq, self._turns.running(session.id)
            in_progress = _in_progress(run)
            now, turns = await self._store.get(session.id), await self._store.all_turns(session.id)
            shown = await self.show(now)
            missed = [numbered.event for numbered in stream.log.since(at)]
            if len(missed) == stream.log.seq - at:           # else the buffer ran over meanwhile
                break
        later = {event["response"].id for event in missed if event["type"] == "response.created"}
        later |= {run.id} if run is not None else set()
        kept = [turn for turn in turns if turn.id not in later]
        head = next((t.parent_id for t in turns if t.id == now.head_turn_id and t.id in later), now.head_turn_id)
        return wire.event("session.resumed", session=replace(shown, last_response_id=head), in_progress=in_progress,
                          items=[views.item(turn) for turn in kept]), missed, at

    # ---- pages
    async def kv(self, session: Session) -> wire.KvEntry:
        await self._tiers.refresh(session.id)
        return self._tiers.entry(session.id)

    async def move(self, session: Session, verb: KvVerb, *, to: Tier = Tier.HOST, seconds: float = 0.0) -> Receipt:
        if session.status is SessionStatus.CLOSED:
            raise SessionClosed(session.id)
        if verb is KvVerb.PIN and seconds > 0 and not self._tiers.may_pin(session.id, self._turns.longest_tokens(session.id)):
            return self._tiers.manager.refused(verb, session.id, "a turn that is running or waiting needs the room")
        return await self._tiers.run(verb, session.id, to=to, seconds=seconds)

    async def typing(self, principal: Principal, session_id: str) -> None:
        """A turn is coming."""
        self._tiers.hint((await self.find(principal, session_id)).id)


def _in_progress(run: Run | None) -> dict[str, Any] | None:
    if run is None or run.response is None or run.prepared is None:
        return None
    return {"response": run.response, "input": views.parts(run.prepared.prompt.parts), "output_text": run.text}


def limits_of(settings: LimitSettings) -> Limits:
    """The server's own limits."""
    return Limits(**{name: getattr(settings, name) for name in LIMIT_NAMES})
