"""The command line and the blocking client against a running server; and what the log may not hold."""

import asyncio
import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from server.client import Rekindle
from tests.support.app import Running, png, running

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def app(tmp_path):
    async with running(tmp_path / "data") as app:
        yield app


async def rekindle(*args: str, **env: str) -> subprocess.CompletedProcess:
    return await asyncio.to_thread(subprocess.run, [sys.executable, "-m", "server", *args], cwd=ROOT, capture_output=True, text=True,
                                   env=os.environ | env, timeout=60)


async def test_sessions_and_budgets_on_the_command_line(app: Running, tmp_path: Path) -> None:
    """ls, show, spill, set limits, rm: what the server answers is printed; a refusal is an exit status of 1."""
    (tmp_path / "admin.key").write_text(app.key + "\n")
    env = {"REKINDLE_URL": app.url, "REKINDLE_DATA": str(tmp_path)}
    async with app.client() as rk:
        chat = await rk.session(title="Mine")
        await chat.ask("enough words for at least one whole page of keys and values in here")
        listed = await rekindle("sessions", "ls", **env)
        assert chat.id in listed.stdout and "hot" in listed.stdout and "Mine" in listed.stdout
        spilled = json.loads((await rekindle("sessions", "spill", chat.id, "--to", "storage", **env)).stdout)
        assert (spilled["verb"], spilled["to"], spilled["outcome"]) == ("spill", "storage", "done")
        shown = json.loads((await rekindle("sessions", "show", chat.id, **env)).stdout)
        assert shown["kv"]["state"] == "cold" and shown["used"]["turns"] == 1
        limits = json.loads((await rekindle("budgets", "set", chat.id, "max_turns=7", "host_bytes=none", **env)).stdout)
        assert limits["max_turns"] == 7 and limits["host_bytes"] is None
        assert (await rekindle("sessions", "rm", chat.id, **env)).returncode == 0
        gone = await rekindle("sessions", "show", chat.id, **env)
        assert gone.returncode == 1 and "session_not_found" in gone.stderr


async def test_a_wrong_configuration_names_the_key(tmp_path: Path) -> None:
    """check-config prints the settings in force; an unknown key or a wrong value is named, and the exit status is 2."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text("[server]\nport = 9000\n")
    bad.write_text("[server]\nprot = 9000\n")
    assert json.loads((await rekindle("check-config", "--config", str(good))).stdout)["server"]["port"] == 9000
    refused = await rekindle("check-config", "--config", str(bad))
    assert refused.returncode == 2 and "server.prot" in refused.stderr


async def test_the_blocking_client(app: Running, tmp_path: Path) -> None:
    """Without asyncio: pieces, a whole answer, an image by path, usage, a receipt."""
    picture = tmp_path / "a.png"
    picture.write_bytes(png())

    def use() -> None:
        with Rekindle(app.url, app.key) as rk:
            chat = rk.session()
            pieces = list(chat.say("what do you see in it", images=[picture]))
            assert "".join(pieces) == "what do you see in it" and len(pieces) > 1
            assert chat.session.usage["image_tokens"] > 0
            assert chat.ask("and now") == "and now"
            assert chat.spill()["outcome"] == "done"
            assert len(rk.resume(chat.session.id).session.items) == 2

    await asyncio.to_thread(use)


async def test_the_log_names_sessions_and_turns_and_holds_nothing_private(app: Running) -> None:
    """Ids and figures, but no message, no answer, no key, no base64, no query string."""
    image = base64.b64encode(png()).decode()
    with capture_logs() as lines:
        async with app.client() as rk, app.http() as http:
            chat = await rk.session(instructions="secret-instructions")
            await chat.ask("secret-question", images=[f"data:image/png;base64,{image}"])
            await http.get(f"/v1/sessions/{chat.id}?secret-query=1")
            await http.get("/v1/sessions", headers={"Authorization": "Bearer rk_secret-key"})
            with pytest.raises(Exception, match="image"):
                await chat.ask("secret-question", images=["data:image/png;base64,secret+image"])
    text = json.dumps(lines, default=str)
    assert chat.id in text and chat.last["id"] in text
    assert "secret" not in text and app.key not in text and image[:40] not in text
