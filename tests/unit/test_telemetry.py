"""The catalogue of metrics and what each event adds to it."""

from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.geometry import Geometry
from kvstore.ledger import Residency
from kvstore.receipt import KvVerb, Outcome, Receipt
from server.engines.channel import Pressure
from server.settings import Settings
from server.telemetry import Metrics, served_from
from server.wire import ErrorObject
from sessions.model import Turn, TurnStatus, TurnUsage

CATALOGUE = {
    "rekindle_kv_pages", "rekindle_kv_bytes", "rekindle_sessions", "rekindle_spills", "rekindle_restores", "rekindle_restored_tokens",
    "rekindle_ttft_seconds", "rekindle_prompt_tokens", "rekindle_cached_tokens", "rekindle_turns", "rekindle_refusals", "rekindle_queue_turns",
    "rekindle_connections", "rekindle_engine_up", "rekindle_daemon_up", "rekindle_engine_restarts_total",
}


def samples(metrics):
    return {(s.name, *sorted(s.labels.values())): s.value for family in text_string_to_metric_families(metrics.render().decode())
            for s in family.samples}


def turn(status=TurnStatus.COMPLETED, **usage):
    return Turn("r", "s", None, 0, status, (), "", (), (), TurnUsage(**usage), 0, 1)


def run(receipt=None):
    return SimpleNamespace(finished=SimpleNamespace(receipt=receipt))


def receipt(verb, outcome=Outcome.DONE, **kwargs):
    return Receipt("i", verb, "s", 1, outcome=outcome, **kwargs)


def test_every_metric_of_the_catalogue_is_there_from_the_start():
    """Dashboards find every name before anything happened, and two servers in one process do not share figures."""
    one, two = Metrics(), Metrics()
    names = {family.name for family in text_string_to_metric_families(one.render().decode())}
    assert CATALOGUE <= names
    one.slow_reader()
    assert samples(one)["rekindle_slow_readers_total",] == 1 and samples(two)["rekindle_slow_readers_total",] == 0


@pytest.mark.parametrize(("usage", "tier"), [
    ({}, "none"), ({"cached_device_tokens": 5}, "device"), ({"cached_device_tokens": 5, "cached_host_tokens": 1}, "host"),
    ({"cached_storage_tokens": 1, "cached_host_tokens": 9}, "storage")])
def test_a_turn_counts_under_the_lowest_tier_that_served_it(usage, tier):
    """TTFT is told apart by where the prompt came from."""
    assert served_from(TurnUsage(**usage)) == tier
    metrics = Metrics()
    metrics.turn_ended(run(), turn(ttft_ms=250, **usage))
    assert samples(metrics)["rekindle_ttft_seconds_count", tier] == 1
    assert samples(metrics)["rekindle_ttft_seconds_sum", tier] == 0.25


def test_a_committed_turn_adds_its_tokens_once():
    """Prompt, output and cached tokens by tier; the restore it needed; nothing else."""
    metrics = Metrics()
    came_back = receipt(KvVerb.RESTORE, source={"host": 32, "storage": 16}, tokens=48)
    metrics.turn_ended(run(came_back), turn(input_tokens=100, output_tokens=7, cached_device_tokens=16, cached_host_tokens=32,
                                            cached_storage_tokens=16, ttft_ms=1))
    metrics.turn_ended(run(), turn(TurnStatus.CANCELLED, input_tokens=10))
    seen = samples(metrics)
    assert seen["rekindle_prompt_tokens_total",] == 110 and seen["rekindle_output_tokens_total",] == 7
    assert [seen["rekindle_cached_tokens_total", t] for t in ("device", "host", "storage")] == [16, 32, 16]
    assert [seen["rekindle_restored_tokens_total", t] for t in ("host", "storage")] == [32, 16]
    assert seen["rekindle_restores_total", "done"] == 1
    assert seen["rekindle_turns_total", "completed"] == 1 and seen["rekindle_turns_total", "cancelled"] == 1
    assert sum(v for k, v in seen.items() if k[0] == "rekindle_ttft_seconds_count") == 1


def test_verbs_count_by_kind_target_and_outcome():
    """Spills and demotes by target, restores and prefetches with their tokens by source; pins and drops nowhere."""
    metrics = Metrics()
    metrics.moved(receipt(KvVerb.SPILL, target="host", tokens=64))
    metrics.moved(receipt(KvVerb.SPILL, Outcome.FAILED, target="storage"))
    metrics.moved(receipt(KvVerb.DEMOTE, target="storage"))
    metrics.moved(receipt(KvVerb.PREFETCH, source={"storage": 48, "device": 16}))
    metrics.moved(receipt(KvVerb.RESTORE, Outcome.NOTHING))
    metrics.moved(receipt(KvVerb.DROP))
    metrics.moved(receipt(KvVerb.PIN))
    seen = samples(metrics)
    assert seen["rekindle_spills_total", "done", "host"] == 1 and seen["rekindle_spills_total", "failed", "storage"] == 1
    assert seen["rekindle_spills_total", "done", "storage"] == 1
    assert seen["rekindle_restores_total", "done"] == 1 and seen["rekindle_restores_total", "nothing"] == 1
    assert seen["rekindle_restored_tokens_total", "storage"] == 48 and seen["rekindle_restored_tokens_total", "host"] == 0
    assert sum(v for k, v in seen.items() if k[0] in ("rekindle_spills_total", "rekindle_restores_total")) == 5


def test_refusals_count_by_code_and_failures_as_turns():
    """A refusal is no turn; a turn that failed is no refusal."""
    metrics = Metrics()
    metrics.refused(ErrorObject("limit_exceeded", "max_turns_reached", ""))
    metrics.turn_failed(ErrorObject("engine", "engine_died", ""))
    seen = samples(metrics)
    assert seen["rekindle_refusals_total", "max_turns_reached"] == 1 and seen["rekindle_turns_total", "failed"] == 1


def services(state=("ready", "ready"), pressure=True, turns=0, sockets=0):
    return SimpleNamespace(
        supervisor=SimpleNamespace(state=lambda: {"engine": state[0], "daemon": state[1]}, restarts={"engine": 2},
                                   geometry=Geometry(16, 100, 1600)),
        pressure=Pressure(free_pages=60, used_pages=30, in_flight_pages=10, total_pages=100, daemon_healthy=True, host_bytes=16_000,
                          storage_bytes=32_000) if pressure else None,
        tiers=SimpleNamespace(ledger=SimpleNamespace(by_state=lambda: {Residency.HOT: 2, Residency.COLD: 1})),
        turns=SimpleNamespace(count=turns), sockets=set(range(sockets)), settings=Settings())


def test_gauges_are_set_at_the_scrape_and_again_at_the_next():
    """Pages and bytes by tier, sessions by state, queue, connections, health; a lost engine has nothing on record."""
    metrics = Metrics()
    metrics.observe(services(turns=6, sockets=3))
    seen = samples(metrics)
    assert [seen["rekindle_kv_pages", t] for t in ("device", "host", "storage")] == [40, 10, 20]
    assert [seen["rekindle_kv_bytes", t] for t in ("device", "host", "storage")] == [64_000, 16_000, 32_000]
    assert seen["rekindle_sessions", "hot"] == 2 and seen["rekindle_sessions", "cold"] == 1
    assert (seen["rekindle_queue_turns",], seen["rekindle_running_turns",], seen["rekindle_connections",]) == (2, 6, 3)
    assert (seen["rekindle_engine_up",], seen["rekindle_daemon_up",], seen["rekindle_engine_restarts_total", "engine"]) == (1, 1, 2)
    metrics.observe(services(("restarting", "disabled"), pressure=False))
    seen = samples(metrics)
    assert (seen["rekindle_engine_up",], seen["rekindle_daemon_up",], seen["rekindle_queue_turns",]) == (0, 0, 0)
    assert [seen["rekindle_kv_pages", t] for t in ("device", "host", "storage")] == [0, 0, 0]
