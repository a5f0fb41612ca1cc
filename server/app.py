"""The web application: routes, static files, and what starts and stops with it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog
from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from . import http, ops, socket, wire
from .engines.base import Engine
from .modelinfo import ModelInfo
from .runtime import Services, build
from .settings import Settings
from .supervisor import DaemonCommand, MakeEngine

log = structlog.get_logger(__name__)

WEB = Path(__file__).parent / "web"
TURNS_END_WITHIN_S = 5.0
SOCKETS_CLOSE_WITHIN_S = 2.0
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; connect-src 'self' ws: wss:; object-src 'none'; "
                               "base-uri 'none'; frame-ancestors 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
}


def create_app(settings: Settings, *, engine: Engine | None = None, make_engine: MakeEngine | None = None,
               daemon_command: DaemonCommand | None = None, started: Callable[[Services], None] = lambda services: None,
               told: Callable[[dict[str, str]], None] = lambda state: None, info: ModelInfo | None = None) -> FastAPI:
    """`engine`: use this one, whatever the settings say; `make_engine`: make it so, again after each death. `started` is
    called when requests are about to be served; the engine may still be starting then, and `told` of its states.
    Raises ModelError."""
    if engine is not None:
        make_engine = lambda config, on_exit: engine
    services = build(settings, make_engine=make_engine, daemon_command=daemon_command, info=info)
    services.told = told

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await _start(services)
        try:
            started(services)
            yield
        finally:
            await _stop(services)

    app = FastAPI(title="Rekindle", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.services = services
    app.include_router(http.router)
    app.include_router(ops.router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)

    @app.websocket("/v1/chat")
    async def chat(websocket: WebSocket) -> None:
        await socket.chat(websocket, services)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(WEB / "index.html", headers=_PAGE_HEADERS)

    app.mount("/static", StaticFiles(directory=WEB), name="static")
    return app


async def _start(services: Services) -> None:
    await services.store.open()
    await services.auth.open()
    await services.supervisor.start()
    services.background.spawn(services.tiers.manager.run_forever(services.settings.idle.check_s))


async def _stop(services: Services) -> None:
    """Bounded: turns end or are rolled back, sockets close, children are gone, then the store."""
    services.stopping = True
    await services.turns.close(TURNS_END_WITHIN_S)
    for open_socket in tuple(services.sockets):
        open_socket.shutdown()
    with suppress(TimeoutError):
        async with asyncio.timeout(SOCKETS_CLOSE_WITHIN_S):
            while services.sockets:
                await asyncio.sleep(0.01)
    await services.background.close()
    await services.supervisor.close()
    await services.store.close()
    services.images.close()


def _refusal(request: Request, status: int, code: str, message: str) -> Response:
    kind = "not_found" if status == 404 else "invalid_request" if status < 500 else "server"
    services: Services = request.app.state.services
    return services.refusal(wire.ErrorObject(kind, code, message), status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(request, error.status_code, {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error"),
                    str(error.detail))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _refusal(request, 400, "parameter_invalid", f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")
