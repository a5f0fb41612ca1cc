"""Structured logs without contents: every event passes `redact`, whoever wrote it.

`session_id` and `turn_id` are bound once per task with `bind` and stand in all its events.
"""

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from .settings import LogSettings

OURS = ("server", "sessions", "kvstore", "__main__")
"""Loggers that follow the level set; what other libraries log below WARNING could hold whole frames."""
_NOTES = ("_record", "_from_structlog")
"""structlog's own, taken off before rendering."""
MAX_CHARS = 4000
MAX_ITEMS = 20
REDACTED = "[redacted]"

SECRET_KEYS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie", "token", "ticket", "key", "api_key", "apikey",
                         "secret", "password", "credential", "credentials", "headers", "query", "query_string"})
SECRET_ENDINGS = ("_token", "_key", "_secret", "_password", "_ticket", "-token", "-key")
CONTENT_KEYS = frozenset({"text", "content", "contents", "input", "output", "output_text", "instructions", "image_url", "url", "delta", "prompt",
                          "message", "messages", "title", "data", "body", "frame", "payload", "parts", "token_ids", "input_ids",
                          "output_ids", "ids", "image", "images", "pixels"})

_RUN = r"[A-Za-z0-9+/_-]"
_BREAK = r"(?:\r?\n|\\r\\n|\\n)"
_PATTERNS = (
    (re.compile(rf"data:[^,\s]{{0,200}},(?:%[0-9a-fA-F]{{2}}|{_RUN}|=|{_BREAK}(?={_RUN}{{4}}))*", re.IGNORECASE), "[data url]"),
    (re.compile(r"\b(bearer|basic)\s+[^\s\"',;]+", re.IGNORECASE), r"\1 " + REDACTED),
    (re.compile(r"\br[kt]_[A-Za-z0-9_.=-]+"), REDACTED),
    (re.compile(r"(?<![A-Za-z0-9])([A-Za-z_-]*(?:token|ticket|key|secret|password|authorization|cookie))([\"']?\s*[=:]\s*[\"']?)"
                r"[^\s&#\"',;}]+", re.IGNORECASE), r"\1\2" + REDACTED),
    (re.compile(r"(input_value=).*?(, input_type=)", re.DOTALL), r"\1" + REDACTED + r"\2"),
)
_LONG_RUN = re.compile(rf"{_RUN}{{32,}}(?:{_BREAK}{_RUN}+)*={{0,2}}")
_PLAIN_RUN = re.compile(r"[a-z0-9_/-]+|[A-Z0-9_]+")
"""Not base64: hex digests and ids, snake_case, constants, lower-case paths."""


def configure_logging(settings: LogSettings) -> None:
    """Everything, the standard library's loggers included, goes to stderr in one form."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars, structlog.stdlib.add_log_level, structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True), structlog.processors.format_exc_info, redact]
    structlog.configure(processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
                        logger_factory=structlog.stdlib.LoggerFactory(), wrapper_class=structlog.stdlib.BoundLogger)
    last: structlog.typing.Processor = structlog.processors.JSONRenderer(ensure_ascii=False)
    if settings.format == "console" or (settings.format == "auto" and sys.stderr.isatty()):
        last = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[
        structlog.stdlib.ProcessorFormatter.remove_processors_meta, last]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(settings.level.upper())


def bind(**ids: str) -> None:
    """session_id, turn_id: in every further event of this task."""
    structlog.contextvars.bind_contextvars(**ids)


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """structlog processor: no contents, no credentials, nothing that looks like base64."""
    for key in list(event):
        if key not in _NOTES:
            event[key] = _clean_key(key, event[key]) if key != "event" else clean(event[key])
    return event


def clean(value: Any) -> Any:
    """A value as it may be logged."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _clean_text(str(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return f"[{len(value)} bytes]"
    if isinstance(value, Mapping):
        return {_clean_text(str(key)): _clean_key(str(key), inner) for key, inner in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{len(value)} items]" if len(value) > MAX_ITEMS else [clean(inner) for inner in value]
    if isinstance(value, BaseException):
        return _clean_text(f"{type(value).__name__}: {value}")
    return f"<{type(value).__name__}>"                      # its repr could hold anything


def _clean_key(key: str, value: Any) -> Any:
    name = key.lower()
    if value is None or isinstance(value, bool | int | float):
        return value
    if name in SECRET_KEYS or name.endswith(SECRET_ENDINGS):
        return REDACTED
    if name in CONTENT_KEYS:
        return f"[{len(value)} {'chars' if isinstance(value, str) else 'items'}]" if hasattr(value, "__len__") else REDACTED
    return clean(value)


def _clean_text(text: str) -> str:
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    text = _LONG_RUN.sub(lambda found: found[0] if _PLAIN_RUN.fullmatch(found[0]) else f"[{len(found[0])} chars]", text)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... [{len(text)} chars]"
