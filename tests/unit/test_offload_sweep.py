"""What LMCache leaves behind is bounded and swept, and nothing else is touched."""

import mmap
import os
from pathlib import Path

from kvstore.lmcache.sweep import storage_bytes, sweep_shm, sweep_storage, sweep_unfinished


def chunk(folder: Path, name: str, size: int, written_at: float) -> Path:
    path = folder / f"{name}.data"
    path.write_bytes(b"k" * size)
    os.utime(path, (written_at, written_at))
    return path


def test_the_oldest_chunks_go_first_and_only_down_to_the_cap(tmp_path: Path) -> None:
    """Above the cap the least recently written chunks are deleted, one by one, until the rest fits."""
    old, middle, new = (chunk(tmp_path, name, 100, at) for name, at in (("b", 1), ("c", 2), ("a", 3)))
    other = tmp_path / "notes.txt"
    other.write_bytes(b"x" * 1000)
    assert storage_bytes(tmp_path) == 300
    assert sweep_storage(tmp_path, 250) == (200, 100)
    assert not old.exists() and middle.exists() and new.exists() and other.exists()
    assert sweep_storage(tmp_path, 250) == (200, 0)


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    """Before the daemon's first start there is no folder, and that is no error."""
    assert sweep_storage(tmp_path / "none", 1) == (0, 0) and storage_bytes(tmp_path / "none") == 0


def test_unfinished_writes_are_deleted(tmp_path: Path) -> None:
    """What a killed daemon was writing goes; whole chunks stay."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "half.data").write_bytes(b"k")
    whole = chunk(tmp_path, "whole", 10, 1)
    assert sweep_unfinished(tmp_path) == 1 and whole.exists() and not list((tmp_path / "tmp").iterdir())


def test_shared_memory_of_dead_engines_only(tmp_path: Path) -> None:
    """Segments named after a process that is gone are removed; those of a living one, and other people's, stay."""
    gone = next(pid for pid in range(4_000_000, 5_000_000) if not Path(f"/proc/{pid}").exists())
    dead, alive, foreign = tmp_path / f"lmcache_kv_{gone}_0", tmp_path / f"lmcache_kv_{os.getpid()}_0", tmp_path / "lmcache_kv_pool"
    for path in (dead, alive, foreign):
        path.write_bytes(b"12345")
    assert sweep_shm(tmp_path) == 5
    assert not dead.exists() and alive.exists() and foreign.exists()


def test_load_gauges_that_nobody_maps(tmp_path: Path) -> None:
    """SGLang's gauges of an engine that is gone are removed; one that a process maps stays."""
    stale, used = tmp_path / "sglang_loads_a_1.shm", tmp_path / "sglang_loads_b_2.shm"
    for path in (stale, used):
        path.write_bytes(b"x" * 100)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 100):
        assert sweep_shm(tmp_path) == 100
        assert used.exists() and not stale.exists()
    assert sweep_shm(tmp_path) == 100 and not used.exists()
