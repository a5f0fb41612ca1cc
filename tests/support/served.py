"""`rekindle serve` as a process, the way people run it, with the real engine and daemon behind it."""

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_S = 300


class Served:
    """One data folder, and the server on it (again and again)."""

    def __init__(self, data: Path, model: Path | str, **environment: str) -> None:
        self.data, self._model, self._environment = data, model, environment
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""
        self.lines: list[str] = []
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when engine and daemon are ready, and the engine knows the daemon."""
        self.lines.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "server", "serve", "--data", str(self.data), "--model", str(self._model), "--port", "0",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **self._environment}, limit=1 << 20)
        self._reader = asyncio.create_task(self._read())
        async with asyncio.timeout(READY_S):
            while not (found := [m[1] for line in self.lines if (m := re.search(r"listening on (http://\S+?),", line))]):
                assert self._process.returncode is None, "\n".join(self.lines)
                await asyncio.sleep(0.1)
            self.url = found[0]
            await self.until_ready()

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        async for raw in self._process.stdout:
            self.lines.append(raw.decode(errors="replace").rstrip())

    async def until_ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while True:
                status = await self.status()
                if status["engine"]["state"] == "ready" and (status["pressure"] or {}).get("daemon_healthy"):
                    return
                await asyncio.sleep(0.1)

    async def stop(self) -> int:
        """As Ctrl-C does; the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            return await self._process.wait()

    async def kill(self) -> None:
        """kill -9 of the server and everything below it, at once."""
        assert self._process is not None
        for process in [psutil.Process(self._process.pid), *self.children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await self._process.wait()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill()
        if self._reader is not None:
            await self._reader

    # ---- looking at it -----------------------------------------------------------------------------------------
    def children(self) -> list[psutil.Process]:
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    def find(self, words: str) -> psutil.Process:
        """The process below the server whose title or command line contains these words."""
        found = []
        for process in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if words in " ".join(process.cmdline()):
                    found.append(process)
        assert found, f"no process with {words} among {[p.cmdline() for p in self.children()]}"
        return found[0]

    @property
    def page(self) -> str:
        """The address that was printed for a person, with its ticket."""
        return next(m[1] for line in self.lines if (m := re.search(r"open (http://\S+)", line)))

    @property
    def key(self) -> str:
        return (self.data / "admin.key").read_text().strip()

    async def get(self, path: str) -> Any:
        async with httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=30) as http:
            answer = await http.get(path)
            answer.raise_for_status()
            return answer.json() if "json" in answer.headers["content-type"] else answer.text

    async def status(self) -> dict[str, Any]:
        return await self.get("/v1/status")

    async def free_pages(self) -> int:
        """Of the device pool, once nothing is in flight and three looks agree: the gauges come a few times a second."""
        seen: list[tuple[int, int]] = []
        async with asyncio.timeout(30):
            while len(seen) < 3 or len(set(seen[-3:])) > 1 or seen[-1][1]:
                await asyncio.sleep(0.3)
                pressure = (await self.status())["pressure"]
                seen.append((pressure["free_pages"], pressure["in_flight_pages"]))
        return seen[-1][0]

    def output_ids(self, response_id: str) -> list[int]:
        """Read past the server: what the store holds of a turn."""
        with contextlib.closing(sqlite3.connect(f"file:{self.data / 'sessions.db'}?mode=ro", uri=True)) as db:
            (blob,) = db.execute("select output_ids from turns where id = ?", (response_id,)).fetchone()
        return list(_words(blob))


def _words(blob: bytes) -> Iterator[int]:
    for (word,) in struct.iter_unpack("<I", blob):
        yield word
