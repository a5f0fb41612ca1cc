"""Every error of the client.

RekindleError
├── ConnectionLost         the server could not be reached again in time, or closed for good
├── ResponseLost           the turn that was being watched is not in the history (the server restarted in its middle)
└── ApiError               the server refused; carries the error object of the protocol
    ├── InvalidRequest  ├── AuthenticationFailed  ├── NotFound  ├── Conflict
    ├── LimitExceeded      (.param, .limit, .requested)
    ├── Overloaded         (.retry_after_ms)
    ├── EngineFailed       └── ServerFailed
"""

from typing import Any


class RekindleError(Exception):
    retryable = False


class ConnectionLost(RekindleError):
    retryable = True


class ResponseLost(RekindleError):
    retryable = True


class ApiError(RekindleError):
    """`error` is the error object as it came. Unknown fields are kept there."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error.get('code')}: {error.get('message')}")
        self.error = error
        self.code: str = error.get("code", "unknown")
        self.message: str = error.get("message", "")
        self.param: str | None = error.get("param")
        self.limit: int | None = error.get("limit")
        self.requested: int | None = error.get("requested")
        self.retryable: bool = bool(error.get("retryable"))
        self.retry_after_ms: int | None = error.get("retry_after_ms")
        self.offers: list[dict[str, Any]] = list(error.get("offers") or ())


class InvalidRequest(ApiError): ...


class AuthenticationFailed(ApiError): ...


class NotFound(ApiError): ...


class Conflict(ApiError): ...


class LimitExceeded(ApiError): ...


class Overloaded(ApiError): ...


class EngineFailed(ApiError): ...


class ServerFailed(ApiError): ...


_BY_TYPE: dict[str, type[ApiError]] = {
    "invalid_request": InvalidRequest, "authentication": AuthenticationFailed, "not_found": NotFound, "conflict": Conflict,
    "limit_exceeded": LimitExceeded, "overloaded": Overloaded, "engine": EngineFailed, "server": ServerFailed,
}


def from_object(error: dict[str, Any]) -> ApiError:
    """The exception for an error object of the protocol."""
    return _BY_TYPE.get(error.get("type", ""), ApiError)(error)
