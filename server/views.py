"""PURE. Stored records as the objects of the protocol."""

from collections.abc import Iterable
from typing import Any

from sessions.model import ImagePart, Limits, Part, Session, TextPart, Totals, Turn, TurnStatus, TurnUsage

from . import wire

TITLE_WORDS, TITLE_CHARS = 8, 60
_NO_BYTES = wire.KvBytes()
_INCOMPLETE_REASON = {TurnStatus.INCOMPLETE: "max_output_tokens", TurnStatus.CANCELLED: "cancelled"}


def limits(of: Limits) -> wire.SessionLimits:
    return wire.SessionLimits(
        max_turns=of.max_turns, tokens_per_session=of.tokens_per_session, tokens_per_turn=of.tokens_per_turn,
        images_per_message=of.images_per_message, device_bytes=of.device_bytes, host_bytes=of.host_bytes,
        storage_bytes=of.storage_bytes)


def asked_limits(request: wire.SessionRequest) -> Limits:
    """What a client asks for a session."""
    b = request.budgets
    return Limits(max_turns=request.max_turns, tokens_per_session=b.tokens, tokens_per_turn=b.turn_tokens,
                  images_per_message=b.images_per_message, device_bytes=b.device_bytes, host_bytes=b.host_bytes,
                  storage_bytes=b.storage_bytes)


def session(of: Session, in_force: Limits, used: Totals, kv: wire.KvEntry, *, busy: bool) -> wire.SessionObject:
    return wire.SessionObject(
        id=of.id, title=of.title, instructions=of.instructions, status=str(of.status), limits=limits(in_force),
        used=wire.SessionUse(turns=used.turns, tokens=used.tokens, images=used.images), kv=kv, created_at=of.created_at,
        updated_at=of.updated_at, last_response_id=of.head_turn_id, busy=busy)


def parts(of: Iterable[Part]) -> tuple[dict[str, Any], ...]:
    """A message's parts as in Item.input."""
    return tuple(
        {"type": "input_text", "text": p.text} if isinstance(p, TextPart) else
        {"type": "input_image", "file_id": p.digest, "width": p.width, "height": p.height, "tokens": p.tokens}
        for p in of)


def usage(of: TurnUsage, kv_bytes: wire.KvBytes = _NO_BYTES, *, queue_ms: float = 0.0, restore_ms: float = 0.0,
          prefill_ms: float = 0.0) -> wire.ResponseUsage:
    cached = wire.CachedTokens(of.cached_device_tokens, of.cached_host_tokens, of.cached_storage_tokens)
    return wire.ResponseUsage(
        input_tokens=of.input_tokens, output_tokens=of.output_tokens, total_tokens=of.input_tokens + of.output_tokens,
        image_tokens=of.image_tokens, cached_tokens=cached.device + cached.host + cached.storage, cached_tokens_details=cached,
        kv_bytes=kv_bytes, queue_ms=round(queue_ms, 2), restore_ms=round(restore_ms, 2), prefill_ms=round(prefill_ms, 2),
        ttft_ms=round(of.ttft_ms, 2))


def output(text: str) -> tuple[wire.OutputMessage, ...]:
    return (wire.OutputMessage((wire.OutputText(text),)),)


def response(of: Turn, of_usage: wire.ResponseUsage | None = None, receipt: dict[str, Any] | None = None) -> wire.Response:
    """A committed turn."""
    return wire.Response(
        id=of.id, status=str(of.status), previous_response_id=of.parent_id, output=output(of.output_text),
        usage=of_usage or usage(of.usage), incomplete_reason=_INCOMPLETE_REASON.get(of.status), receipt=receipt)


def end_event(status: str) -> str:
    """The event that ends a response of that status."""
    return {"completed": "response.completed", "failed": "response.failed"}.get(status, "response.incomplete")


def item(of: Turn) -> wire.Item:
    return wire.Item(response_id=of.id, previous_response_id=of.parent_id, status=str(of.status), input=parts(of.input),
                     output_text=of.output_text, created_at=of.created_at, usage=usage(of.usage))


def title_from(of: Iterable[Part]) -> str:
    """The first words of a message; of one without words, what it has."""
    given = tuple(of)
    words = " ".join(p.text for p in given if isinstance(p, TextPart)).split()
    title = " ".join(words[:TITLE_WORDS])
    if not title:
        return "Image" if any(isinstance(p, ImagePart) for p in given) else ""
    return title if len(title) <= TITLE_CHARS else title[:TITLE_CHARS - 1] + "…"
