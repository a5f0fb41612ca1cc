"""Stored records as protocol objects."""

import pytest

from server import views, wire
from sessions.model import ImagePart, Limits, TextPart, Turn, TurnStatus, TurnUsage

IMAGE = ImagePart("d" * 64, 112, 112, (1, 8, 8), 16, 5)


def turn(status: TurnStatus = TurnStatus.COMPLETED) -> Turn:
    usage = TurnUsage(input_tokens=100, added_tokens=40, output_tokens=7, image_tokens=16, cached_device_tokens=32,
                      cached_host_tokens=16, ttft_ms=12.345)
    return Turn("r_2", "s_1", "r_1", 1, status, (IMAGE, TextPart("hello")), "hi", (1, 2), (3,), usage, 10.0, 11.0)


@pytest.mark.parametrize(("status", "reason", "event"), [
    (TurnStatus.COMPLETED, None, "response.completed"), (TurnStatus.INCOMPLETE, "max_output_tokens", "response.incomplete"),
    (TurnStatus.CANCELLED, "cancelled", "response.incomplete")])
def test_a_turn_as_a_response(status: TurnStatus, reason: str | None, event: str) -> None:
    """Status, reason, and the event that ends it."""
    response = views.response(turn(status))
    assert (response.id, response.status, response.incomplete_reason, response.previous_response_id) == ("r_2", str(status), reason, "r_1")
    assert views.end_event(response.status) == event


def test_usage_adds_up() -> None:
    """Totals and cached tokens are sums of their parts."""
    usage = views.usage(turn().usage, wire.KvBytes(1, 2, 3), queue_ms=1.005)
    assert (usage.total_tokens, usage.cached_tokens) == (107, 48)
    assert usage.cached_tokens_details == wire.CachedTokens(32, 16, 0) and usage.kv_bytes == wire.KvBytes(1, 2, 3)


def test_an_item_shows_text_and_images_as_sent() -> None:
    """Images by file id with size and price; no token ids."""
    item = views.item(turn())
    assert item.input == ({"type": "input_image", "file_id": "d" * 64, "width": 112, "height": 112, "tokens": 16},
                          {"type": "input_text", "text": "hello"})
    assert item.output_text == "hi"


@pytest.mark.parametrize(("parts", "title"), [
    ((TextPart("what is this"),), "what is this"), ((TextPart("  one two\nthree four five six seven eight nine"),), "one two three four five six seven eight"),
    ((IMAGE,), "Image"), ((TextPart(" "),), ""), ((TextPart("x" * 100),), "x" * 59 + "…")])
def test_a_title_is_the_first_words(parts: tuple, title: str) -> None:
    """At most 8 words and 60 characters; a message of images alone has a title too."""
    assert views.title_from(parts) == title


def test_asked_limits_keep_their_names() -> None:
    """budgets.tokens is tokens_per_session, turn_tokens is tokens_per_turn."""
    asked = views.asked_limits(wire.SessionRequest(max_turns=3, budgets=wire.Budgets(tokens=10, turn_tokens=5, host_bytes=7)))
    assert asked == Limits(max_turns=3, tokens_per_session=10, tokens_per_turn=5, host_bytes=7)
    assert views.limits(asked).tokens_per_session == 10
