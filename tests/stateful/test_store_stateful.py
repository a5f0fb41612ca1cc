"""Both stores against a trivial model, step by step: any order of writes, refusals and reopenings."""

import asyncio
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sessions.errors import Conflict, Duplicate, SessionError, SessionNotFound, TurnNotFound
from sessions.memory import MemoryStore
from sessions.model import Limits, Session, SessionStatus, Totals, Turn
from sessions.sqlite import SqliteStore
from tests.support.conversations import make_image, make_session, make_turn, peek

IDS = st.sampled_from(["s_1", "s_2"])
PICK = st.integers(0, 99)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)


class StoreMachine(RuleBasedStateMachine):
    """The model: a dict of sessions, and of each the list of its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "s.db"
        self.now = 1000.0
        self.stores = [MemoryStore(clock=lambda: self.now), SqliteStore(self.path, clock=lambda: self.now, power_safe=False)]
        self.sessions: dict[str, Session] = {}
        self.turns: dict[str, list[Turn]] = {}
        self.count = 0
        for store in self.stores:
            self.runner.run(store.open())

    def teardown(self) -> None:
        self.runner.run(self.stores[1].close())
        self.runner.close()
        self.folder.cleanup()

    def do(self, method: str, *args, expected: object, **kwargs) -> None:
        """Call both stores; each must return `expected`, or raise exactly that type."""
        for store in self.stores:
            try:
                result = self.runner.run(getattr(store, method)(*args, **kwargs))
            except SessionError as error:
                result = type(error)
            assert result == expected, (store, method, args, kwargs)

    def pick(self, session_id: str, number: int) -> Turn | None:
        choices = [None, *self.turns.get(session_id, [])]
        return choices[number % len(choices)]

    @rule(session_id=IDS)
    def create(self, session_id):
        self.now += 1
        session = make_session(session_id, updated_at=self.now)
        self.do("create", session, expected=Conflict if session_id in self.sessions else None)
        if session_id not in self.sessions:
            self.sessions[session_id], self.turns[session_id] = session, []

    @rule(session_id=IDS, parent=PICK, input_ids=TOKENS, output_ids=TOKENS, images=st.integers(0, 2),
          key=st.none() | st.sampled_from(["k1", "k2", "k3"]), stale=st.integers(0, 4))
    def commit(self, session_id, parent, input_ids, output_ids, images, key, stale):
        self.now += 1
        self.count += 1
        turn = make_turn(f"r_{self.count}", self.pick(session_id, parent), session_id=session_id, input_ids=input_ids,
                         output_ids=output_ids, idempotency_key=key, finished_at=self.now,
                         input=tuple(make_image(n, 1) for n in range(images)))
        session = self.sessions.get(session_id)
        head = session.head_turn_id if session and stale else "r_stale"
        owner = next((t for t in self.turns.get(session_id, []) if key and t.idempotency_key == key), None)
        if session is None or session.status is SessionStatus.CLOSED:
            expected: object = SessionNotFound
        elif owner:
            expected = Duplicate
        elif head != session.head_turn_id:
            expected = Conflict
        else:
            expected = self.sessions[session_id] = replace(session, head_turn_id=turn.id, updated_at=self.now)
            self.turns[session_id].append(turn)
        self.do("commit_turn", turn, expected_head=head, expected=expected)

    @rule(session_id=IDS, number=PICK, unknown=st.booleans())
    def set_head(self, session_id, number, unknown):
        self.now += 1
        turn, session = self.pick(session_id, number), self.sessions.get(session_id)
        turn_id = "r_none" if unknown else turn.id if turn else None
        if session is None or session.status is SessionStatus.CLOSED:
            expected: object = SessionNotFound
        elif unknown:
            expected = TurnNotFound
        else:
            expected = self.sessions[session_id] = replace(session, head_turn_id=turn_id, updated_at=self.now)
        self.do("set_head", session_id, turn_id, expected=expected)

    @rule(session_id=IDS, title=st.none() | st.text(max_size=3), turns=st.none() | st.integers(1, 9), bump=st.booleans())
    def update(self, session_id, title, turns, bump):
        self.now += 1
        expected: object = SessionNotFound
        limits = None if turns is None else Limits(max_turns=turns)
        if session := self.sessions.get(session_id):
            over = {name: value for name, value in (("title", title), ("limits", limits)) if value is not None}
            if over:
                over["updated_at"] = self.now
            expected = self.sessions[session_id] = replace(session, epoch=session.epoch + bump, **over)
        self.do("update", session_id, title=title, limits=limits, bump_epoch=bump, expected=expected)

    @rule(session_id=IDS)
    def close_session(self, session_id):
        self.now += 1
        session = self.sessions.get(session_id)
        if session and session.status is SessionStatus.OPEN:
            session = self.sessions[session_id] = replace(session, status=SessionStatus.CLOSED, generation=session.generation + 1,
                                                          updated_at=self.now)
        self.do("update", session_id, close=True, expected=session or SessionNotFound)

    @rule(session_id=IDS)
    def delete(self, session_id):
        self.sessions.pop(session_id, None)
        self.turns.pop(session_id, None)
        self.do("delete", session_id, expected=None)

    @rule()
    def reopen(self):
        self.runner.run(self.stores[1].close())
        self.stores[1] = SqliteStore(self.path, clock=lambda: self.now, power_safe=False)
        self.runner.run(self.stores[1].open())

    @invariant()
    def the_stores_say_what_the_model_says(self):
        for session_id in ("s_1", "s_2"):
            session, turns = self.sessions.get(session_id), self.turns.get(session_id, [])
            by_id, branch = {t.id: t for t in turns}, []
            at = session.head_turn_id if session else None
            while at:
                branch.insert(0, by_id[at])
                at = by_id[at].parent_id
            tokens = sum(len(t.input_ids) + len(t.output_ids) for t in turns)
            totals = Totals(len(turns), tokens, sum(len(t.input) for t in turns))
            self.do("get", session_id, expected=session or SessionNotFound)
            self.do("turns", session_id, expected=branch if session else SessionNotFound)
            self.do("all_turns", session_id, expected=turns if session else SessionNotFound)
            self.do("totals", session_id, expected=totals if session else SessionNotFound)
        still_open = [s for s in self.sessions.values() if s.status is SessionStatus.OPEN]
        self.do("list", expected=sorted(still_open, key=lambda s: -s.updated_at))

    @invariant()
    def the_file_says_it_too(self):
        for session_id in ("s_1", "s_2"):
            stored, session = peek(self.path, session_id), self.sessions.get(session_id)
            assert (stored is None) == (session is None)
            if stored:
                assert stored.head_turn_id == session.head_turn_id
                assert [(t.id, t.parent_id, t.input_ids, t.output_ids) for t in stored.turns] == \
                       [(t.id, t.parent_id, t.input_ids, t.output_ids) for t in self.turns[session_id]]


TestStores = StoreMachine.TestCase
TestStores.settings = settings(max_examples=int(os.environ.get("REKINDLE_TRIALS", "8")), stateful_step_count=20, deadline=None)
