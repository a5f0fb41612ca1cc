"""Run by the kill test: commits turns for ever, and prints the id of each when the store has said that it is durable."""

import asyncio
import sys
from pathlib import Path

from sessions.model import Turn
from sessions.sqlite import SqliteStore
from tests.support.conversations import make_session, make_turn

TURN_TOKENS = 3000
"""Some database pages, so that a kill finds a commit half written."""


def expected_turn(number: int, parent: Turn | None, session_id: str) -> Turn:
    """The turn with that number: its content follows from it, so that a reader can tell whether it is whole."""
    return make_turn(f"r_{number}", parent, session_id=session_id, input_ids=tuple(range(number, number + TURN_TOKENS)),
                     output_ids=tuple(range(number * 7, number * 7 + TURN_TOKENS)))


async def write(path: Path, session_id: str) -> None:
    store = SqliteStore(path)
    await store.open()
    await store.create(make_session(session_id))
    print("open", flush=True)
    parent, number = None, 0
    while True:
        turn = expected_turn(number, parent, session_id)
        await store.commit_turn(turn, expected_head=parent.id if parent else None)
        print(turn.id, flush=True)
        parent, number = turn, number + 1


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), sys.argv[2]))
