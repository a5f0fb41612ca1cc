"""Who is asking: API keys, one-time tickets for browsers, page tokens, and the Origin check before an upgrade.

Only hashes of keys are stored. Tenant, role and salt come from the login, never from what a client says. A key is 32 random
bytes, so a plain sha256 of it is enough: there is nothing to guess.
"""

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from sessions.store import SessionStore

from .settings import Settings

DEFAULT_TENANT = "default"
TICKET_S = 60.0
TOKEN_S = 30 * 24 * 3600.0
MAX_TICKETS = 10_000
"""Outstanding at once; the oldest go first."""
_KEY, _TOKEN = re.compile(r"rk_[A-Za-z0-9_-]{43}"), re.compile(r"rt_([A-Za-z0-9_-]{1,400})\.([0-9a-f]{64})")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class AuthError(Exception):
    """Not signed in. One text for every reason, so that nothing is learned from it."""

    code = "unauthenticated"


class Forbidden(AuthError):
    """Signed in, but this needs another role."""

    code = "forbidden"


class OriginRefused(AuthError):
    """A page of another site."""

    code = "origin_refused"


class Role(StrEnum):
    USER = "user"
    ADMIN = "admin"
    METRICS = "metrics"
    """May read /metrics, nothing else."""


@dataclass(frozen=True, slots=True)
class Principal:
    tenant_id: str
    role: Role
    salt: str
    """Keeps KV of tenants apart."""

    @property
    def is_admin(self) -> bool:
        return self.role is Role.ADMIN

    @property
    def may_read_metrics(self) -> bool:
        return self.role in (Role.ADMIN, Role.METRICS)

    @property
    def may_chat(self) -> bool:
        return self.role in (Role.ADMIN, Role.USER)


def salt_of(tenant_id: str) -> str:
    """Stable, so that KV outlives restarts."""
    return hashlib.sha256(b"rekindle salt\0" + tenant_id.encode()).hexdigest()[:32]


def principal(tenant_id: str, role: str) -> Principal:
    return Principal(tenant_id, Role(role), salt_of(tenant_id))


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Tickets:
    """One-time logins, kept in memory by hash. A ticket is good once, until its time."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Principal, float]] = {}

    def issue(self, who: Principal, now_s: float, ttl_s: float = TICKET_S) -> str:
        self._open = {key: value for key, value in self._open.items() if value[1] > now_s}
        while len(self._open) >= MAX_TICKETS:
            del self._open[next(iter(self._open))]
        ticket = secrets.token_urlsafe(32)
        self._open[key_hash(ticket)] = (who, now_s + ttl_s)
        return ticket

    def redeem(self, ticket: str, now_s: float) -> Principal:
        """Raises AuthError. Looked up by hash, so that the time taken tells nothing of the tickets kept."""
        found = self._open.pop(key_hash(ticket), None)
        if found is None or found[1] <= now_s:
            raise AuthError("the ticket is not valid")
        return found[0]


class PageTokens:
    """Bearer tokens of the page: signed, not stored, so they outlive a restart. They end with their time or the secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 32:
            raise ValueError(f"the secret has {len(secret)} bytes; it needs 32")
        self._secret = secret

    def issue(self, who: Principal, now_s: float, ttl_s: float = TOKEN_S) -> str:
        body = base64.urlsafe_b64encode(json.dumps([who.tenant_id, str(who.role), int(now_s + ttl_s)]).encode()).decode().rstrip("=")
        return f"rt_{body}.{self._sign(body)}"

    def check(self, token: str, now_s: float) -> Principal:
        """Raises AuthError."""
        match = _TOKEN.fullmatch(token)
        if match is None or not hmac.compare_digest(self._sign(match[1]), match[2]):
            raise AuthError("the token is not valid")
        tenant_id, role, until_s = json.loads(base64.urlsafe_b64decode(match[1] + "=" * (-len(match[1]) % 4)))
        if until_s <= now_s:
            raise AuthError("the token is not valid")
        return principal(tenant_id, role)

    def _sign(self, body: str) -> str:
        return hmac.new(self._secret, b"page token\0" + body.encode(), hashlib.sha256).hexdigest()


def origin_allowed(origin: str | None, host: str | None, scheme: str, allowed: tuple[str, ...]) -> bool:
    """Scheme, host and port compared whole with the server's own origin and the list. No Origin: not a browser, allowed.

    `host` is the Host header, `scheme` what the client used to reach the server. "null" and whatever cannot be read: refused.
    """
    if origin is None:
        return True
    asked = _origin(origin)
    if asked is None:
        return False
    own = _origin(f"{scheme}://{host}") if host else None
    return asked == own or asked in {_origin(one) for one in allowed}


def _origin(text: str) -> tuple[str, str, int] | None:
    """(scheme, host, port), or None for what is not exactly an origin."""
    try:
        parts = urlsplit(text)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None
    # urlsplit forgives blanks, user names, paths; an origin has none of them
    if not parts.hostname or port is None or not re.fullmatch(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d+)?", text.lower()):
        return None
    return parts.scheme, parts.hostname, port


@dataclass(frozen=True, slots=True)
class Ticket:
    ticket: str
    expires_in_s: float


class Auth:
    """The doors of one server. `open` before use."""

    def __init__(self, store: SessionStore, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._allowed, self._secret_file = settings.server.allowed_origins, settings.data / "secret"
        self._tickets = Tickets()
        self._tokens: PageTokens | None = None
        self.first_key: str | None = None
        """The admin key that this start made, because there was none; to be told once."""
        self.local_admin = principal(DEFAULT_TENANT, Role.ADMIN)
        """Whoever started the server."""

    async def open(self) -> None:
        """Read or make the secret of the page tokens; on the first start make an admin key."""
        self._tokens = PageTokens(_secret(self._secret_file))
        if not await self._store.has_keys():
            self.first_key = await self.create_key(DEFAULT_TENANT, Role.ADMIN, "first start")

    # ---- keys
    async def create_key(self, tenant_id: str, role: Role, label: str) -> str:
        """A new key, told this once."""
        key = "rk_" + secrets.token_urlsafe(32)
        await self._store.put_key(key_hash(key), tenant_id=tenant_id, role=str(role), label=label)
        return key

    async def bearer(self, header: str | None) -> Principal:
        """Who an Authorization header stands for: an API key or a page token. Raises AuthError."""
        scheme, _, credential = (header or "").partition(" ")
        credential = credential.strip()
        if scheme.lower() != "bearer":
            raise AuthError("sign in with Authorization: Bearer and an API key")
        if credential.startswith("rt_"):
            return self._page_tokens.check(credential, self._clock())
        # The index look-up is on the sha256 of the key, whose bytes nobody can steer: its timing tells nothing of stored keys.
        found = await self._store.find_key(key_hash(credential)) if _KEY.fullmatch(credential) else None
        if found is None:
            raise AuthError("the API key is not valid")
        return principal(found[0], found[1])

    # ---- the page
    def issue_ticket(self, who: Principal, *, lifetime_s: float = TICKET_S) -> Ticket:
        """A one-time login for a browser's socket, or (longer lived) for the address that the server prints at its start."""
        return Ticket(self._tickets.issue(who, self._clock(), lifetime_s), lifetime_s)

    async def redeem(self, ticket: str) -> Principal:
        """Raises AuthError; the ticket is used up either way."""
        return self._tickets.redeem(ticket, self._clock())

    def token_for(self, who: Principal) -> str:
        """A bearer for the page's REST calls and later tickets."""
        return self._page_tokens.issue(who, self._clock())

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """Raises OriginRefused. Behind a proxy that speaks TLS, its origin must be in server.allowed_origins."""
        if not origin_allowed(origin, host, "http", self._allowed):
            raise OriginRefused("this origin may not connect; add it to server.allowed_origins")

    def salt(self, tenant_id: str) -> str:
        return salt_of(tenant_id)

    @property
    def _page_tokens(self) -> PageTokens:
        if self._tokens is None:
            raise RuntimeError("Auth.open comes first")
        return self._tokens


def _secret(path: Path) -> bytes:
    """The server's secret, made at the first start. Whoever can read the file can sign in."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        secret = secrets.token_bytes(32)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return secret
