"""The ledger: states of residency, epochs, late receipts, totals."""

from dataclasses import dataclass, replace

import pytest

from kvstore.geometry import Tier
from kvstore.ledger import IllegalStep, Ledger, Residency
from kvstore.receipt import KvVerb, Outcome, Receipt


@dataclass
class Figures:
    session_id: str
    device_tokens: int
    device_exclusive_tokens: int
    locked_tokens: int = 0


def report(ledger: Ledger, device: int, host: int, storage: int, total: int = 100, reachable: int | None = None) -> Residency:
    ledger.apply_report("a", device_tokens=device, device_exclusive_tokens=device, host_tokens=host, storage_tokens=storage,
                        total_tokens=total, reachable_tokens=max(device, host, storage) if reachable is None else reachable)
    return ledger.state("a")


@pytest.mark.parametrize(("device", "host", "storage", "state"), [
    (100, 0, 0, Residency.HOT), (100, 100, 100, Residency.HOT), (30, 100, 0, Residency.WARM), (0, 100, 100, Residency.WARM),
    (30, 30, 100, Residency.COLD), (0, 0, 100, Residency.COLD), (30, 60, 60, Residency.LOST), (0, 0, 0, Residency.LOST)])
def test_states(device, host, storage, state):
    """Hot, warm, cold and lost follow from what the tiers have of the total."""
    assert report(Ledger(), device, host, storage) is state


def test_empty_and_restoring():
    """Nothing yet is empty; a restore or prefetch in flight is restoring, whatever the figures say; another verb is not."""
    ledger = Ledger()
    assert ledger.state("a") is Residency.EMPTY
    report(ledger, 0, 100, 0)
    for verb, state in ((KvVerb.RESTORE, Residency.RESTORING), (KvVerb.PREFETCH, Residency.RESTORING), (KvVerb.SPILL, Residency.WARM)):
        ledger.begin_verb("a", verb)
        assert ledger.state("a") is state
        ledger.end_verb("a")
    assert ledger.state("a") is Residency.WARM


def test_an_older_epoch_is_ignored():
    """Device figures that are overtaken change nothing, until the engine restarts and epochs begin again."""
    ledger = Ledger()
    assert ledger.apply_device(5, [Figures("a", 32, 16, 8), Figures("b", 48, 32)])
    assert not ledger.apply_device(5, []) and not ledger.apply_device(4, [])
    assert (ledger.entry("a").device_tokens, ledger.entry("a").device_exclusive_tokens, ledger.entry("a").locked_tokens) == (32, 16, 8)
    assert ledger.apply_device(6, [Figures("b", 64, 64)])
    assert {e.owner: e.device_tokens for e in ledger.entries()} == {"a": 0, "b": 64}
    ledger.reset_device()
    assert ledger.totals()[Tier.DEVICE] == 0
    assert ledger.apply_device(1, [Figures("b", 16, 16)])
    assert ledger.totals()[Tier.DEVICE] == 16


def test_an_engine_restart_leaves_the_lower_tiers():
    """When the device is lost, what host or storage has is still reachable, and no more than that; pins are over."""
    ledger = Ledger()
    report(ledger, 100, 60, 0)
    ledger.pin("a", 5.0)
    ledger.reset_device()
    entry = ledger.entry("a")
    assert (entry.device_tokens, entry.host_tokens, entry.reachable_tokens, entry.pinned_until_s) == (0, 60, 60, None)
    assert ledger.state("a") is Residency.LOST


def receipt(verb: KvVerb, tokens: int, target: str | None, source: dict[str, int]) -> Receipt:
    return Receipt("kv_1", verb, "a", 1, source=source, target=target, tokens=tokens)


def test_receipts_move_tokens():
    """Down to the host, further to storage, and up again: the estimate follows each receipt."""
    ledger = Ledger()
    report(ledger, 100, 0, 0)
    states = []
    for done in (receipt(KvVerb.SPILL, 80, "host", {"device": 80}), receipt(KvVerb.DEMOTE, 100, "storage", {"host": 100}),
                 receipt(KvVerb.RESTORE, 80, "device", {"storage": 80}), receipt(KvVerb.SPILL, 80, "storage", {"device": 80}),
                 receipt(KvVerb.DROP, 100, None, {"storage": 100})):
        generation = ledger.begin_verb("a", done.verb)
        assert ledger.apply_receipt(done, generation)
        ledger.end_verb("a")
        entry = ledger.entry("a")
        states.append((entry.state, entry.device_tokens, entry.host_tokens, entry.storage_tokens))
    assert states == [(Residency.WARM, 20, 100, 0), (Residency.COLD, 20, 0, 100), (Residency.HOT, 100, 0, 100),
                      (Residency.COLD, 20, 0, 100), (Residency.LOST, 0, 0, 0)]


@pytest.mark.parametrize("outcome", [Outcome.NOTHING, Outcome.REFUSED, Outcome.FAILED])
def test_what_moved_nothing_changes_nothing(outcome):
    """Receipts of nothing, refusals and failures leave the figures alone, whatever numbers they carry."""
    ledger = Ledger()
    report(ledger, 100, 0, 0)
    before = replace(ledger.entry("a"))
    assert ledger.apply_receipt(replace(receipt(KvVerb.DROP, 100, None, {"device": 100}), outcome=outcome), before.generation)
    assert ledger.entry("a") == before


def test_late_receipts_are_counted_and_dropped():
    """A receipt for a forgotten owner, its successor, a dropped KV or a lost engine changes nothing."""
    ledger = Ledger()
    report(ledger, 100, 0, 0)
    spill = receipt(KvVerb.SPILL, 100, "host", {"device": 100})
    for end in (lambda: ledger.forget("a"), ledger.reset_device,
                lambda: ledger.apply_receipt(receipt(KvVerb.DROP, 100, None, {"device": 100}), ledger.entry("a").generation)):
        generation = ledger.entry("a").generation
        end()
        assert not ledger.apply_receipt(spill, generation)
        report(ledger, 100, 0, 0)
        assert not ledger.apply_receipt(spill, generation)
        assert ledger.state("a") is Residency.HOT
    assert ledger.late_results == 6


def test_one_thing_at_a_time():
    """A verb during a turn or another verb, and a turn during a verb, raise and change nothing; branches may run together."""
    ledger = Ledger()
    ledger.begin_turn("a")
    ledger.begin_turn("a")
    with pytest.raises(IllegalStep):
        ledger.begin_verb("a", KvVerb.SPILL)
    ledger.end_turn("a")
    assert ledger.entry("a").busy
    ledger.end_turn("a")
    ledger.begin_verb("a", KvVerb.SPILL)
    for step in (lambda: ledger.begin_verb("a", KvVerb.DROP), lambda: ledger.begin_turn("a")):
        with pytest.raises(IllegalStep):
            step()
    assert (ledger.entry("a").busy, ledger.entry("a").verb) == (False, KvVerb.SPILL)


def test_counts_by_state():
    """Every owner is counted in exactly one state."""
    ledger = Ledger()
    report(ledger, 100, 0, 0)
    ledger.touch("b", 1.0)
    assert ledger.by_state() == {s: int(s in (Residency.HOT, Residency.EMPTY)) for s in Residency}
