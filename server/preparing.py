"""From a response.create to what the engine is given: images, prompt, admission, reservation. May refuse at each step; then
nothing was changed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from sessions import budgets, tree
from sessions.budgets import Book
from sessions.errors import TurnNotFound
from sessions.model import (
    ImagePart,
    Limits,
    Part,
    Session,
    SessionStatus,
    TextPart,
    Totals,
    Turn,
    TurnStatus,
    TurnUsage,
)
from sessions.store import SessionStore

from . import admission, wire
from .engines import channel
from .gate import ImagesBusy
from .images import ImageNotFound, ImageRecord, ImageStore, Upload
from .modelinfo import ModelInfo
from .pixels import ImageRefused
from .prompt import Detokeniser, TurnPrompt, next_turn, open_turn
from .run import Run, SessionClosed
from .streams import Streams
from .tiers import Engines, Tiers

A, B = TypeVar("A"), TypeVar("B")

ROOT = "root"
"""As previous_response_id: answer after nothing, a new branch from the start."""


class EmptyInput(Exception):
    code = "input_empty"


class PreviousNotFound(TurnNotFound):
    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that may run."""

    parent_id: str | None
    head_id: str | None
    """The session's head when this was prepared; the commit insists on it."""
    index: int
    prompt: TurnPrompt
    content: channel.Content
    sampling: channel.Sampling
    detokeniser: Detokeniser

    @property
    def longest_tokens(self) -> int:
        return len(self.content.token_ids) + self.sampling.max_new_tokens

    def generate(self, turn_id: str, session: Session) -> channel.Generate:
        return channel.Generate(turn_id=turn_id, session_id=session.id, generation=session.generation,
                                branch_id=self.parent_id or ROOT, content=self.content, sampling=self.sampling)

    def cut_off(self, turn_id: str, output_tokens: int) -> channel.Finished:
        """In place of the engine's own word, where it did not give one in time."""
        return channel.Finished(turn_id=turn_id, reason="abort", usage=channel.Usage(
            prompt_tokens=len(self.content.token_ids), completion_tokens=output_tokens))

    def turn(self, run: Run, status: TurnStatus, finished: channel.Finished, *, now: float) -> Turn:
        cached = finished.usage.cached
        return Turn(
            id=run.id, session_id=run.session.id, parent_id=self.parent_id, index=self.index, status=status,
            input=self.prompt.parts, output_text=run.text, input_ids=tuple(self.prompt.input_ids),
            output_ids=tuple(run.output_ids), created_at=run.claimed_at, finished_at=now,
            idempotency_key=run.frame.idempotency_key,
            usage=TurnUsage(
                input_tokens=len(self.content.token_ids), added_tokens=len(self.prompt.input_ids),
                output_tokens=len(run.output_ids), image_tokens=sum(i.tokens for i in self.content.images),
                cached_device_tokens=cached.device, cached_host_tokens=cached.host, cached_storage_tokens=cached.storage,
                ttft_ms=((run.first_text_at or now) - run.claimed_at) * 1e3, total_ms=(now - run.claimed_at) * 1e3))


class Preparer:
    """`defaults`: the server's limits. `default_output_tokens`: where a turn does not say."""

    def __init__(self, store: SessionStore, images: ImageStore, info: ModelInfo, tiers: Tiers, engines: Engines, *,
                 defaults: Limits, default_output_tokens: int, context_tokens: int) -> None:
        self._store, self._images, self._info, self._tiers, self._engines = store, images, info, tiers, engines
        self._defaults, self._default_output_tokens, self._context_tokens = defaults, default_output_tokens, context_tokens

    def limits(self, session: Session) -> Limits:
        """In force for the session."""
        return budgets.effective(self._defaults, session.limits)

    async def prepare(self, run: Run, book: Book) -> Prepared:
        """Reserves under the turn's id, last of all. Raises TurnRefused, LimitExceeded and what the steps raise."""
        frame = run.frame
        self._engines.engine                                     # noqa: B018 - unavailable is the cheapest refusal
        run.session = session = await self._store.get(run.session.id)
        if session.status is SessionStatus.CLOSED:               # while the turn was claimed
            raise SessionClosed(session.id)
        limits = self.limits(session)
        asked = [part for message in frame.input for part in message.content]
        pictures = sum(isinstance(part, wire.InputImage) for part in asked)
        # Before images are decoded: what the counts alone refuse.
        budgets.check(limits, book.totals, book.reserved, added_tokens=1, max_output_tokens=1, images_in_message=pictures)
        if not any(isinstance(part, wire.InputImage) or part.text for part in asked):
            raise EmptyInput("the message has neither text nor an image")
        admission.check_text(sum(len(part.text.encode()) for part in asked if isinstance(part, wire.InputText)),
                             self._info.longest_token_bytes, self._context_tokens)
        branch = await self._branch(session, frame.previous_response_id)
        looked = await _all(asked, lambda part: self._look(session.tenant_id, part))
        before = tree.content(branch)
        prompt = await asyncio.to_thread(self._prompt, session, branch, before, [_priced(part) for part in looked])
        admitted = admission.admit(
            limits, book.totals, book.reserved, prompt_tokens=len(before.token_ids) + len(prompt.input_ids),
            added_tokens=len(prompt.input_ids), max_output_tokens=frame.max_output_tokens,
            default_output_tokens=self._default_output_tokens, images_in_message=pictures,
            geometry=self._engines.geometry, context_tokens=self._context_tokens,
            pinned_tokens=self._tiers.pinned_tokens(session.id))
        if isinstance(admitted, admission.Refuse):
            raise admission.TurnRefused(admitted)
        kept = await _all(looked, lambda part: self._keep(session.tenant_id, part))        # only now are images decoded
        prompt = prompt._replace(parts=tuple(
            replace(part, start=placed.start) if isinstance(part, ImagePart) and isinstance(placed, ImagePart) else part
            for part, placed in zip(kept, prompt.parts, strict=True)))
        content = self._tiers.content(session.tenant_id, tree.BranchContent(
            before.token_ids + tuple(prompt.input_ids), before.images + prompt.images))
        max_output = admitted.max_output_tokens
        book.reserve(run.id, limits, added_tokens=len(prompt.input_ids), max_output_tokens=max_output, images_in_message=pictures)
        return Prepared(
            parent_id=branch[-1].id if branch else None, head_id=session.head_turn_id, index=len(branch), prompt=prompt,
            content=content, detokeniser=Detokeniser(self._info.tokenizer), sampling=channel.Sampling(
                max_new_tokens=max_output, stop_token_ids=self._info.stop_token_ids, seed=frame.seed,
                temperature=0.0 if frame.temperature is None else frame.temperature,
                top_p=1.0 if frame.top_p is None else frame.top_p))

    async def _branch(self, session: Session, previous: str | None) -> tuple[Turn, ...]:
        if previous == ROOT:
            return ()
        if previous is None:
            return tuple(await self._store.turns(session.id)) if session.head_turn_id else ()
        try:
            return tree.path(await self._store.all_turns(session.id), previous)
        except TurnNotFound:
            raise PreviousNotFound(f"{session.id} has no response {previous[:80]}") from None

    async def _look(self, tenant_id: str, part: wire.InputText | wire.InputImage) -> Part | Upload:
        if isinstance(part, wire.InputText):
            return TextPart(part.text)
        if part.file_id is not None:
            return _image(await self._images.get(tenant_id, part.file_id))
        return await self._images.look_url(part.image_url or "")

    async def _keep(self, tenant_id: str, part: Part | Upload) -> Part:
        return _image(await self._images.keep(tenant_id, part)) if isinstance(part, Upload) else part

    def _prompt(self, session: Session, branch: tuple[Turn, ...], before: tree.BranchContent, parts: list[Part]) -> TurnPrompt:
        if not branch:
            return open_turn(self._info, session.instructions, parts)
        last = branch[-1].output_ids
        return next_turn(self._info, before.token_ids, last[-1] if last else None, parts)

    def announce_budgets(self, streams: Streams, session: Session, before: Totals, after: Totals) -> None:
        """budget.warning where this turn passed 80% of a ceiling, budget.reached where it came to it."""
        limits = self.limits(session)
        known = {name for name, _, _ in budgets.warnings(limits, before)}
        was = {"max_turns": before.turns, "tokens_per_session": before.tokens}
        for name, limit, used in budgets.warnings(limits, after):
            if used >= limit > was[name]:
                streams.publish(session.id, wire.event("budget.reached", name=name, limit=limit, used=used))
            elif name not in known and used < limit:
                streams.publish(session.id, wire.event("budget.warning", name=name, limit=limit, used=used))


def _image(record: ImageRecord) -> ImagePart:
    return ImagePart(digest=record.digest, width=record.width, height=record.height, grid=record.grid, tokens=record.tokens, start=0)


def _priced(part: Part | Upload) -> Part:
    """As long as it is only looked at, an image counts, and nothing more."""
    if not isinstance(part, Upload):
        return part
    return ImagePart(digest="", width=part.header.width, height=part.header.height, grid=(1, 1, 1), tokens=part.tokens, start=0)


async def _all(parts: Sequence[A], work: Callable[[A], Awaitable[B]]) -> list[B]:
    """Side by side, in order. What is wrong with the first bad part is raised, with the part's place as `param`."""
    done = await asyncio.gather(*(work(part) for part in parts), return_exceptions=True)
    out: list[B] = []
    for i, result in enumerate(done):
        if isinstance(result, BaseException):
            if isinstance(result, ImageRefused | ImagesBusy | ImageNotFound):
                result.param = f"input.0.content.{i}"
            raise result
        out.append(result)
    return out
