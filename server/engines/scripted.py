"""An engine without a model: it echoes, and keeps its books like a real one. For tests of everything around an engine.

Its answer to a prompt is the text of the last user message, token for token, and then the first of the stop tokens it was
given; with `ignore_eos`, or without stop tokens, it says it over and over up to max_new_tokens. Any token in stop_token_ids
ends the answer, as on a real engine. Page figures follow `scripted_pages.py`. The same calls always give the same results.
"""

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from kvstore.geometry import Geometry, Tier
from kvstore.receipt import KvVerb, Outcome, Receipt

from . import channel
from .base import EngineStartError, EngineUnavailable, Listener
from .channel import Cached, Content, Delta, Failed, Finished, Generate, Timings, TurnEvent, Usage, Verb
from .scripted_pages import Key, Moved, Pages


class ScriptedConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What it looks like, and how it misbehaves. The fault switches may be changed while it runs."""

    page_tokens: int = 16
    device_tokens: int = 16384
    context_tokens: int = 8192
    token_bytes: int = 1024
    model: str = "scripted"
    token_delay_s: float = 0.0
    verb_delay_s: float = 0.0
    start_error: str = ""
    """Refuse to start, with this reason."""
    die_after_tokens: int | None = None
    """Die when it has generated so many tokens since its start."""
    failing_verbs: tuple[str, ...] = ()
    daemon_healthy: bool = True


VERBS: dict[type[Verb], KvVerb] = {
    channel.Spill: KvVerb.SPILL, channel.Restore: KvVerb.RESTORE, channel.Prefetch: KvVerb.PREFETCH,
    channel.Demote: KvVerb.DEMOTE, channel.Drop: KvVerb.DROP, channel.Pin: KvVerb.PIN,
}


@dataclass(slots=True)
class _Turn:
    session_id: str
    aborted: bool = False
    locked: list[Key] = field(default_factory=list)
    reserved_pages: int = 0
    output: list[int] = field(default_factory=list)


class ScriptedEngine:
    """Implements `base.Engine`. `on_exit(returncode, reason)` is told of a death that nobody asked for."""

    def __init__(self, config: ScriptedConfig | None = None, on_exit: Callable[[int | None, str], None] | None = None) -> None:
        self.config = config or ScriptedConfig()
        self.pages = Pages(Geometry(self.config.page_tokens, self.config.token_bytes, self.config.device_tokens))
        self._on_exit = on_exit
        self._listen: Listener | None = None
        self._turns: dict[str, _Turn] = {}
        self._epoch = self._generated = 0
        self._down = "it has not been started"

    async def start(self, listen: Listener) -> channel.Ready:
        listen(channel.Progress(stage="scripted", detail="nothing to load"))
        if self.config.start_error:
            raise EngineStartError(self.config.start_error)
        self._listen, self._down = listen, ""
        config = self.config
        self._changed()
        return channel.Ready(
            engine="scripted", model=config.model, fingerprint=hashlib.sha256(config.model.encode()).hexdigest()[:16],
            page_tokens=config.page_tokens, token_bytes=config.token_bytes, device_tokens=config.device_tokens,
            context_tokens=config.context_tokens, hooks={},
            capabilities=("spill", "restore", "prefetch", "demote", "drop", "pin", "images"))

    # ---- turns -------------------------------------------------------------------------------------------------
    async def generate(self, turn: Generate) -> AsyncIterator[TurnEvent]:
        self._check_up()
        begun_s = time.monotonic()
        prompt = turn.content.token_ids
        keys = self.pages.keys(turn.content)
        state = self._turns[turn.turn_id] = _Turn(turn.session_id)
        try:
            receipt = self._admit(turn, state, keys)
            if isinstance(receipt, Failed):
                yield receipt
                return
            found = len(self.pages.found(keys)) * self.config.page_tokens      # all on the device by now
            moved = receipt.source if receipt else {}
            cached = Cached(device=found - sum(moved.values()), host=moved.get(Tier.HOST, 0), storage=moved.get(Tier.STORAGE, 0))
            self._changed()
            first_s = begun_s
            reason: Literal["stop", "length", "abort"] = "length"
            for token in answer(turn):
                await asyncio.sleep(self.config.token_delay_s)
                if self._generated == self.config.die_after_tokens:
                    self.die("its script says so")
                if self._down:
                    yield _dead(turn.turn_id, self._down)
                    return
                if state.aborted:
                    reason = "abort"
                    break
                self._generated += 1
                first_s = first_s if state.output else time.monotonic()
                state.output.append(token)
                yield Delta(turn_id=turn.turn_id, token_ids=[token])
                if token in turn.sampling.stop_token_ids and not turn.sampling.ignore_eos:
                    reason = "stop"
                    break
            self._release(turn, state)
            yield Finished(turn_id=turn.turn_id, reason=reason, receipt=receipt,
                           usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(state.output), cached=cached),
                           timings=Timings(ttft_ms=(first_s - begun_s) * 1e3, total_ms=(time.monotonic() - begun_s) * 1e3))
        finally:
            self._release(turn, state)                                # a closed iterator is an abort

    def _admit(self, turn: Generate, state: _Turn, keys: Sequence[Key]) -> Receipt | Failed | None:
        """Restore what lower tiers have, lock the prefix and set pages aside for the rest, or say why not."""
        longest = len(turn.content.token_ids) + turn.sampling.max_new_tokens
        if longest > self.config.context_tokens:
            return Failed(turn_id=turn.turn_id, code="context_too_long", retryable=False,
                          message=f"{longest} tokens are above the engine's {self.config.context_tokens}")
        moved = self.pages.load(turn.session_id, keys, time.time())
        state.locked = [key for key, tier in zip(keys, self.pages.found(keys), strict=False) if tier is Tier.DEVICE]
        self.pages.lock(turn.session_id, state.locked)
        wanted = self.pages.geometry.pages(longest) - len(state.locked)
        if not self.pages.reserve(wanted, time.time()):
            return Failed(turn_id=turn.turn_id, code="device_pool_full", retryable=True,
                          message=f"{wanted} pages are needed and {self.pages.free} of {self.pages.total} are free")
        state.reserved_pages = wanted
        return self._receipt(KvVerb.RESTORE, turn, moved, Tier.DEVICE) if moved.pages else None

    def _release(self, turn: Generate, state: _Turn) -> None:
        """Once, however the turn ended: keep its pages, give back the rest."""
        if self._turns.pop(turn.turn_id, None) is None:
            return
        self.pages.in_flight -= state.reserved_pages
        self.pages.unlock(turn.session_id, state.locked)
        if state.reserved_pages:
            content = msgspec.structs.replace(turn.content, token_ids=[*turn.content.token_ids, *state.output])
            self.pages.insert(turn.session_id, self.pages.keys(content))
        self._changed()

    async def abort(self, turn_id: str) -> None:
        if turn_id in self._turns:
            self._turns[turn_id].aborted = True

    # ---- verbs and figures -------------------------------------------------------------------------------------
    async def run(self, verb: Verb) -> Receipt:
        self._check_up()
        await asyncio.sleep(self.config.verb_delay_s)
        self._check_up()
        kind = VERBS[type(verb)]
        if kind in self.config.failing_verbs:
            return _unmoved(kind, verb, Outcome.FAILED, "its script says so")
        if any(turn.session_id == verb.session_id for turn in self._turns.values()):
            return _unmoved(kind, verb, Outcome.REFUSED, "a turn is running")
        moved, target = self._do(verb)
        self._changed()
        return self._receipt(kind, verb, moved, target)

    def _do(self, verb: Verb) -> tuple[Moved, Tier | None]:
        pages, session = self.pages, verb.session_id
        match verb:
            case channel.Spill():
                return pages.spill(session, Tier(verb.to)), Tier(verb.to)
            case channel.Demote():
                return pages.demote(session), Tier.STORAGE
            case channel.Drop():
                return pages.drop(session), None
            case channel.Pin():
                return pages.pin(session, verb.until), Tier.DEVICE
            case channel.Restore() | channel.Prefetch():
                moved = Moved()
                for content in verb.contents:
                    moved.merge(pages.load(session, pages.keys(content), time.time()))
                return moved, Tier.DEVICE
            case _:
                raise TypeError(f"{verb} is no verb of the channel")

    async def report(self, request: channel.Report) -> channel.Ledger:
        self._check_up()
        entries = (self.pages.sessions() if request.session_id is None
                   else (self.pages.session(request.session_id, request.contents or None),))
        return channel.Ledger(epoch=self._epoch, entries=entries, op_id=request.op_id)

    async def health(self) -> channel.HealthReport:
        self._check_up()
        return channel.HealthReport(op_id="", running_turns=len(self._turns), pressure=self.pages.pressure(self.config.daemon_healthy))

    async def close(self) -> None:
        self._down = self._down or "it was closed"

    def die(self, reason: str) -> None:
        """As if its process had gone: running turns fail, calls are refused, pages are lost."""
        if not self._down:
            self._down = reason
            if self._on_exit:
                self._on_exit(None, reason)

    def _check_up(self) -> None:
        if self._down:
            raise EngineUnavailable(f"the scripted engine is down: {self._down}")

    def _changed(self) -> None:
        if self._listen and not self._down:
            self._epoch += 1
            self._listen(channel.Ledger(epoch=self._epoch, entries=self.pages.sessions()))
            self._listen(self.pages.pressure(self.config.daemon_healthy))

    def _receipt(self, verb: KvVerb, of: Verb | Generate, moved: Moved, target: Tier | None = None) -> Receipt:
        size = self.pages.geometry.page_tokens
        if not moved.pages:
            outcome, reason = Outcome.NOTHING, "there was nothing to move"
        elif moved.missing:
            outcome, reason = Outcome.PARTIAL, f"{moved.missing} pages could not be had"
        else:
            outcome, reason = Outcome.DONE, ""
        return replace(_unmoved(verb, of, outcome, reason), pages=moved.pages, tokens=moved.pages * size,
                       bytes=self.pages.geometry.bytes(moved.pages * size), digest=moved.digest,
                       source={str(tier): pages * size for tier, pages in moved.source.items()},
                       target=str(target) if target and moved.pages else None, shared_kept_tokens=moved.shared_kept * size)


def _unmoved(verb: KvVerb, of: Verb | Generate, outcome: Outcome, reason: str) -> Receipt:
    request_id = of.turn_id if isinstance(of, Generate) else of.op_id
    return Receipt(f"kv_{request_id}", verb, of.session_id, of.generation, outcome=outcome, reason=reason)


def answer(turn: Generate) -> Iterator[int]:
    """What the engine says, up to max_new_tokens."""
    sampling = turn.sampling
    text = last_user_text(turn.content, sampling.stop_token_ids) or list(sampling.stop_token_ids[:1]) or [0]
    whole: Iterator[int] = itertools.cycle(text)
    if sampling.stop_token_ids and not sampling.ignore_eos:
        whole = itertools.chain(text, sampling.stop_token_ids[:1])
    return itertools.islice(whole, sampling.max_new_tokens)


def last_user_text(content: Content, stop_token_ids: Sequence[int]) -> list[int]:
    """The tokens of the last user message, by the shape of a chat prompt alone.

    A message ends with a stop token, and what follows the last one opens the answer (newline, <|im_start|>, role, newline):
    its last token ends a header, the first other one begins it. Without that shape the whole prompt is the text. An image
    is left out together with the token that closes it, and with what is before it.
    """
    ids, start, end = content.token_ids, 0, len(content.token_ids)
    ends = [i for i, token in enumerate(ids) if token in stop_token_ids]
    if ends:
        end, opening = ends[-1], ids[ends[-1] + 1 :]
        opener = next((token for token in opening if token != opening[-1]), None)
        if opener in ids[:end]:
            header = end - 1 - ids[:end][::-1].index(opener)
            start = ids.index(opening[-1], header, end) + 1 if opening[-1] in ids[header:end] else header + 1
    for image in content.images:
        if image.start < end:
            start = max(start, image.start + image.tokens + 1)
    return ids[start:end]


def _dead(turn_id: str, reason: str) -> Failed:
    return Failed(turn_id=turn_id, code="engine_died", message=f"the engine died: {reason}", retryable=True)
