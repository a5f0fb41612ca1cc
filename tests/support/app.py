"""The whole server on the scripted engine: real uvicorn on a free port, in the test's own event loop."""

import asyncio
import functools
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import websockets.asyncio.client
from PIL import Image

from server import modelinfo
from server.app import create_app
from server.auth import Role
from server.client import Client, connect
from server.engines.config import EngineConfig
from server.engines.scripted import ScriptedConfig, ScriptedEngine
from server.runtime import Services, model_folder
from server.serving import Server, uvicorn_config
from server.settings import Settings, load

WAIT_S = 20.0


@dataclass
class Running:
    """A server that answers, with an admin's key of the tenant `default`."""

    url: str
    key: str
    settings: Settings
    services: Services
    engines: list[ScriptedEngine] = field(default_factory=list)
    """Every one that was started; the last one serves."""
    config: ScriptedConfig = field(default_factory=ScriptedConfig)
    """Shared by all of them: change it to make them misbehave."""
    server: Server | None = None

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[-1]

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws") + "/v1/chat"

    async def new_key(self, tenant: str, role: str = "user") -> str:
        return await self.services.auth.create_key(tenant_id=tenant, role=Role(role), label="test")

    def http(self, key: str | None = None) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=WAIT_S,
                                 headers={"Authorization": f"Bearer {self.key if key is None else key}"})

    def client(self, key: str | None = None, **options: Any):
        return connect(self.url, self.key if key is None else key, **options)

    @asynccontextmanager
    async def socket(self, key: str | None = None, **options: Any) -> AsyncIterator["Frames"]:
        """A bare WebSocket that has had its connection.ready."""
        options.setdefault("additional_headers", {"Authorization": f"Bearer {self.key if key is None else key}"})
        async with websockets.asyncio.client.connect(self.ws_url, subprotocols=["rekindle.v1"], max_size=None, **options) as ws:
            frames = Frames(ws)
            await frames.until("connection.ready")
            yield frames

    async def until(self, condition, what: str = "") -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)


class Frames:
    """Frames of one WebSocket, as dicts."""

    def __init__(self, ws: websockets.asyncio.client.ClientConnection) -> None:
        self.ws = ws
        self.seen: list[dict[str, Any]] = []
        self._ids = 0

    async def send(self, type: str, **fields: Any) -> str:
        """The event_id that it was sent with."""
        self._ids += 1
        event_id = fields.pop("event_id", f"e{self._ids}")
        await self.ws.send(json.dumps({"type": type, "event_id": event_id, **fields}))
        return event_id

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            event = json.loads(await self.ws.recv())
        self.seen.append(event)
        return event

    async def until(self, *types: str, **match: Any) -> dict[str, Any]:
        """The next event of one of these types (and fields); those before it are in `seen`."""
        while True:
            event = await self.next()
            if event["type"] in types and all(event.get(k) == v for k, v in match.items()):
                return event

    async def answer(self, type: str, **fields: Any) -> dict[str, Any]:
        """Send, and wait for what carries the event_id."""
        event_id = await self.send(type, **fields)
        while (event := await self.next()).get("event_id") != event_id:
            pass
        return event

    async def say(self, session_id: str, text: str, **fields: Any) -> dict[str, Any]:
        """One whole turn: the event that ended it. An error event is returned as it is."""
        answer = await self.answer("response.create", session_id=session_id, input=message(text), **fields)
        if answer["type"] != "response.created":
            return answer
        return await self.ended(answer["response"]["id"])

    async def ended(self, response_id: str) -> dict[str, Any]:
        while True:
            event = await self.until("response.completed", "response.incomplete", "response.failed")
            if event["response"]["id"] == response_id:
                return event

    async def closed(self) -> int | None:
        """Read to the end: the close code."""
        try:
            while True:
                await self.next()
        except websockets.ConnectionClosed:
            return self.ws.close_code


def message(text: str, *images: str) -> list[dict[str, Any]]:
    """The `input` of a response.create. Images: file ids or data URLs."""
    content: list[dict[str, Any]] = [
        {"type": "input_image", "image_url" if image.startswith("data:") else "file_id": image} for image in images]
    return [{"type": "message", "role": "user", "content": [*content, {"type": "input_text", "text": text}]}]


def png(color: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (112, 112)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


model = functools.cache(modelinfo.read)


@asynccontextmanager
async def running(data: Path, config: ScriptedConfig | None = None, **overrides: Any) -> AsyncIterator[Running]:
    """`overrides`: settings, nested. The engine is ready when this is entered, unless its script refuses to start."""
    overrides.setdefault("idle", {"to_host_s": None, "to_storage_s": None})
    tree = {"data": data, "engine": {"kind": "scripted"} | overrides.pop("engine", {}),
            "server": {"port": 0} | overrides.pop("server", {}), **overrides}
    settings = load(None, **tree)
    config = config or ScriptedConfig(page_tokens=settings.engine.page_tokens)
    engines: list[ScriptedEngine] = []

    def make(_: EngineConfig, on_exit: Any) -> ScriptedEngine:
        engines.append(ScriptedEngine(config, on_exit))
        return engines[-1]

    app = create_app(settings, make_engine=make, info=model(model_folder(settings)))
    services: Services = app.state.services
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn_config(settings, app), services)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        async with asyncio.timeout(WAIT_S):
            while not server.started:
                if task.done():
                    task.result()
                    raise RuntimeError("the server did not start")
                await asyncio.sleep(0.005)
            if not config.start_error:
                await services.supervisor.wait_ready(WAIT_S)
        key = await services.auth.create_key(tenant_id="default", role=Role.ADMIN, label="test")
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", key, settings, services, engines, config, server)
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, WAIT_S)
        listening.close()


__all__ = ["Client", "Frames", "Running", "ScriptedConfig", "message", "png", "running"]
