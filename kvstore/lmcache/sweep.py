"""What LMCache leaves behind: shared memory of dead processes, and a storage folder that nothing bounds."""

import os
import re
from pathlib import Path

_POOL_SEGMENT = re.compile(r"lmcache_kv_(\d+)_\d+$")


def sweep_shm(folder: Path = Path("/dev/shm")) -> int:
    """Remove the segments of engines that are gone; returns the bytes freed.

    A CPU engine's pools are shared with the daemon through /dev/shm/lmcache_kv_<pid>_<n>; a killed engine leaves them. Every
    engine also leaves SGLang's load gauges, sglang_loads_*, which name no process: those that nobody maps are removed.
    """
    gauges = list(folder.glob("sglang_loads_*.shm"))
    mapped = _mapped() if gauges else ""
    freed = sum(_remove(path) for path in gauges if str(path) not in mapped)
    for path in folder.glob("lmcache_kv_*"):
        match = _POOL_SEGMENT.match(path.name)
        if match is None or _alive(match[1]):
            continue
        freed += _remove(path)
    return freed


def _remove(path: Path) -> int:
    """Bytes freed; 0 where somebody else swept it first."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def _mapped() -> str:
    """The memory maps of all processes that we may look at."""
    out = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            out.append(maps.read_text())
        except OSError:
            continue                                 # it ended, or is somebody else's
    return "".join(out)


def _alive(pid: str) -> bool:
    """A process that was killed but not yet waited for has let go of its memory."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def storage_bytes(folder: Path) -> int:
    """Bytes of chunk files below the storage tier's folder."""
    return sum(size for _, size, _ in _chunks(folder))


def sweep_storage(folder: Path, cap_bytes: int) -> tuple[int, int]:
    """Delete the least recently written chunk files above the cap, and half-written ones of a dead daemon.

    Returns (bytes kept, bytes deleted). A chunk that goes while it is being read counts as a miss there.
    """
    chunks = sorted(_chunks(folder))
    total = sum(size for _, size, _ in chunks)
    deleted = 0
    for _, size, path in chunks:
        if total - deleted <= cap_bytes:
            break
        path.unlink(missing_ok=True)
        deleted += size
    return total - deleted, deleted


def sweep_unfinished(folder: Path) -> int:
    """Delete what a daemon was writing when it died. Only while no daemon runs. Returns the number of files."""
    files = list((folder / "tmp").glob("*")) if (folder / "tmp").is_dir() else []
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _chunks(folder: Path) -> list[tuple[float, int, Path]]:
    """(written at, bytes, path) of every chunk file."""
    out: list[tuple[float, int, Path]] = []
    if not folder.is_dir():
        return out
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".data"):
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue                         # deleted while we look
                out.append((stat.st_mtime, stat.st_size, Path(entry.path)))
    return out
