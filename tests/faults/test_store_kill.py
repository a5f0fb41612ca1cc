"""kill -9 of a process that writes: what it acknowledged is there, whole; the rest is not there at all."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from sessions.model import Totals
from sessions.sqlite import SqliteStore
from tests.support.conversations import make_turn, peek
from tests.support.store_writer import expected_turn

TRIALS = int(os.environ.get("REKINDLE_TRIALS", "5"))
ROOT = Path(__file__).parents[2]


def _write_until_killed(path: Path, session_id: str, acknowledged: int | None, delay_s: float) -> list[str]:
    """Start a writer, kill it `delay_s` after it printed that many lines (None: after its start); its whole lines."""
    writer = subprocess.Popen([sys.executable, "-m", "tests.support.store_writer", str(path), session_id], cwd=ROOT,
                              stdout=subprocess.PIPE, text=True)
    lines = [] if acknowledged is None else [writer.stdout.readline() for _ in range(acknowledged)]
    assert all(line.endswith("\n") for line in lines), "the writer ended by itself"
    time.sleep(delay_s)
    writer.kill()
    lines += writer.stdout.readlines()
    writer.stdout.close()
    assert writer.wait() == -9, "the writer ended by itself"
    return [line.strip() for line in lines if line.endswith("\n")]


async def test_acknowledged_turns_survive_kill_9(tmp_path):
    """Killed at random moments, opening included: each acknowledged turn is whole, at most the one that was being
    acknowledged is there besides, the head is the last one, earlier rounds are untouched, and the next commit works."""
    path, seed = tmp_path / "s.db", random.randrange(2**32)
    dice, rounds, total = random.Random(seed), {}, 0
    for trial in range(TRIALS):
        session_id = f"s_{trial}"
        started = trial % 5 != 4
        lines = _write_until_killed(path, session_id, dice.randint(1, 20) if started else None,
                                    dice.uniform(0, 0.02) if started else dice.uniform(0, 1.5))
        acked = lines[1:]
        total += len(acked)
        store = SqliteStore(path)
        await store.open()
        stored = peek(path, session_id)
        assert stored is not None or not lines, f"seed {seed}"
        if stored is not None:
            ids = [turn.id for turn in stored.turns]
            assert ids[: len(acked)] == acked and len(ids) <= len(acked) + 1, f"seed {seed}"
            assert stored.head_turn_id == (ids[-1] if ids else None), f"seed {seed}"
            parent = None
            for number, turn in enumerate(await store.turns(session_id)):
                parent = expected_turn(number, parent, session_id)
                assert turn == parent, f"seed {seed}"
            last = make_turn("r_after", parent, session_id=session_id)
            await store.commit_turn(last, expected_head=stored.head_turn_id)
            assert await store.totals(session_id) == Totals(len(ids) + 1, 6000 * len(ids) + 5, 0)
            rounds[session_id] = peek(path, session_id)
        await store.close()
        assert {known: peek(path, known) for known in rounds} == rounds, f"seed {seed}"
    assert total > 0
