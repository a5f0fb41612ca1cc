"""What the server says about itself: the catalogue of metrics. (Log fields: `logs.py`.)

All names begin with rekindle_. Labels have few, fixed values; no session, tenant or user is ever a label.
"""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvstore.geometry import Tier
from kvstore.receipt import KvVerb, Outcome, Receipt
from sessions.model import Turn, TurnUsage

from .logs import configure_logging
from .wire import ErrorObject

if TYPE_CHECKING:
    from .run import Run
    from .runtime import Services

__all__ = ["Metrics", "configure_logging", "served_from"]

TTFT_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)
COMPONENTS = ("engine", "daemon")


def served_from(usage: TurnUsage) -> str:
    """The lowest tier that a turn's prompt came from: none (all computed), device, host or storage."""
    for tier, tokens in ((Tier.STORAGE, usage.cached_storage_tokens), (Tier.HOST, usage.cached_host_tokens),
                         (Tier.DEVICE, usage.cached_device_tokens)):
        if tokens:
            return str(tier)
    return "none"


class Metrics:
    """One server's figures, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"rekindle_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rekindle_{name}", text, labels, registry=registry)

        self.kv_pages = gauge("kv_pages", "KV pages in use, shared ones once", "tier")
        self.kv_bytes = gauge("kv_bytes", "Bytes of KV in use, shared pages once", "tier")
        self.kv_capacity_pages = gauge("kv_capacity_pages", "Pages of the device pool")
        self.sessions = gauge("sessions", "Sessions with KV on record, by where their pages are", "state")
        self.spills = counter("spills", "Spills, by target tier and outcome", "to", "outcome")
        self.restores = counter("restores", "Restores and prefetches, by outcome", "outcome")
        self.restored_tokens = counter("restored_tokens", "Tokens whose KV came back, by the tier it came from", "tier")
        self.ttft = Histogram("rekindle_ttft_seconds", "Time to the first text, by the lowest tier that the prompt came from", ["tier"],
                              registry=registry, buckets=TTFT_BUCKETS_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of committed turns, whole prompts")
        self.cached_tokens = counter("cached_tokens", "Of rekindle_prompt_tokens_total: not computed, by the tier that had them", "tier")
        self.output_tokens = counter("output_tokens", "Generated tokens of committed turns")
        self.turns = counter("turns", "Turns that ran, by how they ended", "status")
        self.refusals = counter("refusals", "Requests refused, by error code", "reason")
        self.slow_readers = counter("slow_readers", "Sockets detached because they did not read")
        self.queue_turns = gauge("queue_turns", "Turns beyond those that the engine runs at once")
        self.running_turns = gauge("running_turns", "Turns in progress, queued ones among them")
        self.connections = gauge("connections", "Open WebSockets")
        self.engine_up = gauge("engine_up", "1 while the engine accepts turns")
        self.daemon_up = gauge("daemon_up", "1 while the offload daemon answers")
        self.restarts = gauge("engine_restarts_total", "Deaths since the start, by component", "component")
        for tier in Tier:
            self.kv_pages.labels(tier), self.kv_bytes.labels(tier), self.cached_tokens.labels(tier), self.ttft.labels(tier)
        self.ttft.labels("none")
        for tier in (Tier.HOST, Tier.STORAGE):
            self.restored_tokens.labels(tier)
            for outcome in Outcome:
                self.spills.labels(tier, outcome)
        for outcome in Outcome:
            self.restores.labels(outcome)
        for status in ("completed", "incomplete", "cancelled", "failed"):
            self.turns.labels(status)
        for component in COMPONENTS:
            self.restarts.labels(component)

    # ---- events
    def turn_ended(self, run: "Run", turn: Turn) -> None:
        """A committed turn."""
        usage = turn.usage
        self.turns.labels(turn.status).inc()
        self.prompt_tokens.inc(usage.input_tokens)
        self.output_tokens.inc(usage.output_tokens)
        for tier, tokens in ((Tier.DEVICE, usage.cached_device_tokens), (Tier.HOST, usage.cached_host_tokens),
                             (Tier.STORAGE, usage.cached_storage_tokens)):
            self.cached_tokens.labels(tier).inc(tokens)
        if usage.ttft_ms > 0:
            self.ttft.labels(served_from(usage)).observe(usage.ttft_ms / 1e3)
        if run.finished is not None and run.finished.receipt is not None:
            self._restored(run.finished.receipt)

    def turn_failed(self, error: ErrorObject) -> None:
        """A turn that was announced and ended without an answer."""
        self.turns.labels("failed").inc()

    def refused(self, error: ErrorObject) -> None:
        self.refusals.labels(error.code).inc()

    def slow_reader(self) -> None:
        self.slow_readers.inc()

    def moved(self, receipt: Receipt) -> None:
        """A KV verb that ran, apart from turns."""
        if receipt.verb is KvVerb.SPILL:
            self.spills.labels(receipt.target or "host", receipt.outcome).inc()
        elif receipt.verb is KvVerb.DEMOTE:
            self.spills.labels(Tier.STORAGE, receipt.outcome).inc()
        elif receipt.verb in (KvVerb.RESTORE, KvVerb.PREFETCH):
            self._restored(receipt)

    def _restored(self, receipt: Receipt) -> None:
        self.restores.labels(receipt.outcome).inc()
        for tier in (Tier.HOST, Tier.STORAGE):
            self.restored_tokens.labels(tier).inc(receipt.source.get(tier, 0))

    # ---- at a scrape
    def observe(self, services: "Services") -> None:
        """Set every gauge to what holds now."""
        state = services.supervisor.state()
        self.engine_up.set(state["engine"] == "ready")
        self.daemon_up.set(state["daemon"] == "ready")
        for component, deaths in services.supervisor.restarts.items():
            self.restarts.labels(component).set(deaths)
        for name, count in services.tiers.ledger.by_state().items():
            self.sessions.labels(name).set(count)
        self.running_turns.set(services.turns.count)
        self.queue_turns.set(max(0, services.turns.count - services.settings.engine.max_running_turns))
        self.connections.set(len(services.sockets))
        self._observe_tiers(services)

    def _observe_tiers(self, services: "Services") -> None:
        geometry, pressure = services.supervisor.geometry, services.pressure
        used = dict.fromkeys(Tier, 0)
        page_bytes = geometry.page_tokens * geometry.token_bytes if geometry else 1
        if geometry and pressure:
            used = {Tier.DEVICE: (pressure.used_pages + pressure.in_flight_pages) * page_bytes, Tier.HOST: pressure.host_bytes,
                    Tier.STORAGE: pressure.storage_bytes}
            self.kv_capacity_pages.set(pressure.total_pages)
        for tier, size in used.items():
            self.kv_bytes.labels(tier).set(size)
            self.kv_pages.labels(tier).set(size // page_bytes)

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)
