"""Pages whose session is gone: the engine names an owner that the store does not know."""

import time
from types import SimpleNamespace
from typing import Any

from kvstore.geometry import Tier
from kvstore.planner import PlanPolicy
from kvstore.receipt import KvVerb, Outcome, Receipt
from server.background import Background
from server.engines.channel import Drop, SessionPages
from server.streams import Streams
from server.tiers import Tiers
from sessions.memory import MemoryStore


async def test_pages_of_a_deleted_session_are_dropped_and_forgotten() -> None:
    """A turn that the engine ended after its session was deleted leaves pages: the planner's spill of them becomes a drop."""
    asked: list[Any] = []

    async def run(verb: Any) -> Receipt:
        asked.append(verb)
        return Receipt("kv_1", KvVerb.DROP, verb.session_id, 0, source={Tier.DEVICE: 32}, tokens=32, outcome=Outcome.DONE)

    store, background = MemoryStore(), Background()
    tiers = Tiers(store, Streams(store, replay_events=10), SimpleNamespace(engine=SimpleNamespace(run=run), geometry=None),
                  PlanPolicy(to_host_s=1, to_storage_s=None, high=0.9, low=0.7, page_tokens=16), background=background,
                  salt_of=lambda tenant: "", common_tokens=lambda session: 0, moved=lambda receipt: None)
    tiers.manager.on_ledger(1, [SessionPages(session_id="s_gone", device_tokens=32, device_exclusive_tokens=32)])
    await tiers.manager.tick(time.time() + 60)
    await background.close()
    assert [type(verb) for verb in asked] == [Drop] and asked[0].session_id == "s_gone" and not asked[0].contents
    assert "s_gone" not in tiers.ledger
    assert await tiers.manager.tick(time.time() + 60) == []
