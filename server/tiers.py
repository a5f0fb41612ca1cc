"""The KV of sessions as the server sees it: verbs with the session's whole contents, residency as events and objects."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

import structlog

from kvstore.geometry import Geometry, Tier
from kvstore.ledger import Ledger, Residency
from kvstore.manager import KvManager
from kvstore.planner import PlanPolicy
from kvstore.receipt import KvVerb, Outcome, Receipt
from sessions import tree
from sessions.errors import SessionError, SessionNotFound
from sessions.model import Session, SessionStatus
from sessions.store import SessionStore

from . import admission, wire
from .background import Background
from .engines import channel
from .engines.base import Engine, EngineUnavailable
from .streams import Streams

log = structlog.get_logger(__name__)

REFRESH_WITHIN_S = 2.0
"""The longest that an answer to a client waits for fresh figures; older ones are shown then."""
_MESSAGES: dict[KvVerb, type[channel.Verb]] = {
    KvVerb.SPILL: channel.Spill, KvVerb.RESTORE: channel.Restore, KvVerb.PREFETCH: channel.Prefetch,
    KvVerb.DEMOTE: channel.Demote, KvVerb.DROP: channel.Drop, KvVerb.PIN: channel.Pin,
}
_MOVED = (Outcome.DONE, Outcome.PARTIAL)
_EVENT_OF = {KvVerb.SPILL: "session.spilled", KvVerb.DEMOTE: "session.spilled",
             KvVerb.RESTORE: "session.restored", KvVerb.PREFETCH: "session.restored"}


class Engines(Protocol):
    """What is needed of the supervisor."""

    @property
    def engine(self) -> Engine:
        """Raises EngineUnavailable."""

    @property
    def geometry(self) -> Geometry | None:
        """None until an engine was ready once."""


class Tiers:
    """`salt_of`: tenant id -> salt. `common_tokens`: how many a session shares by its instructions alone; a demote or drop
    leaves their KV to the others. `moved`: called with every receipt of a verb that ran (for metrics)."""

    def __init__(self, store: SessionStore, streams: Streams, engines: Engines, policy: PlanPolicy, *,
                 background: Background, salt_of: Callable[[str], str], common_tokens: Callable[[Session], int],
                 moved: Callable[[Receipt], None],
                 clock: Callable[[], float] = time.time) -> None:
        self._store, self._streams, self._engines = store, streams, engines
        self._background, self._salt_of, self._moved = background, salt_of, moved
        self._common_tokens, self._clock = common_tokens, clock
        self.ledger = Ledger()
        self.manager = KvManager(self.ledger, self._run, policy, clock, self._told)
        self._announced: dict[str, Residency] = {}

    # ---- contents
    async def contents(self, session: Session) -> tuple[channel.Content, ...]:
        """Every branch of the session, whole: all that its KV can be."""
        turns = await self._store.all_turns(session.id)
        common = self._common_tokens(session)
        return tuple(self.content(session.tenant_id, tree.content(branch), common) for branch in tree.branches(turns))

    def content(self, tenant_id: str, branch: tree.BranchContent, common_tokens: int = 0) -> channel.Content:
        images = tuple(channel.ImageRef(digest=i.digest, width=i.width, height=i.height, grid=i.grid, tokens=i.tokens,
                                        start=i.start) for i in branch.images)
        return channel.Content(token_ids=list(branch.token_ids), images=images, salt=self._salt_of(tenant_id),
                               private_from=common_tokens)

    # ---- verbs
    async def _run(self, verb: KvVerb, owner: str, /, **args: Any) -> Receipt:
        try:
            session = await self._store.get(owner)
        except SessionNotFound:
            return await self._drop_stray(owner)
        if "to" in args:
            args["to"] = str(args["to"])
        message = _MESSAGES[verb](op_id=f"op_{uuid4().hex}", session_id=owner, generation=session.generation,
                                  contents=await self.contents(session), **args)
        receipt = await self._engines.engine.run(message)
        if verb is KvVerb.DROP and receipt.outcome in _MOVED and session.status is SessionStatus.OPEN:
            await self._store.update(owner, bump_generation=True)
        return receipt

    async def _drop_stray(self, owner: str) -> Receipt:
        """The engine was still ending a turn when its session was deleted: nobody will ask for these pages again."""
        receipt = await self._engines.engine.run(channel.Drop(op_id=f"op_{uuid4().hex}", session_id=owner, generation=0, contents=()))
        self.forget(owner)                           # should some be in use still, the next ledger names the owner again
        return receipt

    async def run(self, verb: KvVerb, session_id: str, *, to: Tier = Tier.HOST, seconds: float = 0.0) -> Receipt:
        """One verb, asked for by a person. Raises EngineUnavailable."""
        match verb:
            case KvVerb.SPILL:
                return await self.manager.spill(session_id, to)
            case KvVerb.PIN:
                return await self.manager.pin(session_id, time.time() + seconds)
            case _:
                return await getattr(self.manager, str(verb))(session_id)

    def hint(self, session_id: str) -> None:
        """Bring the pages back ahead of a turn, if they are away and nothing else is going on."""
        if self.ledger.state(session_id) in (Residency.WARM, Residency.COLD) and not self.ledger.entry(session_id).busy:
            self._background.spawn(self._prefetch(session_id))

    async def _prefetch(self, session_id: str) -> None:
        try:
            await self.manager.prefetch(session_id)
        except EngineUnavailable as error:
            log.info("prefetch_skipped", session_id=session_id, reason=str(error))

    async def drop(self, session: Session) -> None:
        """The session is about to end: its KV goes, as far as the engine can be reached; the rest ages out."""
        try:
            await self.manager.drop(session.id)
        except (EngineUnavailable, SessionNotFound) as error:
            log.info("drop_skipped", session_id=session.id, reason=str(error))

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self.manager.forget(session_id)
        self._announced.pop(session_id, None)

    # ---- figures
    async def refresh(self, session_id: str) -> None:
        """Ask the engine where the session's pages are. Keeps the old figures where it does not answer in time."""
        try:
            async with asyncio.timeout(REFRESH_WITHIN_S):
                session = await self._store.get(session_id)
                report = await self._engines.engine.report(channel.Report(
                    op_id=f"op_{uuid4().hex}", session_id=session_id, contents=await self.contents(session)))
                if (await self._store.get(session_id)).status is SessionStatus.CLOSED:
                    return                           # it ended meanwhile, and is forgotten
        except (EngineUnavailable, SessionError, TimeoutError) as error:
            log.info("report_skipped", session_id=session_id, reason=str(error) or "no answer in time")
            return
        for entry in report.entries:
            if entry.session_id == session_id:
                self.manager.on_report(
                    session_id, device_tokens=entry.device_tokens, device_exclusive_tokens=entry.device_exclusive_tokens,
                    host_tokens=entry.host_tokens or 0, storage_tokens=entry.storage_tokens or 0,
                    total_tokens=entry.total_tokens or 0, reachable_tokens=entry.reachable_tokens or 0)

    async def refresh_all(self, limit: int = 500) -> None:
        """After a start of the engine: learn what the lower tiers still have of the sessions used last."""
        for session in await self._store.list(limit=limit):
            if not self.ledger.entry(session.id).busy:
                await self.refresh(session.id)

    def pinned_tokens(self, besides: str) -> int:
        """Of the device pool, what other sessions have pinned now."""
        return self.ledger.pinned_tokens(self._clock(), besides)

    def may_pin(self, session_id: str, needed_tokens: int) -> bool:
        """Would the pool still hold a sequence of that length beside this pin and the others?"""
        geometry = self._engines.geometry
        held = self.pinned_tokens(session_id) + (self.ledger.entry(session_id).device_tokens if session_id in self.ledger else 0)
        return geometry is None or needed_tokens <= admission.room_tokens(geometry, held)

    def entry(self, session_id: str) -> wire.KvEntry:
        """Where the pages are, as last known."""
        if session_id not in self.ledger:
            return wire.KvEntry()
        e = self.ledger.entry(session_id)
        return wire.KvEntry(state=str(e.state), tokens=e.total_tokens, device_tokens=e.device_tokens,
                            device_exclusive_tokens=e.device_exclusive_tokens, host_tokens=e.host_tokens,
                            storage_tokens=e.storage_tokens, bytes=self.bytes_of(session_id), pinned_until=e.pinned_until_s)

    def bytes_of(self, session_id: str) -> wire.KvBytes:
        geometry = self._engines.geometry
        if geometry is None or session_id not in self.ledger:
            return wire.KvBytes()
        e = self.ledger.entry(session_id)
        return wire.KvBytes(*(geometry.bytes(n) for n in (e.device_tokens, e.host_tokens, e.storage_tokens)))

    # ---- events
    def _told(self, owner: str, receipt: Receipt | None, state: Residency) -> None:
        if self._announced.get(owner, Residency.EMPTY) is not state:
            self._announced[owner] = state
            self._streams.publish(owner, wire.event("session.state", state=str(state), kv=self.entry(owner)))
        if receipt is None:
            return
        self._moved(receipt)
        if receipt.outcome in _MOVED:
            if receipt.verb in _EVENT_OF:
                self._streams.publish(owner, wire.event(_EVENT_OF[receipt.verb], receipt=receipt.to_wire()))
            self._background.spawn(self.refresh(owner))
