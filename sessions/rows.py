"""PURE. Records to rows and back, without loss."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from .model import (
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


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Little-endian uint32. Raises struct.error for an id that does not fit."""
    ids = tuple(token_ids)
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(blob) // 4}I", blob)


def counted(turn: Turn) -> Totals:
    """What the turn adds to its session's totals."""
    images = sum(isinstance(part, ImagePart) for part in turn.input)
    return Totals(turns=1, tokens=turn.usage.added_tokens + turn.usage.output_tokens, images=images)


def _part_to_json(part: Part) -> dict[str, Any]:
    return {"type": "text" if isinstance(part, TextPart) else "image", **asdict(part)}


def _part_from_json(tree: Mapping[str, Any]) -> Part:
    values = dict(tree)
    if values.pop("type") == "text":
        return TextPart(**values)
    time, rows, columns = values.pop("grid")
    return ImagePart(grid=(time, rows, columns), **values)


def session_to_row(session: Session) -> dict[str, Any]:
    row = asdict(session)
    row["status"] = str(session.status)
    return row


def session_from_row(row: Mapping[str, Any]) -> Session:
    return Session(**{**row, "status": SessionStatus(row["status"]), "limits": Limits(**row["limits"])})


def turn_to_row(turn: Turn) -> dict[str, Any]:
    count = counted(turn)
    return {
        "session_id": turn.session_id, "id": turn.id, "parent_id": turn.parent_id, "branch_index": turn.index,
        "status": str(turn.status), "idempotency_key": turn.idempotency_key, "created_at": turn.created_at,
        "finished_at": turn.finished_at, "counted_tokens": count.tokens, "counted_images": count.images,
        "usage": asdict(turn.usage), "input": [_part_to_json(part) for part in turn.input],
        "output_text": turn.output_text, "input_ids": pack_tokens(turn.input_ids), "output_ids": pack_tokens(turn.output_ids),
    }


def turn_from_row(row: Mapping[str, Any]) -> Turn:
    return Turn(
        id=row["id"], session_id=row["session_id"], parent_id=row["parent_id"], index=row["branch_index"],
        status=TurnStatus(row["status"]), input=tuple(_part_from_json(part) for part in row["input"]),
        output_text=row["output_text"], input_ids=unpack_tokens(row["input_ids"]), output_ids=unpack_tokens(row["output_ids"]),
        usage=TurnUsage(**row["usage"]), created_at=row["created_at"], finished_at=row["finished_at"],
        idempotency_key=row["idempotency_key"],
    )
