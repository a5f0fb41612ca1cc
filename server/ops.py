"""Health, figures and the model: what an operator or a load balancer asks."""

import ipaddress
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from kvstore.geometry import Tier

from .auth import Forbidden
from .http import Route, S, Who, answer
from .runtime import Services
from .settings import Settings

router = APIRouter(route_class=Route)


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return answer({"status": "ok"})


@router.get("/readyz")
async def readyz(services: S) -> Response:
    """Turns are accepted; 503 with the reason otherwise."""
    state = services.supervisor.state()
    ready = state["engine"] == "ready" and not services.stopping
    return answer({"status": "ready" if ready else "not_ready", **state}, 200 if ready else 503)


@router.get("/metrics")
async def metrics(request: Request, services: S) -> Response:
    """Prometheus text. Open on loopback; from elsewhere an admin's or a metrics key is needed."""
    if not _is_loopback(request):
        principal = await services.auth.bearer(request.headers.get("authorization"))
        if not principal.may_read_metrics:
            raise Forbidden("this needs the admin or the metrics role")
    services.metrics.observe(services)
    return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _is_loopback(request: Request) -> bool:
    """By the peer's address; a proxy in front would make everybody local, so what it forwards for somebody else is not."""
    if request.client is None or "x-forwarded-for" in request.headers or "forwarded" in request.headers:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


@router.get("/v1/status")
async def status(services: S, principal: Who) -> Response:
    state, supervisor = services.engine_state(), services.supervisor
    return answer({
        "engine": {"state": state["state"], "model": state["model"], "detail": state["detail"],
                   "kind": services.settings.engine.kind, "restarts": supervisor.restarts.get("engine", 0)},
        "daemon": {"state": state["daemon"], "restarts": supervisor.restarts.get("daemon", 0)},
        "geometry": _geometry(services), "pressure": _pressure(services), "tiers": tiers(services),
        "sessions": {str(name): count for name, count in services.tiers.ledger.by_state().items()},
        "running_turns": services.turns.count, "sockets": len(services.sockets),
        "uptime_s": round(time.time() - services.started_at, 1),
    })


def _geometry(services: Services) -> dict[str, int] | None:
    g = services.supervisor.geometry
    return None if g is None else {"page_tokens": g.page_tokens, "token_bytes": g.token_bytes, "device_tokens": g.device_tokens}


def _pressure(services: Services) -> dict[str, Any] | None:
    p = services.pressure
    return None if p is None else {"free_pages": p.free_pages, "used_pages": p.used_pages, "in_flight_pages": p.in_flight_pages,
                                   "total_pages": p.total_pages, "daemon_healthy": p.daemon_healthy}


def tiers(services: Services) -> dict[str, dict[str, int]]:
    """Bytes in use and capacity by tier, for the whole machine (shared pages once)."""
    g, p = services.supervisor.geometry, services.pressure
    if g is None or p is None:
        return {}
    page_bytes = g.page_tokens * g.token_bytes
    out = {str(Tier.DEVICE): {"used_bytes": (p.used_pages + p.in_flight_pages) * page_bytes,
                              "capacity_bytes": p.total_pages * page_bytes}}
    host, storage = capacities(services.settings)
    out[str(Tier.HOST)] = {"used_bytes": p.host_bytes, "capacity_bytes": host}
    out[str(Tier.STORAGE)] = {"used_bytes": p.storage_bytes, "capacity_bytes": storage}
    return out


def capacities(settings: Settings) -> tuple[int, int]:
    """(host, storage) bytes that LMCache may use."""
    if not settings.offload.enabled:
        return 0, 0
    return int(settings.offload.host_gb * (1 << 30)), int(settings.offload.storage_gb * (1 << 30))


@router.get("/v1/models")
async def models(services: S, principal: Who) -> Response:
    info = services.info
    return answer({"object": "list", "data": [{
        "id": info.name, "object": "model", "created": int(services.started_at), "owned_by": "local",
        "context_tokens": services.context_tokens, "images": info.rules is not None}]})
