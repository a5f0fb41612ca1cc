"""The real LMCache daemon and the real SGLang on the CPU, in processes of their own, for tests that count."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from server.engines.channel import Ledger, Pressure, Progress, Ready
from server.engines.config import EngineConfig
from server.engines.remote import RemoteEngine
from server.settings import Settings, load
from server.supervisor import Supervisor

START_S = 300


@dataclass
class Stack:
    settings: Settings
    supervisor: Supervisor
    heard: list[Ledger | Pressure | Progress]
    ready: Ready

    @property
    def engine(self) -> RemoteEngine:
        return self.supervisor.engine

    async def until_daemon(self, healthy: bool = True) -> None:
        """Until the engine has registered with the daemon (or knows that it is gone)."""
        async with asyncio.timeout(60):
            while (await self.engine.health()).pressure.daemon_healthy != healthy:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def real_stack(data: Path, model: Path, **engine) -> AsyncIterator[Stack]:
    """float32, pages and chunks of 16 tokens, so that all counts are exact and outputs comparable."""
    settings = load(data=data, model={"path": str(model), "dtype": "float32"})
    config = EngineConfig(**{"model_path": str(model), "fingerprint": "test", "dtype": "float32", "device_tokens": 8192,
                             "image_folder": str(data / "images"), "vision_folder": str(data / "vision"), **engine})
    heard: list = []
    supervisor = Supervisor(settings, config, listen=lambda state: None, heard=heard.append)
    await supervisor.start()
    try:
        await supervisor.wait_ready(START_S)
        stack = Stack(settings, supervisor, heard, supervisor.ready)
        await stack.until_daemon()
        yield stack
    finally:
        await supervisor.close()
