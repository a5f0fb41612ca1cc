"""What every engine must do, as one suite: derive a test class and give it a `rig` fixture. Counts are asserted, never time.

Sequences are sized so that what can be kept is a whole number of units, a unit being what the tiers below the device store
(LMCache's chunk, a multiple of the page): then nothing is lost on the way down, and every count is exact.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from kvstore.geometry import Geometry
from kvstore.receipt import Outcome, Receipt
from server.engines import channel
from server.engines.base import Engine
from server.engines.channel import (
    Content,
    Delta,
    Failed,
    Finished,
    Generate,
    Ledger,
    Pressure,
    Ready,
    Report,
    Sampling,
    SessionPages,
    Verb,
)

OUTPUT = 4
"""Tokens that most turns here generate."""
_ids = itertools.count()


@dataclass
class Told:
    """A turn as it was heard."""

    session_id: str
    prompt: list[int]
    salt: str
    output: list[int] = field(default_factory=list)
    ends: list[Finished | Failed] = field(default_factory=list)

    @property
    def finished(self) -> Finished:
        assert len(self.ends) == 1, self.ends
        end = self.ends[0]
        assert isinstance(end, Finished), end
        return end

    @property
    def content(self) -> Content:
        return Content(token_ids=self.prompt + self.output, salt=self.salt)


@dataclass
class Rig:
    """A started engine, and what is needed to test it. `vocabulary`: token ids fit for prompts, at least 600 of them."""

    engine: Engine
    ready: Ready
    heard: list[Ledger | Pressure | channel.Progress]
    unit_tokens: int
    vocabulary: Sequence[int]
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.ready.page_tokens, self.ready.token_bytes, self.ready.device_tokens)

    def tokens(self, count: int) -> list[int]:
        """Different ones, in an order that no other call gives."""
        return self.dice.sample(self.vocabulary, count)

    def session(self) -> str:
        return f"s_contract_{next(_ids)}"

    def request(self, session: str, prompt: list[int], *, salt: str = "", max_new_tokens: int = OUTPUT,
                stop: tuple[int, ...] = (), ignore_eos: bool = True) -> Generate:
        return Generate(turn_id=f"t_{next(_ids)}", session_id=session, generation=1, branch_id="b",
                        content=Content(token_ids=prompt, salt=salt),
                        sampling=Sampling(max_new_tokens=max_new_tokens, stop_token_ids=stop, ignore_eos=ignore_eos))

    async def turn(self, session: str, prompt: list[int], **how) -> Told:
        request = self.request(session, prompt, **how)
        told = Told(session, prompt, request.content.salt)
        async with aclosing(self.engine.generate(request)) as events:
            async for event in events:
                assert event.turn_id == request.turn_id
                if isinstance(event, Delta):
                    assert not told.ends, "a delta after the end"
                    told.output += event.token_ids
                else:
                    told.ends.append(event)
        await self.idle()
        return told

    async def kept_turn(self, units: int, *, session: str | None = None, prefix: Sequence[int] = (), salt: str = "") -> Told:
        """A turn after which exactly `units` units of the session can be kept."""
        length = units * self.unit_tokens + 1 - OUTPUT
        return await self.turn(session or self.session(), [*prefix, *self.tokens(length - len(prefix))], salt=salt)

    async def do(self, kind: type[Verb], told: Told, **more) -> Receipt:
        receipt = await self.engine.run(kind(op_id=f"op_{next(_ids)}", session_id=told.session_id, generation=3,
                                             contents=(told.content,), **more))
        assert (receipt.session_id, receipt.generation) == (told.session_id, 3)
        assert receipt.tokens == sum(receipt.source.values())
        assert receipt.pages == self.geometry.pages(receipt.tokens)
        assert receipt.bytes == self.geometry.bytes(receipt.tokens)
        return receipt

    async def pages(self, told: Told) -> SessionPages:
        ledger = await self.engine.report(Report(op_id=f"op_{next(_ids)}", session_id=told.session_id, contents=(told.content,)))
        (entry,) = ledger.entries
        assert entry.session_id == told.session_id
        return entry

    async def pressure(self) -> Pressure:
        return (await self.engine.health()).pressure

    async def idle(self) -> Pressure:
        """Once nothing runs any more, within 10 s."""
        async with asyncio.timeout(10):
            while True:
                health = await self.engine.health()
                if health.running_turns == 0 and health.pressure.in_flight_pages == 0:
                    return health.pressure
                await asyncio.sleep(0.01)


class EngineContract:
    """Derive, and define the fixture `rig` -> Rig."""

    # ---- turns -------------------------------------------------------------------------------------------------
    async def test_a_turn_streams_and_ends_once(self, rig: Rig):
        """A turn is deltas that add up to its usage, then exactly one Finished with the exact prompt length."""
        told = await rig.turn(rig.session(), rig.tokens(21), max_new_tokens=9)
        usage = told.finished.usage
        assert (usage.prompt_tokens, usage.completion_tokens, len(told.output)) == (21, 9, 9)

    async def test_max_new_tokens(self, rig: Rig):
        """An answer that is cut off by its limit says so, down to a single token."""
        for most in (1, 6):
            told = await rig.turn(rig.session(), rig.tokens(20), max_new_tokens=most)
            assert (told.finished.reason, len(told.output)) == ("length", most)

    async def test_stop_token(self, rig: Rig):
        """An answer ends with the first stop token, which belongs to it."""
        prompt = rig.tokens(24)
        free = (await rig.turn(rig.session(), prompt, max_new_tokens=8)).output
        last_new = max(free.index(token) for token in free)
        told = await rig.turn(rig.session(), prompt, max_new_tokens=8, stop=(free[last_new],), ignore_eos=False)
        assert told.finished.reason == "stop"
        assert told.output == free[: last_new + 1]

    async def test_abort(self, rig: Rig):
        """An aborted turn ends with reason abort, short of its limit, and the session's next turn works."""
        session, prompt = rig.session(), rig.tokens(20)
        request = rig.request(session, prompt, max_new_tokens=200)
        output, ends = 0, []
        async for event in rig.engine.generate(request):
            if isinstance(event, Delta):
                if not output:
                    await rig.engine.abort(request.turn_id)
                output += len(event.token_ids)
            else:
                ends.append(event)
        assert [end.reason for end in ends] == ["abort"]
        assert 0 < output == ends[0].usage.completion_tokens < 200
        await rig.idle()
        assert len((await rig.turn(session, prompt)).output) == OUTPUT

    async def test_abort_of_nothing(self, rig: Rig):
        """Aborting an unknown or a finished turn is ignored."""
        told = await rig.turn(rig.session(), rig.tokens(20))
        await rig.engine.abort(told.finished.turn_id)
        await rig.engine.abort("t_unknown")
        assert len((await rig.turn(told.session_id, told.prompt)).output) == OUTPUT

    async def test_closing_the_iterator_aborts(self, rig: Rig):
        """A turn whose iterator is closed early stops running and gives its pages back."""
        session, prompt = rig.session(), rig.tokens(20)
        async with aclosing(rig.engine.generate(rig.request(session, prompt, max_new_tokens=200))) as events:
            async for event in events:
                assert isinstance(event, Delta)
                break
        pressure = await rig.idle()
        assert pressure.free_pages + pressure.used_pages == pressure.total_pages
        assert len((await rig.turn(session, prompt)).output) == OUTPUT

    async def test_turns_side_by_side(self, rig: Rig):
        """Turns that run at the same time get their own answers, the same as alone."""
        prompts = [rig.tokens(24) for _ in range(3)]
        alone = [(await rig.turn(rig.session(), prompt)).output for prompt in prompts]
        together = await asyncio.gather(*(rig.turn(rig.session(), prompt) for prompt in prompts))
        assert [told.output for told in together] == alone

    # ---- the prefix rule ---------------------------------------------------------------------------------------
    async def test_the_next_turn_finds_the_last(self, rig: Rig):
        """A second turn finds the first one's whole pages on the device, all but the last token's."""
        first = await rig.turn(rig.session(), rig.tokens(3 * rig.unit_tokens + 2))
        second = await rig.turn(first.session_id, first.prompt + first.output + rig.tokens(9))
        kept = rig.geometry.kept_tokens(len(first.prompt) + OUTPUT)
        assert first.finished.usage.cached == channel.Cached()
        assert second.finished.usage.cached == channel.Cached(device=kept)

    async def test_the_last_token_is_never_cached(self, rig: Rig):
        """A prompt that was seen whole, and ends with a page, is computed from its last page on."""
        prompt = rig.tokens(2 * rig.unit_tokens)
        await rig.turn(rig.session(), prompt)
        again = await rig.turn(rig.session(), prompt)
        assert again.finished.usage.cached == channel.Cached(device=len(prompt) - rig.ready.page_tokens)

    async def test_another_salt_shares_nothing(self, rig: Rig):
        """The same tokens under another salt find nothing on any tier."""
        first = await rig.kept_turn(3, salt="tenant-a")
        other = await rig.turn(rig.session(), first.prompt, salt="tenant-b")
        assert other.finished.usage.cached == channel.Cached()
        assert (await rig.turn(rig.session(), first.prompt, salt="tenant-a")).finished.usage.cached.device > 0

    # ---- spill and restore -------------------------------------------------------------------------------------
    @pytest.mark.parametrize("to", ["host", "storage"])
    async def test_spill_frees_exactly_what_it_says(self, rig: Rig, to: str):
        """A spill frees the session's exclusive device pages, as its receipt counts them, and the tier below has them."""
        told = await rig.kept_turn(4)
        size = 4 * rig.unit_tokens
        hot, before = await rig.pages(told), await rig.idle()
        assert (hot.device_tokens, hot.device_exclusive_tokens, hot.locked_tokens) == (size, size, 0)
        receipt = await rig.do(channel.Spill, told, to=to)
        assert (receipt.outcome, receipt.target, dict(receipt.source)) == (Outcome.DONE, to, {"device": size})
        after, away = await rig.pressure(), await rig.pages(told)
        assert after.free_pages - before.free_pages == size // rig.ready.page_tokens
        assert (away.device_tokens, away.total_tokens, away.reachable_tokens) == (0, size, size)
        assert getattr(away, f"{to}_tokens") == size
        if to == "storage":
            assert away.host_tokens == 0
        assert (await rig.do(channel.Spill, told, to=to)).outcome is Outcome.NOTHING

    @pytest.mark.parametrize("verb", [channel.Restore, channel.Prefetch])
    @pytest.mark.parametrize("tier", ["host", "storage"])
    async def test_restore_brings_it_back(self, rig: Rig, tier: str, verb: type[Verb]):
        """A restore brings every page back, says from which tier, and leaves the next turn nothing to restore."""
        told = await rig.kept_turn(4)
        size = 4 * rig.unit_tokens
        spilled = await rig.do(channel.Spill, told, to=tier)
        before = await rig.idle()
        receipt = await rig.do(verb, told)
        assert (receipt.outcome, receipt.target, dict(receipt.source)) == (Outcome.DONE, "device", {tier: size})
        assert receipt.digest == spilled.digest
        assert before.free_pages - (await rig.idle()).free_pages == size // rig.ready.page_tokens
        assert (await rig.do(verb, told)).outcome is Outcome.NOTHING
        following = await rig.turn(told.session_id, told.prompt + told.output + rig.tokens(5))
        assert following.finished.usage.cached == channel.Cached(device=size)

    @pytest.mark.parametrize("tier", ["host", "storage"])
    async def test_a_turn_restores_by_itself(self, rig: Rig, tier: str):
        """A turn on a spilled session counts what came back by tier, with a receipt, and answers as if it never left."""
        told = await rig.kept_turn(4)
        prompt = told.prompt + told.output + rig.tokens(5)
        stayed = await rig.turn(rig.session(), prompt)
        await rig.do(channel.Drop, stayed)
        await rig.do(channel.Spill, told, to=tier)
        back = await rig.turn(told.session_id, prompt)
        size = 4 * rig.unit_tokens
        assert back.finished.usage.cached == channel.Cached(**{tier: size})
        assert back.finished.receipt is not None and dict(back.finished.receipt.source) == {tier: size}
        assert back.output == stayed.output

    async def test_demote(self, rig: Rig):
        """A demoted session leaves the host for storage, from where it comes back."""
        told = await rig.kept_turn(3)
        size = 3 * rig.unit_tokens
        await rig.do(channel.Spill, told, to="host")
        receipt = await rig.do(channel.Demote, told)
        assert (receipt.outcome, receipt.target, dict(receipt.source)) == (Outcome.DONE, "storage", {"host": size})
        away = await rig.pages(told)
        assert (away.device_tokens, away.host_tokens, away.storage_tokens, away.reachable_tokens) == (0, 0, size, size)
        assert dict((await rig.do(channel.Restore, told)).source) == {"storage": size}

    @pytest.mark.parametrize("first", [None, "host", "storage"])
    async def test_drop(self, rig: Rig, first: str | None):
        """A dropped session has nothing on any tier, wherever it was, and its next turn computes everything."""
        told = await rig.kept_turn(3)
        if first:
            await rig.do(channel.Spill, told, to=first)
        receipt = await rig.do(channel.Drop, told)
        assert (receipt.outcome, receipt.target, receipt.tokens) == (Outcome.DONE, None, 3 * rig.unit_tokens)
        gone = await rig.pages(told)
        assert (gone.device_tokens, gone.host_tokens, gone.storage_tokens, gone.reachable_tokens) == (0, 0, 0, 0)
        again = await rig.turn(told.session_id, told.prompt)
        assert again.finished.usage.cached == channel.Cached()

    @pytest.mark.parametrize("verb", ["host", "storage", "drop"])
    async def test_a_neighbour_loses_nothing(self, rig: Rig, verb: str):
        """Pages shared with another session stay, are counted in the receipt, and the neighbour's next turn finds all its own."""
        prefix = rig.tokens(2 * rig.unit_tokens)
        told, neighbour = await rig.kept_turn(4, prefix=prefix), await rig.kept_turn(5, prefix=prefix)
        before, pages = await rig.idle(), await rig.pages(told)
        assert (pages.device_tokens, pages.device_exclusive_tokens) == (4 * rig.unit_tokens, 2 * rig.unit_tokens)
        receipt = await (rig.do(channel.Drop, told) if verb == "drop" else rig.do(channel.Spill, told, to=verb))
        assert (receipt.tokens, receipt.shared_kept_tokens) == (2 * rig.unit_tokens, 2 * rig.unit_tokens)
        assert (await rig.pressure()).free_pages - before.free_pages == receipt.pages
        following = await rig.turn(neighbour.session_id, neighbour.prompt + neighbour.output + rig.tokens(5))
        assert following.finished.usage.cached == channel.Cached(device=5 * rig.unit_tokens)

    # ---- refusals ----------------------------------------------------------------------------------------------
    async def test_verbs_on_an_unknown_session(self, rig: Rig):
        """Every verb on a session that the engine never saw does nothing and says so."""
        nobody = Told(rig.session(), rig.tokens(3 * rig.unit_tokens), "")
        for kind in (channel.Restore, channel.Prefetch, channel.Demote, channel.Drop):
            assert (await rig.do(kind, nobody)).outcome is Outcome.NOTHING
        assert (await rig.do(channel.Spill, nobody, to="host")).outcome is Outcome.NOTHING
        assert (await rig.do(channel.Pin, nobody, until=4e9)).outcome is Outcome.NOTHING
        assert (await rig.pages(nobody)).reachable_tokens == 0

    async def test_verbs_during_a_turn_are_refused(self, rig: Rig):
        """A verb on a session whose turn runs is refused and changes nothing; the turn and the next verb work."""
        told = await rig.kept_turn(3)
        request = rig.request(told.session_id, told.prompt + told.output, max_new_tokens=60)
        output = 0
        async for event in rig.engine.generate(request):
            if isinstance(event, Delta):
                if not output:
                    receipt = await rig.do(channel.Spill, told, to="host")
                    assert receipt.outcome is Outcome.REFUSED and receipt.reason
                    assert (await rig.do(channel.Drop, told)).outcome is Outcome.REFUSED
                output += len(event.token_ids)
            else:
                assert isinstance(event, Finished)
        assert output == 60
        await rig.idle()
        assert (await rig.do(channel.Spill, told, to="host")).outcome is Outcome.DONE

    async def test_pin(self, rig: Rig):
        """A pin counts what it holds and moves nothing; a time that is past takes it back."""
        told = await rig.kept_turn(2)
        before = await rig.pages(told)
        for until in (4e9, 0.0):
            receipt = await rig.do(channel.Pin, told, until=until)
            assert (receipt.outcome, receipt.tokens) == (Outcome.DONE, 2 * rig.unit_tokens)
        assert await rig.pages(told) == before

    # ---- figures -----------------------------------------------------------------------------------------------
    async def test_the_books_balance(self, rig: Rig):
        """Every page is free, used or in flight at every report, and device figures by session reach the ledger in order."""
        told = await rig.kept_turn(3)
        await rig.do(channel.Spill, told, to="host")
        await rig.do(channel.Restore, told)
        async with asyncio.timeout(10):
            while not any(_device_tokens(m, told.session_id) == 3 * rig.unit_tokens for m in reversed(rig.heard)):
                await asyncio.sleep(0.01)
        pressures = [m for m in rig.heard if isinstance(m, Pressure)] + [await rig.pressure()]
        assert all(p.free_pages + p.used_pages + p.in_flight_pages == p.total_pages for p in pressures)
        assert all(min(p.free_pages, p.used_pages, p.in_flight_pages) >= 0 for p in pressures)
        epochs = [m.epoch for m in rig.heard if isinstance(m, Ledger)]
        assert epochs == sorted(set(epochs))
        everybody = await rig.engine.report(Report(op_id="op_all"))
        mine = next(entry for entry in everybody.entries if entry.session_id == told.session_id)
        assert (mine.device_tokens, mine.device_exclusive_tokens) == (3 * rig.unit_tokens, 3 * rig.unit_tokens)
        assert mine.host_tokens is None and mine.total_tokens is None


def _device_tokens(message: object, session_id: str) -> int | None:
    if not isinstance(message, Ledger):
        return None
    return next((entry.device_tokens for entry in message.entries if entry.session_id == session_id), 0)
