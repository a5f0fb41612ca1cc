"""The parts of one running server, put together. Starts nothing; `app.py` does."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from fastapi.responses import Response

from kvstore.fingerprint import Fingerprint
from kvstore.planner import PlanPolicy
from sessions.model import Session, Turn
from sessions.sqlite import SqliteStore
from sessions.store import SessionStore

from . import codec, modelinfo, prompt, views, wire
from .admission import ENGINE_SPARE_TOKENS
from .auth import Auth
from .background import Background
from .conversations import Conversations, limits_of
from .engines.channel import Ledger, Pressure, Progress, Ready
from .engines.config import EngineConfig
from .failures import http_status
from .images import ImageStore
from .modelinfo import ModelInfo
from .preparing import Preparer
from .settings import Settings
from .streams import Streams
from .supervisor import DaemonCommand, MakeEngine, Supervisor
from .telemetry import Metrics
from .tiers import Tiers
from .turns import Turns
from .waiting import WaitingRoom

if TYPE_CHECKING:
    from .socket import Socket

log = structlog.get_logger(__name__)

DEMO = "demo"
_BUNDLED = Path(__file__).parent / "demo" / "files"


def model_folder(settings: Settings) -> str:
    """Where the model is: for `demo` what was built into the data folder. The scripted engine needs no weights."""
    if settings.model.path != DEMO:
        return settings.model.path
    built = settings.data / "models" / DEMO
    return str(_BUNDLED if settings.engine.kind == "scripted" and not built.exists() else built)


def engine_config(settings: Settings, info: ModelInfo) -> EngineConfig:
    data = settings.data.resolve()
    dtype = settings.model.dtype if settings.model.dtype != "auto" else info.dtype or "bfloat16"
    fingerprint = Fingerprint(
        model=info.name, weights_digest=info.weights_digest, kv_dtype=dtype, tokenizer_digest=info.tokenizer_digest,
        tensor_parallel=int(settings.engine.extra_args.get("tp_size", 1)), page_tokens=settings.engine.page_tokens,
        engine=settings.engine.kind, engine_version="" if settings.engine.kind == "scripted" else metadata.version("sglang"))
    return EngineConfig(
        kind=settings.engine.kind, model_path=str(info.folder), fingerprint=fingerprint.hex(), dtype=dtype,
        image_folder=str(data / "images"), vision_folder=str(data / "vision"), device=settings.engine.device,
        context_tokens=context_tokens(settings, info) + ENGINE_SPARE_TOKENS, device_tokens=settings.engine.device_tokens,
        page_tokens=settings.engine.page_tokens, max_running_turns=settings.engine.max_running_turns,
        chunk_tokens=settings.offload.chunk_tokens, offload_timeout_s=settings.offload.timeout_s,
        extra_args=settings.engine.extra_args)


def context_tokens(settings: Settings, info: ModelInfo) -> int:
    """The longest sequence that a turn may make, prompt and answer: the engine is given a longer context than is announced."""
    return min(settings.engine.context_tokens, info.context_tokens - ENGINE_SPARE_TOKENS)


@dataclass(slots=True)
class Services:
    """On `app.state.services`."""

    settings: Settings
    info: ModelInfo
    store: SessionStore
    auth: Auth
    images: ImageStore
    streams: Streams
    supervisor: Supervisor
    tiers: Tiers
    turns: Turns
    conversations: Conversations
    metrics: Metrics
    background: Background
    waiting: WaitingRoom
    sockets: "set[Socket]" = field(default_factory=set)
    started_at: float = field(default_factory=time.time)
    pressure: Pressure | None = None
    stopping: bool = False
    told: Callable[[dict[str, str]], None] = lambda state: None
    """Gets engine and daemon states too."""

    @property
    def context_tokens(self) -> int:
        return context_tokens(self.settings, self.info)

    def refusal(self, error: wire.ErrorObject, status: int | None = None) -> Response:
        """An HTTP answer in the one error shape."""
        headers = {"Cache-Control": "no-store"}
        if error.retry_after_ms is not None:
            headers["Retry-After"] = str(-(-error.retry_after_ms // 1000))
        status = status or http_status(error)
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(codec.encode({"error": error}), status, headers, media_type="application/json")

    def refused(self, told: wire.ErrorObject, cause: Exception) -> None:
        """Count it; log what is our own fault with its trace."""
        self.metrics.refused(told)
        if told.type == "server":
            log.error("request_failed", code=told.code, exc_info=cause)

    def engine_state(self) -> dict[str, Any]:
        state = self.supervisor.state()
        return {"state": state["engine"], "model": self.info.name, "daemon": state["daemon"], "detail": state["detail"]}

    def ready_event(self) -> dict[str, Any]:
        """connection.ready: limits in force for a session that asks for none, and how the engine is."""
        own = codec.plain(views.limits(limits_of(self.settings.limits)))
        limits = {"frame_bytes": self.settings.server.frame_bytes, **own, "image_bytes": self.settings.images.max_bytes,
                  "image_pixels": self.settings.images.max_pixels, "context_tokens": self.context_tokens}
        return wire.event("connection.ready", limits=limits, heartbeat_s=self.settings.server.heartbeat_s, engine=self.engine_state())

    # ---- what the supervisor tells
    def heard(self, message: Ledger | Pressure | Progress) -> None:
        match message:
            case Ledger():
                self.tiers.manager.on_ledger(message.epoch, message.entries)
            case Pressure():
                self.pressure = message
                self.tiers.manager.on_pressure(message)

    def state_changed(self, state: dict[str, str]) -> None:
        for socket in tuple(self.sockets):
            socket.announce(wire.event("engine.state", **state))
        self.told(state)

    def engine_ready(self, ready: Ready) -> None:
        log.info("engine_ready", engine=ready.engine, model=ready.model, device_tokens=ready.device_tokens)
        self.background.spawn(self.tiers.refresh_all())

    def engine_down(self, reason: str) -> None:
        log.warning("engine_down", reason=reason)
        self.pressure = None
        self.tiers.manager.on_engine_restart()


def build(settings: Settings, *, make_engine: MakeEngine | None = None, daemon_command: DaemonCommand | None = None,
          info: ModelInfo | None = None) -> Services:
    """`info`: the model's facts, where they were read already. Raises ModelError."""
    data = settings.data
    data.mkdir(parents=True, exist_ok=True, mode=0o700)
    info = info or modelinfo.read(model_folder(settings), settings.model.revision)
    info = replace(info, name=settings.model.path)                # what people and the fingerprint call it, wherever it lies
    store = SqliteStore(data / "sessions.db")
    metrics, background = Metrics(), Background()
    streams = Streams(store, replay_events=settings.server.replay_events)
    images = ImageStore(data / "images", info.rules, workers=settings.images.workers, max_bytes=settings.images.max_bytes,
                        max_pixels=settings.images.max_pixels, decoding_bytes=settings.images.decoding_bytes,
                        max_waiting=settings.images.max_waiting)
    auth = Auth(store, settings)
    services: Services
    supervisor = Supervisor(
        settings, engine_config(settings, info), make_engine=make_engine, daemon_command=daemon_command,
        listen=lambda state: services.state_changed(state), heard=lambda message: services.heard(message),
        ready=lambda ready: services.engine_ready(ready), down=lambda reason: services.engine_down(reason))
    policy = PlanPolicy(settings.idle.to_host_s, settings.idle.to_storage_s, settings.pressure.high, settings.pressure.low,
                        settings.engine.page_tokens)

    @lru_cache(maxsize=1024)
    def opening_tokens(instructions: str) -> int:
        return len(prompt.opening(info, instructions))

    tiers = Tiers(store, streams, supervisor, policy, background=background, salt_of=auth.salt, moved=metrics.moved,
                  common_tokens=lambda session: opening_tokens(session.instructions))
    defaults = limits_of(settings.limits)
    preparer = Preparer(store, images, info, tiers, supervisor, defaults=defaults, context_tokens=context_tokens(settings, info),
                        default_output_tokens=settings.limits.default_output_tokens)

    def ended(session: Session, turn: Turn) -> None:
        background.spawn(services.conversations.turn_ended(session, turn))

    turns = Turns(store, streams, tiers, supervisor, preparer, grace_s=settings.server.grace_s,
                  heartbeat_s=settings.server.heartbeat_s, metrics=metrics, ended=ended)
    conversations = Conversations(store, streams, tiers, turns, info, defaults=defaults, context_tokens=context_tokens(settings, info))
    services = Services(settings, info, store, auth, images, streams, supervisor, tiers, turns, conversations, metrics, background,
                        WaitingRoom(settings.server.waiting_sockets, settings.server.waiting_sockets_per_address))
    return services
