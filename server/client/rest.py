"""The REST side with the standard library alone; blocking, so the async client calls it in a thread."""

import http.client
import json
import re
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from .errors import ConnectionLost, ServerFailed, from_object


def http_url(url: str) -> str:
    """`ws://`, `wss://` or a bare host become `http(s)://`, without a path."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, "", "", ""))


class Rest:
    def __init__(self, url: str, key: str | None, timeout_s: float = 120.0) -> None:
        """Raises ValueError for a key that cannot be one; the text does not repeat it."""
        if key and not re.fullmatch(r"[!-~]+", key):
            raise ValueError("the key holds blanks or characters that no key has")
        self.url, self._key, self._timeout_s = http_url(url), key, timeout_s

    def call(self, method: str, path: str, body: Any = None, *, data: bytes | None = None,
             media_type: str = "application/json") -> Any:
        """The decoded JSON answer (None for an empty one). Raises ApiError or ConnectionLost."""
        if body is not None:
            data = json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data=data, method=method)
        except ValueError as error:
            raise ConnectionLost(f"{self.url} is no address of a server") from error
        if data is not None:
            request.add_header("Content-Type", media_type)
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                raw = answer.read()
        except urllib.error.HTTPError as error:
            raise _refusal(error.code, error.read()) from None
        except (OSError, http.client.HTTPException) as error:    # refused, reset, cut in the middle of the answer, no answer in time
            raise ConnectionLost(f"{self.url}: {str(error).strip() or type(error).__name__}") from error
        try:
            return json.loads(raw) if raw else None
        except ValueError as error:
            raise ConnectionLost(f"{self.url} does not answer like a Rekindle server") from error

    def upload(self, image: bytes, media_type: str = "application/octet-stream") -> dict[str, Any]:
        """POST /v1/files: the file object."""
        return self.call("POST", "/v1/files", data=image, media_type=media_type)


def _refusal(status: int, raw: bytes) -> Exception:
    try:
        return from_object(json.loads(raw)["error"])
    except (ValueError, KeyError, TypeError):
        return ServerFailed({"type": "server", "code": f"http_{status}", "message": raw[:200].decode(errors="replace")})
