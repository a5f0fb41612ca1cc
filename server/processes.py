"""Child processes: tied to the server's life, killed as whole trees, logged to rotated files, swept after a crash.

Each child leads a session of its own, so that one signal reaches its whole tree, and leaves a record in the run folder
while it lives. Who holds the folder's lock knows that every record in it is of a dead predecessor.
"""

import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

LAUNCHER = Path(__file__).with_name("launch.py")


class FolderTaken(Exception):
    """Another live server uses this data folder."""


class LogFile:
    """Appends lines; starts anew when the file is full, keeping one older file beside it."""

    def __init__(self, path: Path, max_bytes: int = 8 << 20) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._at_line_end = True
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, data: bytes) -> None:
        if self._at_line_end and self.path.exists() and self.path.stat().st_size > self._max_bytes:
            self.path.replace(self.path.with_suffix(self.path.suffix + ".1"))
        with self.path.open("ab") as file:
            file.write(data)
        self._at_line_end = data.endswith(b"\n")

    def tail(self, lines: int = 20, max_bytes: int = 16384) -> str:
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


TREE_GONE_S = 10.0
"""A killed process that maps gigabytes takes a moment to go; longer means that the kernel itself is stuck."""


def _group_alive(group: int) -> bool:
    """Does any process of the group still run? Dead ones that nobody has waited for do not count."""
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, PermissionError):
            continue
    return False


class Child:
    """A running child. Made by `spawn`."""

    def __init__(self, process: asyncio.subprocess.Process, record: Path, log: LogFile) -> None:
        self._process, self._record = process, record
        self._pump = asyncio.create_task(_pump(process, log), name=f"log of {record.stem}")

    @classmethod
    async def spawn(cls, name: str, argv: Sequence[str], *, run_folder: Path, log: LogFile, env: Mapping[str, str]) -> "Child":
        """Raises OSError where no process can be made. A command that does not exist ends at once, and the log says so."""
        run_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(LAUNCHER), str(os.getpid()), *argv, env=dict(env), start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
        record = run_folder / f"{name}.pid"
        record.write_text(json.dumps({"pid": process.pid, "argv": list(argv)}))
        return cls(process, record, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the tree, and SIGKILL to what is left of it after the grace. Returns when it is gone."""
        if grace_s > 0 and self.returncode is None:
            _kill_group(self.pid, signal.SIGTERM)
            await asyncio.wait({asyncio.ensure_future(self.wait())}, timeout=grace_s)
        _kill_group(self.pid, signal.SIGKILL)
        await self.wait()
        until_s = time.monotonic() + TREE_GONE_S
        while _group_alive(self.pid) and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        await asyncio.wait({self._pump}, timeout=1)       # a grandchild in a session of its own may hold the pipe open
        self._pump.cancel()
        self._record.unlink(missing_ok=True)


async def _pump(process: asyncio.subprocess.Process, log: LogFile) -> None:
    assert process.stdout is not None
    while data := await process.stdout.read(1 << 16):
        log.write(data)


def lock(run_folder: Path) -> int:
    """Take the folder for this process. Returns the descriptor that holds it; raises FolderTaken."""
    run_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(run_folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FolderTaken(f"another server is running with {run_folder.parent}") from None
    return descriptor


def sweep(run_folder: Path, wait_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> list[str]:
    """Kill the children that a dead predecessor left, by its records; needs the lock. Returns the names of those killed.

    A pid may be somebody else's by now: only a process whose command line ends with the recorded command is touched.
    """
    killed = []
    for record in sorted(run_folder.glob("*.pid")):
        try:
            left = json.loads(record.read_text())
            pid, argv = int(left["pid"]), [str(part) for part in left["argv"]]
        except (ValueError, KeyError, TypeError):                 # cut off in the middle of being written
            record.unlink()
            continue
        if argv and command_line(pid)[-len(argv):] == argv:
            _kill_group(pid, signal.SIGKILL)
            until_s = clock() + wait_s
            while command_line(pid) and clock() < until_s:
                time.sleep(0.01)
            killed.append(record.stem)
        record.unlink()
    return killed


def command_line(pid: int) -> list[str]:
    """Empty for a process that is gone, or a zombie."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return data.decode(errors="surrogateescape").rstrip("\0").split("\0") if data else []


def _kill_group(pid: int, sig: signal.Signals) -> None:
    try:
        os.killpg(pid, sig)
    except ProcessLookupError:
        pass                                              # the whole group is gone: what was wanted
