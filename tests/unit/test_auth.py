"""Keys, tickets, page tokens and origins."""

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import auth as module
from server.auth import (
    Auth,
    AuthError,
    OriginRefused,
    PageTokens,
    Role,
    Tickets,
    key_hash,
    origin_allowed,
    principal,
    salt_of,
)
from server.settings import Settings
from sessions.memory import MemoryStore


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def door(tmp_path, clock):
    out = Auth(MemoryStore(), Settings(data=tmp_path), clock=clock)
    await out.open()
    return out


async def test_the_first_start_makes_one_admin_key_and_only_the_first(tmp_path):
    """The key is told once, works, and is stored as a hash only; a second start makes none."""
    store = MemoryStore()
    first, second = Auth(store, Settings(data=tmp_path)), Auth(store, Settings(data=tmp_path))
    await first.open()
    await second.open()
    assert first.first_key.startswith("rk_") and len(first.first_key) == 46 and second.first_key is None
    who = await second.bearer(f"Bearer {first.first_key}")
    assert who.is_admin and who.tenant_id == "default"
    assert await store.find_key(key_hash(first.first_key)) and await store.find_key(first.first_key) is None


@pytest.mark.parametrize(("role", "admin", "reads", "chats"), [
    (Role.ADMIN, True, True, True), (Role.USER, False, False, True), (Role.METRICS, False, True, False)])
async def test_a_role_may_what_it_may(door, role, admin, reads, chats):
    """Roles come from the stored key."""
    who = await door.bearer("Bearer " + await door.create_key("acme", role, "test"))
    assert (who.tenant_id, who.role, who.is_admin, who.may_read_metrics, who.may_chat) == ("acme", role, admin, reads, chats)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer rk_" + "A" * 43, "Bearer rk_short", "Basic cms6eA==",
                                    "Bearer rt_x.y", "Bearer rt_" + "A" * 9999, "Bearer \udcff", "rk_" + "A" * 43])
async def test_what_is_no_login_is_refused(door, header):
    """Every wrong header is an AuthError whose text repeats nothing of it."""
    with pytest.raises(AuthError) as refused:
        await door.bearer(header)
    assert "AAAA" not in str(refused.value)


async def test_the_scheme_is_read_in_any_case(door):
    """`bearer` and spare blanks are fine."""
    key = await door.create_key("t", Role.USER, "")
    assert (await door.bearer(f"bearer  {key} ")).tenant_id == "t"


async def test_a_ticket_is_good_once_and_for_a_minute(door, clock):
    """The second use, a late use and an unknown ticket are refused; another ticket still works."""
    who = principal("acme", Role.USER)
    issued = door.issue_ticket(who)
    assert issued.expires_in_s == 60
    assert await door.redeem(issued.ticket) == who
    late, launch = door.issue_ticket(who), door.issue_ticket(door.local_admin, lifetime_s=600)
    clock.now += 60
    for ticket in (issued.ticket, late.ticket, "", "x"):
        with pytest.raises(AuthError):
            await door.redeem(ticket)
    assert (await door.redeem(launch.ticket)).is_admin
    with pytest.raises(AuthError):
        await door.redeem(launch.ticket)


def test_open_tickets_are_bounded(monkeypatch):
    """Asking for tickets without end forgets the oldest, not the newest, and expired ones at once."""
    monkeypatch.setattr(module, "MAX_TICKETS", 3)
    tickets, who = Tickets(), principal("t", "user")
    issued = [tickets.issue(who, 0) for _ in range(5)]
    assert len(tickets._open) == 3
    assert tickets.redeem(issued[4], 1) == who
    with pytest.raises(AuthError):
        tickets.redeem(issued[0], 1)
    tickets.issue(who, 100)
    assert len(tickets._open) == 1


async def test_a_page_token_outlives_a_restart_but_not_its_time_or_secret(tmp_path, clock):
    """It is a bearer with the tenant and role it was made for; a changed one, a late one, or another server's is refused."""
    store, settings = MemoryStore(), Settings(data=tmp_path / "a")
    first = Auth(store, settings, clock=clock)
    await first.open()
    token = first.token_for(principal("acme", Role.USER))
    again, other = Auth(store, settings, clock=clock), Auth(store, Settings(data=tmp_path / "b"), clock=clock)
    await again.open()
    await other.open()
    assert await again.bearer(f"Bearer {token}") == principal("acme", Role.USER)
    admin = PageTokens(b"0" * 32).issue(principal("acme", Role.ADMIN), clock.now)
    forged = admin.split(".")[0] + "." + token.split(".")[1]
    for door, bad in ((other, token), (again, token[:-1] + ("0" if token[-1] != "0" else "1")), (again, forged), (again, token + "0")):
        with pytest.raises(AuthError):
            await door.bearer(f"Bearer {bad}")
    clock.now += 31 * 24 * 3600
    with pytest.raises(AuthError):
        await again.bearer(f"Bearer {token}")
    assert stat.S_IMODE((settings.data / "secret").stat().st_mode) == 0o600


def test_a_short_secret_is_refused():
    """An empty or cut secret file never signs."""
    with pytest.raises(ValueError, match="32"):
        PageTokens(b"")


def test_salts_keep_tenants_apart_and_stay():
    """Stable over starts, different by tenant, and not the tenant's name."""
    assert salt_of("default") == "7c67c63a7f2c38e113438c02edc339e3"
    assert len({salt_of(t) for t in ("a", "b", "A", "a ")}) == 4


OWN = "localhost:8080"


@pytest.mark.parametrize(("origin", "allowed"), [
    (None, True), ("http://localhost:8080", True), ("HTTP://LOCALHOST:8080", True), ("https://chat.example.org", True),
    ("https://chat.example.org:443", True), ("http://[::1]:9000", True),
    ("null", False), ("", False), ("http://localhost", False), ("http://localhost:80801", False), ("https://localhost:8080", False),
    ("http://localhost:8080.evil.org", False), ("http://evil.org/localhost:8080", False), ("http://localhost:8080@evil.org", False),
    ("http://evil-localhost:8080", False), ("http://localhost:8080/", False), ("http://localhost:8080?x", False),
    ("http://localhost:8080 ", False), ("https://chat.example.org.evil.org", False), ("https://evilchat.example.org", False),
    ("http://chat.example.org", False), ("https://chat.example.org:8443", False), ("file://", False), ("localhost:8080", False),
    ("http://127.0.0.1:8080", False), ("http://localhost:99999", False), ("http://[::1", False), ("http://[::1]:9001", False),
    ("chrome-extension://abc", False),
])
def test_origins_are_compared_whole(origin, allowed):
    """Scheme, host and port must all be the server's own or one of the list; no Origin header is no browser and passes."""
    assert origin_allowed(origin, OWN, "http", ("https://chat.example.org", "http://[::1]:9000")) is allowed


@given(st.text())
def test_no_origin_raises_anything(origin):
    """Whatever is sent is allowed or not, never an error; random text is not."""
    assert origin_allowed(origin, OWN, "http", ()) is (origin.lower() == "http://localhost:8080")
    assert origin_allowed("http://localhost:8080", origin, "http", ()) in (True, False)


async def test_the_origin_check_of_a_server(tmp_path):
    """The own origin follows the Host header; a refusal names the setting that would allow it."""
    settings = Settings(data=tmp_path, server={"allowed_origins": ["https://ok.example"]})
    door = Auth(MemoryStore(), settings)
    door.check_origin("http://127.0.0.1:9", "127.0.0.1:9")
    door.check_origin("https://ok.example", "127.0.0.1:9")
    door.check_origin(None, None)
    for origin, host in (("http://evil.example", "127.0.0.1:9"), ("http://127.0.0.1:9", None), ("null", "127.0.0.1:9")):
        with pytest.raises(OriginRefused, match="allowed_origins"):
            door.check_origin(origin, host)
