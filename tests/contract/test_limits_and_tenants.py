"""What is refused, and that a refusal changes nothing: limits, and other people's sessions."""

import asyncio
import base64
from collections import Counter

import httpx
import pytest

from server.client import Client, LimitExceeded
from tests.support.app import Running, message, png, running


@pytest.fixture
async def app(tmp_path):
    async with running(tmp_path / "data", limits={"max_turns": 50, "images_per_message": 2}) as app:
        yield app


async def limited(app: Running, rk: Client, **limits: int):
    """A session with limits set by an admin."""
    chat = await rk.session()
    await rk.rest("PATCH", f"/v1/sessions/{chat.id}/limits", limits)
    return chat


@pytest.mark.parametrize(("name", "limits", "text", "options", "code"), [
    ("max_turns", {"max_turns": 1}, "hello", {}, "max_turns_reached"),
    ("tokens_per_session", {"tokens_per_session": 60}, "hello", {"max_output_tokens": 50}, "tokens_per_session_exceeded"),
    ("tokens_per_turn", {"tokens_per_turn": 60}, "hello", {"max_output_tokens": 60}, "tokens_per_turn_exceeded"),
    ("images_per_message", {"images_per_message": 0}, "hello", {"images": [png()]}, "images_per_message_exceeded"),
    ("device_bytes", {"device_bytes": 16 * 1024 * 8}, "hello", {"max_output_tokens": 200}, "device_bytes_exceeded"),
    ("host_bytes", {"host_bytes": 16 * 1024 * 8}, "hello", {"max_output_tokens": 200}, "host_bytes_exceeded"),
    ("storage_bytes", {"storage_bytes": 16 * 1024 * 8}, "hello", {"max_output_tokens": 200}, "storage_bytes_exceeded"),
    ("context_tokens", {}, "hello", {"max_output_tokens": 100_000}, "context_tokens_exceeded"),
])
async def test_a_limit_refuses_by_name_and_changes_nothing(app: Running, name: str, limits: dict, text: str, options: dict,
                                                           code: str) -> None:
    """One turn, then one that passes the limit: refused with name, value and what was asked, before the engine is asked;
    nothing is counted; after the limit is lifted the next good turn works and counts once."""
    async with app.client() as rk:
        chat = await limited(app, rk, **{k: v for k, v in limits.items() if k == "max_turns"})
        await chat.ask("first", max_output_tokens=8)
        await rk.rest("PATCH", f"/v1/sessions/{chat.id}/limits", limits)
        before = (await app.services.store.totals(chat.id), (await app.services.store.get(chat.id)).head_turn_id,
                  app.engine._generated, chat.cursor.seq)
        with pytest.raises(LimitExceeded) as refused:
            await chat.ask(text, **options)
        error = refused.value
        assert (error.code, error.param) == (code, name) and error.requested > error.limit
        if name in limits:
            assert error.limit == limits[name]
        assert before[:3] == (await app.services.store.totals(chat.id), (await app.services.store.get(chat.id)).head_turn_id,
                              app.engine._generated)
        assert app.services.turns.count == 0
        await rk.rest("PATCH", f"/v1/sessions/{chat.id}/limits", dict.fromkeys(limits))
        assert await chat.ask("good") == "good"
        assert (await app.services.store.totals(chat.id)).turns == 2


async def test_a_session_may_ask_for_less_but_not_for_more(app: Running) -> None:
    """Above the server's ceiling: refused with its value; an admin may set it all the same; unknown names are refused."""
    async with app.client() as rk:
        with pytest.raises(LimitExceeded) as refused:
            await rk.session(max_turns=51)
        assert (refused.value.param, refused.value.limit, refused.value.requested) == ("max_turns", 50, 51)
        chat = await rk.session(max_turns=10, budgets={"tokens": 1000})
        assert chat.object["limits"]["max_turns"] == 10 and chat.object["limits"]["tokens_per_session"] == 1000
        raised = await rk.rest("PATCH", f"/v1/sessions/{chat.id}/limits", {"max_turns": 500})
        assert raised["limits"]["max_turns"] == 500 and raised["limits"]["tokens_per_session"] == 1000
        for wrong in ({"max_turns": 0}, {"no_such_limit": 3}):
            with pytest.raises(Exception, match="invalid_limit|limit_unknown"):
                await rk.rest("PATCH", f"/v1/sessions/{chat.id}/limits", wrong)
        async with app.client(await app.new_key("default")) as user:
            with pytest.raises(Exception, match="forbidden"):
                await user.rest("PATCH", f"/v1/sessions/{chat.id}/limits", {"max_turns": 3})


async def test_of_a_hundred_submits_at_the_last_allowed_turn_exactly_one_runs(app: Running) -> None:
    """The others are refused (busy, or the limit), and exactly one turn is counted."""
    async with app.client() as rk, app.http() as http:
        chat = await limited(app, rk, max_turns=2)
        await chat.ask("first")
        answers = await asyncio.gather(*(
            http.post(f"/v1/sessions/{chat.id}/responses", json={"input": f"number {n}"}) for n in range(100)))
        codes = Counter(a.status_code if a.status_code == 200 else a.json()["error"]["code"] for a in answers)
        assert codes.pop(200) == 1 and set(codes) <= {"response_already_in_flight", "max_turns_reached"}
        assert (await app.services.store.totals(chat.id)).turns == 2 and app.services.turns.count == 0


# ---- other people's sessions ---------------------------------------------------------------------------------------
UNKNOWN = "s_" + "0" * 32
ROUTES = [
    ("GET", "", None), ("PATCH", "", {"title": "mine now"}), ("DELETE", "", None), ("GET", "/items", None), ("GET", "/kv", None),
    ("POST", "/responses", {"input": "hello"}), ("POST", "/cancel", None), ("POST", "/spill", {"to": "host"}),
    ("POST", "/restore", None), ("POST", "/prefetch", None), ("POST", "/demote", None), ("POST", "/drop", None),
    ("POST", "/pin", {"seconds": 5}),
]
FRAMES = [
    ("session.resume", {}), ("session.update", {"title": "mine now"}), ("session.close", {}),
    ("response.create", {"input": message("hello")}), ("response.cancel", {}), ("input.typing", {}),
]


@pytest.fixture
async def theirs(app: Running):
    """A session of the tenant `default` with a turn, and a key of another tenant's user."""
    async with app.client() as rk:
        chat = await rk.session(title="private")
        await chat.ask("a secret")
        yield chat.id, await app.new_key("other")


async def snapshot(app: Running, session_id: str) -> tuple:
    session = await app.services.store.get(session_id)
    return session, await app.services.store.all_turns(session_id), app.services.tiers.entry(session_id).state


async def test_every_route_answers_for_another_tenants_session_as_for_an_unknown_one(app: Running, theirs: tuple[str, str]) -> None:
    """Same status, same body (the id apart), and nothing of the session changes."""
    session_id, key = theirs
    before = await snapshot(app, session_id)
    async with app.http(key) as http:
        for method, path, body in ROUTES:
            answers = [await http.request(method, f"/v1/sessions/{one}{path}", json=body) for one in (session_id, UNKNOWN)]
            assert [a.status_code for a in answers] == [404, 404], (method, path)
            assert answers[0].text.replace(session_id, "ID") == answers[1].text.replace(UNKNOWN, "ID"), (method, path)
            assert answers[0].json()["error"]["code"] == "session_not_found"
        listed = (await http.get("/v1/sessions")).json()["data"]
        assert listed == []
    assert await snapshot(app, session_id) == before


async def test_every_frame_answers_for_another_tenants_session_as_for_an_unknown_one(app: Running, theirs: tuple[str, str]) -> None:
    """The same error event but for the id, no event of the session leaks, nothing changes."""
    session_id, key = theirs
    before = await snapshot(app, session_id)
    async with app.socket(key) as ws:
        for kind, fields in FRAMES:
            answers = [await ws.answer(kind, session_id=one, event_id="x", **fields) for one in (session_id, UNKNOWN)]
            assert [a["type"] for a in answers] == ["error", "error"], kind
            told = [str(a).replace(session_id, "ID").replace(UNKNOWN, "ID") for a in answers]
            assert told[0] == told[1] and answers[0]["error"]["code"] == "session_not_found", kind
        async with app.client() as rk:
            await (await rk.resume(session_id)).ask("more secrets")
        await ws.answer("ping")
        assert not any(e.get("session_id") == session_id and e["type"] != "error" for e in ws.seen)
    assert (await snapshot(app, session_id))[1][: len(before[1])] == before[1]


async def test_another_tenants_image_is_unknown(app: Running) -> None:
    """By REST and in a message; the owner still has it."""
    async with app.http() as mine, app.http(await app.new_key("other")) as other:
        file = (await mine.post("/v1/files", content=png())).json()
        for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content"):
            assert (await other.get(path)).json()["error"]["code"] == "file_not_found"
            got = await mine.get(path)
            assert got.content.startswith(b"\x89PNG") and "immutable" in got.headers["cache-control"]
        session = (await other.post("/v1/sessions", json={})).json()
        refused = await other.post(f"/v1/sessions/{session['id']}/responses", json={"input": message("what is it", file["id"])})
        assert refused.json()["error"]["code"] == "file_not_found"


async def test_an_admin_may_move_the_pages_of_any_tenant_but_a_user_only_its_own(app: Running) -> None:
    """Page verbs and figures work across tenants for an admin; the transcript does not."""
    async with app.client(await app.new_key("other")) as rk, app.http() as admin:
        chat = await rk.session()
        await chat.ask("a long enough message to fill one page of key and value for the move")
        receipt = (await admin.post(f"/v1/sessions/{chat.id}/spill", json={"to": "host"})).json()
        assert receipt["outcome"] == "done" and receipt["tokens"] > 0
        assert (await admin.get(f"/v1/sessions/{chat.id}/kv")).json()["state"] == "warm"
        assert (await admin.get(f"/v1/sessions/{chat.id}/items")).status_code == 404
        assert (await chat.kv())["state"] == "warm"


async def test_salt_keeps_tenants_apart(app: Running) -> None:
    """The same words in two tenants share nothing; in one tenant they do."""
    words = " ".join(["these words are long enough for pages"] * 10)
    async with app.client() as mine, app.client() as mine_too, app.client(await app.new_key("other")) as other:
        first = await mine.session()
        await first.ask(words)
        same, foreign = await mine_too.session(), await other.session()
        await same.ask(words)
        await foreign.ask(words)
        assert same.usage["cached_tokens"] > 0 and foreign.usage["cached_tokens"] == 0


async def test_bad_logins(app: Running) -> None:
    """No key, a wrong key, a metrics key: refused with one shape, on REST."""
    metrics = await app.new_key("default", "metrics")
    async with httpx.AsyncClient(base_url=app.url, trust_env=False) as http:
        for header, status in (("", 401), ("Bearer rk_wrong", 401), ("Basic abc", 401), (f"Bearer {metrics}", 403)):
            answer = await http.get("/v1/sessions", headers={"Authorization": header} if header else {})
            assert answer.status_code == status and answer.json()["error"]["type"] == "authentication"
        assert (await http.get("/metrics", headers={"Authorization": f"Bearer {metrics}", "X-Forwarded-For": "192.0.2.7"})).status_code == 200
        assert (await http.get("/metrics", headers={"X-Forwarded-For": "192.0.2.7"})).status_code == 401


async def test_images_beyond_their_limits_are_refused_with_the_number(app: Running) -> None:
    """Three images where two are allowed; an upload above image_bytes."""
    async with app.client() as rk, app.http() as http:
        chat = await rk.session()
        images = [f"data:image/png;base64,{base64.b64encode(png((n, n, n))).decode()}" for n in (1, 2, 3)]
        with pytest.raises(LimitExceeded) as refused:
            await chat.ask("three", images=images)
        assert (refused.value.param, refused.value.limit, refused.value.requested) == ("images_per_message", 2, 3)
        assert await chat.ask("two", images=images[:2]) == "two"
        too_big = await http.post("/v1/files", content=b"x" * (app.settings.images.max_bytes + 1))
        assert too_big.status_code == 413 and too_big.json()["error"]["limit"] == app.settings.images.max_bytes
