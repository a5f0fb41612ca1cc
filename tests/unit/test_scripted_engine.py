"""The scripted engine beyond the contract: what it echoes, how it fails on demand, how its pool fills."""

import pytest

from kvstore.geometry import Tier
from kvstore.receipt import KvVerb, Outcome
from server.engines import channel
from server.engines.base import EngineStartError, EngineUnavailable
from server.engines.channel import Content, Delta, Failed, Generate, ImageRef, Sampling
from server.engines.scripted import ScriptedConfig, ScriptedEngine, last_user_text

OPEN, CLOSE, NEWLINE, SYSTEM, USER, ASSISTANT, PAD, IMAGE_OPEN, IMAGE_CLOSE = range(1, 10)


def chat(*messages: list[int]) -> list[int]:
    head = [OPEN, SYSTEM, NEWLINE, 50, CLOSE, NEWLINE]
    return head + [t for m in messages for t in [OPEN, USER, NEWLINE, *m, CLOSE, NEWLINE]] + [OPEN, ASSISTANT, NEWLINE]


def image(start: int, digest: str = "d") -> ImageRef:
    return ImageRef(digest=digest, width=28, height=28, grid=(1, 2, 2), tokens=2, start=start)


async def started(**config) -> ScriptedEngine:
    engine = ScriptedEngine(ScriptedConfig(page_tokens=4, **config))
    await engine.start(lambda message: None)
    return engine


async def turn(engine: ScriptedEngine, ids: list[int], session: str = "a", images: tuple[ImageRef, ...] = (), most: int = 8):
    request = Generate(turn_id=f"t-{session}", session_id=session, generation=1, branch_id="b", content=Content(token_ids=ids, images=images),
                       sampling=Sampling(max_new_tokens=most, stop_token_ids=(CLOSE,)))
    events = [event async for event in engine.generate(request)]
    return [t for e in events if isinstance(e, Delta) for t in e.token_ids], events[-1]


@pytest.mark.parametrize(("message", "images", "text"), [
    ([60, 61, 62], (), [60, 61, 62]), ([60, NEWLINE, 61], (), [60, NEWLINE, 61]), ([], (), []),
    ([IMAGE_OPEN, PAD, PAD, IMAGE_CLOSE, 60, 61], (16,), [60, 61])])
def test_the_text_of_the_last_message(message, images, text):
    """The last user message is found by the chat's shape, without its header and its images."""
    ids = chat([70, 71], message)
    starts = tuple(image(ids.index(PAD)) for _ in images)
    assert last_user_text(Content(token_ids=ids, images=starts), (CLOSE,)) == text


def test_a_prompt_without_a_chat_is_all_text():
    """Without stop tokens in it, the prompt is the text."""
    assert last_user_text(Content(token_ids=[60, 61]), (CLOSE,)) == [60, 61]


async def test_it_echoes_and_stops():
    """The answer is the message and the stop token; an empty message is answered with the stop token alone."""
    engine = await started()
    output, end = await turn(engine, chat([60, 61]))
    assert (output, end.reason) == ([60, 61, CLOSE], "stop")
    assert (await turn(engine, chat([])))[0] == [CLOSE]


async def test_another_image_of_the_same_size_is_another_page():
    """The prefix stops at the page of an image with another digest, though the token ids are the same."""
    engine = await started()
    ids = [*range(20, 32), IMAGE_OPEN, PAD, PAD, IMAGE_CLOSE, *range(40, 52), CLOSE]
    await turn(engine, ids, images=(image(13, "red"),))
    _, same = await turn(engine, ids, session="b", images=(image(13, "red"),))
    _, other = await turn(engine, ids, session="c", images=(image(13, "blue"),))
    assert (same.usage.cached.device, other.usage.cached.device) == (28, 12)


async def test_it_dies_on_demand():
    """After die_after_tokens its turn fails as retryable, its owner is told once, and calls are refused."""
    exits = []
    engine = ScriptedEngine(ScriptedConfig(die_after_tokens=2), lambda *args: exits.append(args))
    await engine.start(lambda message: None)
    output, end = await turn(engine, chat([60, 61, 62]))
    assert output == [60, 61]
    assert isinstance(end, Failed) and (end.code, end.retryable) == ("engine_died", True)
    for call in (engine.health(), engine.report(channel.Report(op_id="r")),
                 engine.run(channel.Drop(op_id="d", session_id="a", generation=1, contents=()))):
        with pytest.raises(EngineUnavailable):
            await call
    assert exits == [(None, "its script says so")]


async def test_it_refuses_to_start_on_demand():
    """start_error is the reason of its EngineStartError, and then it serves nothing."""
    engine = ScriptedEngine(ScriptedConfig(start_error="half-hooked"))
    with pytest.raises(EngineStartError, match="half-hooked"):
        await engine.start(lambda message: None)
    with pytest.raises(EngineUnavailable):
        await engine.health()


async def test_a_failing_verb_changes_nothing():
    """A verb that fails on demand leaves every page where it was; the next kind of verb works."""
    engine = await started(failing_verbs=("spill",))
    await turn(engine, chat([60, 61]))
    before = engine.pages.sessions()
    verb = channel.Spill(op_id="o", session_id="a", generation=1, contents=(), to="host")
    assert (await engine.run(verb)).outcome is Outcome.FAILED
    assert engine.pages.sessions() == before
    engine.config.failing_verbs = ()
    assert (await engine.run(verb)).outcome is Outcome.DONE


async def test_a_full_pool_evicts_the_oldest_and_spares_the_pinned():
    """New turns push out the least recently used pages, not pinned ones; what was pushed out comes back from the host."""
    engine = await started(device_tokens=4 * 16)
    prompts = {name: [n * 100 + i for i in range(20)] for n, name in enumerate("abc", 1)}
    await turn(engine, prompts["a"], "a", most=1)
    assert (await engine.run(channel.Pin(op_id="p", session_id="a", generation=1, contents=(), until=4e9))).verb is KvVerb.PIN
    await turn(engine, prompts["b"], "b", most=1)
    await turn(engine, prompts["c"], "c", most=20)
    held = {entry.session_id: entry.device_tokens for entry in engine.pages.sessions()}
    assert held["a"] == 20 and held.get("b", 0) < 20
    _, end = await turn(engine, [*prompts["b"], 7, 8], "b", most=1)
    assert end.usage.cached.device + end.usage.cached.host == 20 and end.usage.cached.host > 0
    assert dict(end.receipt.source) == {str(Tier.HOST): end.usage.cached.host}


async def test_what_does_not_fit_is_refused_and_leaves_nothing():
    """A turn above the pool or the context fails with its numbers, gives everything back, and a smaller one works."""
    engine = await started(device_tokens=4 * 16, context_tokens=200)
    for ids, code, retryable in ((list(range(100)), "device_pool_full", True), (list(range(300)), "context_too_long", False)):
        _, end = await turn(engine, ids)
        assert (end.code, end.retryable) == (code, retryable)
        health = await engine.health()
        assert (health.running_turns, health.pressure.in_flight_pages, health.pressure.free_pages) == (0, 0, 16)
    assert (await turn(engine, chat([60])))[1].reason == "stop"
