"""The client of a Rekindle server (installed as `rekindle_client`). Needs `websockets` and the standard library.

    async with connect("http://127.0.0.1:8080", key) as rk:
        chat = await rk.session()
        async for text in chat.say("What is this?", images=["a.png"]):
            print(text, end="")
"""

from .connection import Client, connect
from .errors import (
    ApiError,
    AuthenticationFailed,
    Conflict,
    ConnectionLost,
    EngineFailed,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Overloaded,
    RekindleError,
    ResponseLost,
    ServerFailed,
)
from .session import Session
from .sync import Chat, Rekindle

__all__ = [
    "ApiError", "AuthenticationFailed", "Chat", "Client", "Conflict", "ConnectionLost", "EngineFailed", "InvalidRequest",
    "LimitExceeded", "NotFound", "Overloaded", "Rekindle", "RekindleError", "ResponseLost", "ServerFailed", "Session", "connect",
]
