"""PURE. What each write makes of a session, and when it is refused: the rules that every store follows."""

from collections.abc import Mapping
from dataclasses import replace

from .errors import Conflict, Duplicate, SessionNotFound, TurnNotFound
from .model import Limits, Session, SessionStatus, Turn
from .tree import check_append


def page_size(limit: int) -> int:
    if limit < 1:
        raise ValueError(f"limit is {limit}, the least is 1")
    return limit


def open_only(session: Session) -> Session:
    """A closed session takes no writes to its conversation. Raises SessionNotFound."""
    if session.status is not SessionStatus.OPEN:
        raise SessionNotFound(session.id)
    return session


def check_commit(session: Session, turn: Turn, *, expected_head: str | None, indexes: Mapping[str, int],
                 key_owner: str | None) -> None:
    """May the turn be committed? `indexes`: of stored turns, at least the parent's and one of the same id.

    The key is looked at before the head: a writer that repeats a commit whose answer it lost must learn that it succeeded.
    """
    open_only(session)
    if key_owner is not None:
        raise Duplicate(key_owner)
    if session.head_turn_id != expected_head:
        raise Conflict(f"the head of {session.id} is {session.head_turn_id}, not {expected_head}")
    if turn.id in indexes:
        raise Conflict(f"{turn.id} exists")
    if turn.parent_id is not None and turn.parent_id not in indexes:
        raise TurnNotFound(turn.parent_id)
    check_append(turn, None if turn.parent_id is None else indexes[turn.parent_id])


def committed(session: Session, turn: Turn) -> Session:
    return with_head(session, turn.id, turn.finished_at)


def with_head(session: Session, turn_id: str | None, now: float) -> Session:
    return replace(session, head_turn_id=turn_id, updated_at=max(session.updated_at, now))


def changed(session: Session, now: float, *, title: str | None, limits: Limits | None, bump_epoch: bool,
            bump_generation: bool, close: bool) -> Session:
    """Closing raises the generation, once. The two counters are ours, not the user's: alone they do not move `updated_at`."""
    closing = close and session.status is SessionStatus.OPEN
    seen_by_user = closing or title is not None or limits is not None
    return replace(
        session,
        title=session.title if title is None else title,
        limits=session.limits if limits is None else limits,
        epoch=session.epoch + bump_epoch,
        generation=session.generation + (bump_generation or closing),
        status=SessionStatus.CLOSED if close else session.status,
        updated_at=max(session.updated_at, now) if seen_by_user else session.updated_at,
    )
