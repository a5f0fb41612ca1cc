"""Sessions and turns for tests, and a reader of the SQLite file that shares no code with the store."""

import json
import sqlite3
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from sessions.model import ImagePart, Limits, Session, SessionStatus, TextPart, Turn, TurnStatus, TurnUsage


def make_session(session_id: str = "s_1", **over: Any) -> Session:
    base = Session(id=session_id, tenant_id="default", owner_id="ann", status=SessionStatus.OPEN, title="Shapes",
                   instructions="Be brief.", limits=Limits(max_turns=50), epoch=1, generation=1, head_turn_id=None,
                   created_at=100.0, updated_at=100.0, extra={"theme": "dark"})
    return replace(base, **over)


def make_turn(turn_id: str, parent: Turn | None = None, *, session_id: str = "s_1", input_ids: tuple[int, ...] = (1, 2, 3),
              output_ids: tuple[int, ...] = (7, 8), **over: Any) -> Turn:
    """A turn that follows `parent`, consistent in itself."""
    base = Turn(id=turn_id, session_id=session_id, parent_id=parent.id if parent else None,
                index=parent.index + 1 if parent else 0, status=TurnStatus.COMPLETED, input=(TextPart(f"text of {turn_id}"),),
                output_text=f"answer of {turn_id}", input_ids=input_ids, output_ids=output_ids,
                usage=TurnUsage(added_tokens=len(input_ids), output_tokens=len(output_ids)), created_at=101.0, finished_at=102.0)
    return replace(base, **over)


def make_image(start: int, tokens: int, digest: str = "ab" * 32) -> ImagePart:
    return ImagePart(digest=digest, width=448, height=448, grid=(1, 32, 32), tokens=tokens, start=start)


class StoredTurn(NamedTuple):
    id: str
    parent_id: str | None
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    input: list[dict[str, Any]]


class StoredSession(NamedTuple):
    head_turn_id: str | None
    turns: list[StoredTurn]


def peek(path: Path, session_id: str) -> StoredSession | None:
    """What the file says of the session. The file is also checked as SQLite checks it."""
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        session = connection.execute("SELECT head_turn_id FROM sessions WHERE id = ?", (session_id,)).fetchone()
        rows = connection.execute("SELECT id, parent_id, input_ids, output_ids, input FROM turns WHERE session_id = ? "
                                  "ORDER BY seq", (session_id,)).fetchall()
    finally:
        connection.close()
    if session is None:
        assert rows == [], "turns without their session"
        return None
    return StoredSession(session[0], [StoredTurn(i, p, _ids(a), _ids(b), json.loads(parts)) for i, p, a, b, parts in rows])


def _ids(blob: bytes) -> tuple[int, ...]:
    return tuple(value for (value,) in struct.iter_unpack("<I", blob))
