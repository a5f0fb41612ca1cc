"""Every error that a client can meet, in one table: exception -> type, WebSocket close code, retryable; type -> HTTP status.

An exception that is not in the table is a fault of the server: the client gets "internal_error" and no details.
"""

from dataclasses import dataclass

from starlette.requests import ClientDisconnect

from sessions import errors as sessions

from . import admission, auth, codec, gate, images, pixels, preparing, prompt, run
from .engines import base as engines
from .wire import Close, ErrorObject


@dataclass(frozen=True, slots=True)
class Failure:
    type: str
    """ErrorObject.type."""
    close: int | None = None
    """The connection ends with this code; None: it goes on."""
    retryable: bool = False
    """The same request may succeed later, unchanged."""
    code: str | None = None
    """ErrorObject.code where the exception carries none."""


FAILURES: dict[type[Exception], Failure] = {
    codec.BadUtf8: Failure("invalid_request", close=Close.BAD_UTF8),
    codec.BadFrame: Failure("invalid_request"),
    pixels.ImageRefused: Failure("invalid_request"),
    prompt.PromptRefused: Failure("invalid_request"),
    preparing.EmptyInput: Failure("invalid_request"),
    sessions.InvalidLimit: Failure("invalid_request"),
    auth.OriginRefused: Failure("authentication", close=Close.POLICY),
    auth.Forbidden: Failure("authentication"),
    auth.AuthError: Failure("authentication", close=Close.UNAUTHENTICATED),
    sessions.SessionNotFound: Failure("not_found"),
    sessions.TurnNotFound: Failure("not_found"),
    images.ImageNotFound: Failure("not_found"),
    ClientDisconnect: Failure("invalid_request", code="client_gone"),
    sessions.TurnInFlight: Failure("conflict", retryable=True),
    sessions.Conflict: Failure("conflict", retryable=True),
    sessions.Duplicate: Failure("conflict"),
    sessions.IllegalEvent: Failure("conflict"),
    run.SessionClosed: Failure("conflict"),
    run.NotRunning: Failure("conflict"),
    run.TurnCancelled: Failure("conflict"),
    sessions.LimitExceeded: Failure("limit_exceeded"),
    admission.TurnRefused: Failure("limit_exceeded"),
    gate.ImagesBusy: Failure("overloaded", retryable=True),
    engines.EngineUnavailable: Failure("engine", retryable=True, code="engine_unavailable"),
    engines.EngineError: Failure("engine", code="engine_failed"),
    run.EngineFailure: Failure("engine"),
    sessions.StoreUnavailable: Failure("server", retryable=True),
}
"""A subclass counts as its nearest listed ancestor."""

STATUS = {"invalid_request": 400, "authentication": 401, "not_found": 404, "conflict": 409, "limit_exceeded": 422,
          "overloaded": 503, "engine": 503, "server": 500}
STATUS_OF_CODE = {"client_gone": 499, "forbidden": 403, "origin_refused": 403, "image_too_many_bytes": 413, "image_too_many_pixels": 413,
                  "frame_bytes_exceeded": 413, "image_bytes_exceeded": 413, "image_type_unsupported": 415, "store_unavailable": 503}
"""Where one error of a type has a better status of its own."""

RETRY_AFTER_MS = 1000
_INTERNAL = ErrorObject("server", "internal_error", "the server failed; its log says more")


def limit_code(name: str) -> str:
    """max_turns -> max_turns_reached; every other limit -> <name>_exceeded."""
    return "max_turns_reached" if name == "max_turns" else f"{name}_exceeded"


def error_object(error: BaseException) -> ErrorObject:
    """What the client is told."""
    failure = _find(error)
    if failure is None:
        return _INTERNAL
    code = getattr(error, "code", None) or failure.code or failure.type
    retryable = bool(getattr(error, "retryable", False)) or failure.retryable
    param, limit, requested = getattr(error, "param", None), getattr(error, "limit", None), getattr(error, "requested", None)
    if isinstance(error, sessions.LimitExceeded):
        code, param = limit_code(error.name), error.name
    elif isinstance(error, admission.TurnRefused):
        code, param = limit_code(error.refuse.name), error.refuse.name
        limit, requested = error.refuse.limit, error.refuse.requested
    elif isinstance(error, sessions.InvalidLimit):
        param, limit, requested = error.name, error.least, error.value
    return ErrorObject(failure.type, code, str(error) or code.replace("_", " "), param=param, limit=limit, requested=requested,
                       retryable=retryable, retry_after_ms=RETRY_AFTER_MS if retryable else None)


def http_status(told: ErrorObject) -> int:
    return STATUS_OF_CODE.get(told.code, STATUS[told.type])


def status(error: BaseException) -> int:
    return http_status(error_object(error))


def close_code(error: BaseException) -> int | None:
    """How the connection on which this happened ends; None: it goes on."""
    failure = _find(error)
    return failure.close if failure else None


def _find(error: BaseException) -> Failure | None:
    return next((FAILURES[kind] for kind in type(error).__mro__ if kind in FAILURES), None)
