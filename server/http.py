"""The REST side: sessions, pages, files, tickets. One error shape: {"error": ErrorObject}. See `ops.py` for health and figures."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from kvstore.geometry import Tier
from kvstore.receipt import KvVerb
from sessions.model import Session as SessionRecord

from . import codec, wire
from .auth import Forbidden, Principal
from .failures import error_object
from .images import ImageRefused
from .runtime import Services
from .streams import Event
from .turns import Answered

log = structlog.get_logger(__name__)

_MULTIPART_SPARE_BYTES = 64 << 10
_POLL_S = 1.0
MAX_PIN_S = 7 * 24 * 3600.0


class Route(APIRoute):
    """Whatever a handler raises becomes the one error shape; every request is logged, without its query."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            began_s = time.perf_counter()
            answered = await answer_to(request)
            log.info("request", method=request.method, path=request.url.path, status=answered.status_code,
                     ms=round((time.perf_counter() - began_s) * 1e3, 1))
            return answered

        async def answer_to(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:                   # noqa: BLE001 - whatever it is becomes the answer
                told = error_object(error)
                services: Services = request.app.state.services
                services.refused(told, error)
                return services.refusal(told)

        return handle


def services_of(request: Request) -> Services:
    return request.app.state.services


async def who(request: Request) -> Principal:
    """The login of the Authorization header. Raises AuthError."""
    principal = await services_of(request).auth.bearer(request.headers.get("authorization"))
    if not principal.may_chat:
        raise Forbidden("this key reads metrics only")
    return principal


def admin(principal: Annotated[Principal, Depends(who)]) -> Principal:
    if not principal.is_admin:
        raise Forbidden("this needs the admin role")
    return principal


S = Annotated[Services, Depends(services_of)]
Who = Annotated[Principal, Depends(who)]
Admin = Annotated[Principal, Depends(admin)]
router = APIRouter(prefix="/v1", route_class=Route)


def answer(value: Any, status: int = 200) -> Response:
    return Response(codec.encode(value), status, media_type="application/json", headers={"Cache-Control": "no-store"})


async def body(request: Request, kind: type, limit_bytes: int | None = None) -> Any:
    """The JSON body as that type; an empty one as its defaults. Raises BadFrame."""
    raw = await _read(request, limit_bytes or services_of(request).settings.server.frame_bytes, "frame_bytes")
    return codec.decode(raw or b"{}", kind)


async def _read(request: Request, limit_bytes: int, name: str) -> bytes:
    """Never holds more than the limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise ImageRefused(f"{name}_exceeded", f"a body may have {limit_bytes} bytes", limit_bytes, size)
        parts.append(part)
    return b"".join(parts)


# ---- sessions --------------------------------------------------------------------------------------------------
@router.post("/sessions")
async def create(request: Request, services: S, principal: Who) -> Response:
    return answer(await services.conversations.create(principal, await body(request, wire.SessionRequest)), 201)


@router.get("/sessions")
async def list_sessions(services: S, principal: Who, limit: Annotated[int, Query(ge=1, le=500)] = 100,
                        before: float | None = None) -> Response:
    return answer({"object": "list", "data": await services.conversations.page(principal, limit=limit, before=before)})


@router.get("/sessions/{session_id}")
async def show(session_id: str, services: S, principal: Who) -> Response:
    session = await services.conversations.find(principal, session_id, anyone=True)
    return answer(await services.conversations.show(session))


@router.patch("/sessions/{session_id}")
async def rename(session_id: str, request: Request, services: S, principal: Who) -> Response:
    title = (await body(request, codec.Rename)).title
    return answer(await services.conversations.rename(principal, session_id, title))


@router.delete("/sessions/{session_id}")
async def delete(session_id: str, services: S, principal: Who) -> Response:
    await services.conversations.delete(principal, session_id)
    return Response(status_code=204)


@router.get("/sessions/{session_id}/items")
async def items(session_id: str, services: S, principal: Who) -> Response:
    return answer({"object": "list", "data": await services.conversations.items(principal, session_id)})


@router.patch("/sessions/{session_id}/limits")
async def set_limits(session_id: str, request: Request, services: S, principal: Admin) -> Response:
    session = await services.conversations.find(principal, session_id, anyone=True)
    return answer(await services.conversations.set_limits(session, await body(request, dict[str, int | None])))


# ---- turns -----------------------------------------------------------------------------------------------------
class _Waiting:
    """The REST call that waits for an answer: its presence keeps the turn from being given up."""

    def deliver(self, event: Event) -> None:
        """It reads the outcome, not the stream."""

    def replay(self, events: list[Event]) -> None:
        """The same."""


@router.post("/sessions/{session_id}/responses")
async def respond(session_id: str, request: Request, services: S, principal: Who) -> Response:
    """response.create that waits. The response object, with `output_text`; `input` may be a plain string."""
    frame = await body(request, codec.RestResponse)
    content = (wire.InputMessage((wire.InputText(frame.input),)),) if isinstance(frame.input, str) else frame.input
    create = wire.ResponseCreate(
        session_id, content, max_output_tokens=frame.max_output_tokens, temperature=frame.temperature, top_p=frame.top_p,
        seed=frame.seed, previous_response_id=frame.previous_response_id,
        idempotency_key=frame.idempotency_key or request.headers.get("idempotency-key"))
    waiting = _Waiting()
    await services.conversations.attach(principal, session_id, waiting)
    try:
        claimed = await services.turns.claim(principal, create)
        run = claimed.run if isinstance(claimed, Answered) else claimed
        response = claimed.response if run is None else None
        if run is not None:
            await asyncio.shield(run.accepted)
            while not run.done.done() and not await request.is_disconnected():
                await asyncio.wait({run.done}, timeout=_POLL_S)
            if not run.done.done():
                return Response(status_code=499)         # nobody reads it
            response = run.response
            if response is not None and response.status == "failed" and run.error is not None:
                raise run.error
    finally:
        services.streams.detach(session_id, waiting)
    assert response is not None                          # an end without a response was raised above
    text = "".join(part.text for message in response.output for part in message.content)
    return answer(codec.plain(response) | {"output_text": text, "session_id": session_id})


@router.post("/sessions/{session_id}/cancel")
async def cancel(session_id: str, services: S, principal: Who) -> Response:
    session = await services.conversations.find(principal, session_id)
    services.turns.cancel(session.id)
    return Response(status_code=202)


# ---- pages -----------------------------------------------------------------------------------------------------
@router.get("/sessions/{session_id}/kv")
async def kv(session_id: str, services: S, principal: Who) -> Response:
    session = await services.conversations.find(principal, session_id, anyone=True)
    return answer(await services.conversations.kv(session))


async def _move(services: Services, principal: Principal, session_id: str, verb: KvVerb, **args: Any) -> Response:
    session: SessionRecord = await services.conversations.find(principal, session_id, anyone=True)
    return answer((await services.conversations.move(session, verb, **args)).to_wire())


@router.post("/sessions/{session_id}/spill")
async def spill(session_id: str, request: Request, services: S, principal: Who) -> Response:
    return await _move(services, principal, session_id, KvVerb.SPILL, to=Tier((await body(request, codec.SpillBody)).to))


@router.post("/sessions/{session_id}/pin")
async def pin(session_id: str, request: Request, services: S, principal: Who) -> Response:
    """For so many seconds; 0 unpins."""
    seconds = (await body(request, codec.PinBody)).seconds
    return await _move(services, principal, session_id, KvVerb.PIN, seconds=min(seconds, MAX_PIN_S))


@router.post("/sessions/{session_id}/{verb}")
async def move(session_id: str, verb: Literal["restore", "prefetch", "demote", "drop"], services: S, principal: Who) -> Response:
    return await _move(services, principal, session_id, KvVerb(verb))


# ---- files -----------------------------------------------------------------------------------------------------
@router.post("/files")
async def upload(request: Request, services: S, principal: Who) -> Response:
    """An image, as a raw body or as the `file` part of a form. The file object; uploading it again gives the same id."""
    most = services.settings.images.max_bytes
    kind = request.headers.get("content-type", "")
    if kind.startswith("multipart/form-data"):
        data = await _form_file(request, await _read(request, most + _MULTIPART_SPARE_BYTES, "image_bytes"))
    else:
        data = await _read(request, most, "image_bytes")
    return answer((await services.images.add(principal.tenant_id, data)).to_file(), 201)


async def _form_file(request: Request, raw: bytes) -> bytes:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield raw
    try:
        form = await MultiPartParser(request.headers, parts()).parse()
    except MultiPartException as error:
        raise codec.BadFrame("form_invalid", error.message) from error
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise codec.BadFrame("form_invalid", "the form has no part named file", "file")
    return await file.read()


@router.get("/files/{file_id}")
@router.get("/files/{file_id}/content")
async def download(file_id: str, request: Request, services: S, principal: Who) -> Response:
    """The image as the model sees it. It never changes: its id is its content."""
    record = await services.images.get(principal.tenant_id, file_id)
    headers = {"ETag": f'"{record.digest}"', "Cache-Control": "private, max-age=31536000, immutable",
               "X-Content-Type-Options": "nosniff", "Vary": "Authorization"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return FileResponse(services.images.path(record.digest), media_type="image/png", headers=headers)


# ---- login -----------------------------------------------------------------------------------------------------
@router.post("/tickets")
async def ticket(services: S, principal: Who) -> Response:
    """A one-time ticket for a browser's socket."""
    return answer(services.auth.issue_ticket(principal), 201)
