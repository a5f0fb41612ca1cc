"""KV verbs, reports and gauges of the real engine, over the command channel to its scheduler."""

import logging
import time
import uuid
from typing import Any

from kvstore.receipt import KvVerb, Outcome, Receipt
from kvstore.sglang.control import ControlError
from kvstore.sglang.ops import Branch

from .channel import Content, Demote, Drop, Ledger, Pin, Prefetch, Pressure, Report, Restore, SessionPages, Spill, Verb
from .config import EngineConfig
from .digests import content_digest
from .sglang_images import padded_ids

log = logging.getLogger("rekindle.engine")
VERBS = {Spill: KvVerb.SPILL, Restore: KvVerb.RESTORE, Prefetch: KvVerb.PREFETCH, Demote: KvVerb.DEMOTE, Drop: KvVerb.DROP, Pin: KvVerb.PIN}


class SGLangPages:
    """`channel`: the front end of kvstore/sglang/control.py. token_bytes: KV bytes of one token over all layers and ranks."""

    def __init__(self, channel: Any, config: EngineConfig, token_bytes: int) -> None:
        self._channel, self._config, self._token_bytes = channel, config, token_bytes

    async def run(self, verb: Verb) -> Receipt:
        """What cannot be done is a receipt that says why."""
        if not verb.contents and not isinstance(verb, Spill | Drop):     # those free what a turn that was not kept has left
            return self.receipt(verb, outcome=Outcome.NOTHING, reason="the session has no tokens")
        began = time.monotonic()
        kind = VERBS[type(verb)]
        arguments: dict[str, Any] = {}
        if isinstance(verb, Spill):
            arguments["to"] = verb.to
        elif isinstance(verb, Pin):
            arguments["until"] = verb.until
        name = "restore" if isinstance(verb, Prefetch) else str(kind)
        try:
            data = await self._call(name, verb.session_id, verb.contents, **arguments)
        except ControlError as error:
            return self.receipt(verb, outcome=Outcome.FAILED, reason=str(error), ms=1e3 * (time.monotonic() - began))
        tokens, reason = data["tokens"], data.get("reason", "")
        outcome = Outcome.NOTHING if not tokens and not reason else Outcome.PARTIAL if reason else Outcome.DONE
        return self.receipt(
            verb, source=data["source"], target=data["target"], tokens=tokens, pages=tokens // self._config.page_tokens,
            bytes=tokens * self._token_bytes, shared_kept_tokens=data.get("kept", 0), outcome=outcome, reason=reason,
            ms=1e3 * (time.monotonic() - began))

    def receipt(self, verb: Verb, **fields: Any) -> Receipt:
        digest = content_digest(self._config.fingerprint, verb.contents[0]) if verb.contents else ""
        return Receipt(id=f"rc_{uuid.uuid4().hex[:16]}", verb=VERBS[type(verb)], session_id=verb.session_id,
                       generation=verb.generation, digest=digest, **fields)

    async def report(self, request: Report) -> Ledger:
        data = await self._call("report", request.session_id, request.contents)
        entries = {sid: SessionPages(session_id=sid, device_tokens=tokens, device_exclusive_tokens=exclusive, locked_tokens=locked)
                   for sid, (tokens, exclusive, locked) in data["sessions"].items()}
        if request.session_id is None:
            return Ledger(epoch=data["epoch"], entries=tuple(entries.values()), op_id=request.op_id)
        own = entries.get(request.session_id, SessionPages(session_id=request.session_id))
        if "below" in data:
            below = data["below"]
            own = SessionPages(session_id=own.session_id, device_tokens=own.device_tokens, locked_tokens=own.locked_tokens,
                               device_exclusive_tokens=own.device_exclusive_tokens, total_tokens=below["total"],
                               host_tokens=below.get("host"), storage_tokens=below.get("storage"), reachable_tokens=below.get("reachable"))
        return Ledger(epoch=data["epoch"], entries=(own,), op_id=request.op_id)

    async def _call(self, verb: str, owner: str | None, contents: tuple[Content, ...], **arguments: Any) -> dict[str, Any]:
        branches = [Branch(padded_ids(c), c.salt, c.private_from) for c in contents]
        return await self._channel.call(verb, owner, branches, **arguments)

    async def pressure(self) -> tuple[int, Pressure]:
        """(ledger epoch, gauges in pages)"""
        data, page = await self._channel.call("pressure"), self._config.page_tokens
        if data["violations"]:
            log.error("the session cache violates its invariants: %s", "; ".join(data["violations"]))
        return data["epoch"], Pressure(
            free_pages=data["free"] // page, used_pages=data["cached"] // page, in_flight_pages=data["in_flight"] // page,
            total_pages=data["total"] // page, daemon_healthy=data["healthy"], host_bytes=data["host_bytes"])
