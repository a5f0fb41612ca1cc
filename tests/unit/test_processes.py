"""Child processes: logs that rotate, whole trees that die, a folder for one server, a sweep that touches its own only."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.processes import Child, FolderTaken, LogFile, command_line, lock, sweep

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def left_over(folder: Path, argv: list[str]) -> subprocess.Popen:
    """A process as a dead predecessor leaves it, with a record that names `argv`."""
    process = subprocess.Popen(SLEEP, start_new_session=True)
    folder.mkdir(exist_ok=True)
    (folder / "engine.pid").write_text(json.dumps({"pid": process.pid, "argv": argv}))
    return process


def test_the_sweep_kills_a_leftover(tmp_path: Path):
    """A recorded child of a dead predecessor is killed, and its record removed."""
    process = left_over(tmp_path, SLEEP)
    until_exec(process)
    assert sweep(tmp_path, wait_s=1) == ["engine"]
    assert process.wait(10) == -signal.SIGKILL
    assert not list(tmp_path.glob("*.pid"))


def test_the_sweep_spares_a_stranger(tmp_path: Path):
    """A process that has the recorded pid and another command line is left alone; the stale record is removed."""
    process = left_over(tmp_path, [sys.executable, "-m", "server.engines.worker"])
    try:
        until_exec(process)
        assert sweep(tmp_path) == []
        assert process.poll() is None and not list(tmp_path.glob("*.pid"))
    finally:
        process.kill()
        process.wait()


def until_exec(process: subprocess.Popen) -> None:
    """Popen returns at the exec, a moment before the new command line can be read."""
    until_s = time.monotonic() + 20
    while command_line(process.pid) != SLEEP:
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": 99999999, "argv": ["x"]}', '{"pid": 1, "argv": []}'])
def test_the_sweep_survives_odd_records(tmp_path: Path, text: str):
    """A record that was cut off, or is of nobody, kills nothing and is removed."""
    (tmp_path / "engine.pid").write_text(text)
    assert sweep(tmp_path) == []
    assert not list(tmp_path.glob("*.pid"))


def test_a_folder_is_for_one_server(tmp_path: Path):
    """A second taker is refused with the folder's name, until the first lets go."""
    first = lock(tmp_path / "data" / "run")
    with pytest.raises(FolderTaken, match="data"):
        lock(tmp_path / "data" / "run")
    os.close(first)
    os.close(lock(tmp_path / "data" / "run"))


async def test_a_child_dies_with_its_tree(tmp_path: Path):
    """Stopping a child kills its children too, also where it ignores SIGTERM; its output is in the log."""
    code = ("import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True); time.sleep(600)")
    log = LogFile(tmp_path / "child.log")
    child = await Child.spawn("child", [sys.executable, "-c", code], run_folder=tmp_path, log=log, env=os.environ)
    async with asyncio.timeout(20):
        while not log.tail():
            await asyncio.sleep(0.02)
    grandchild = int(log.tail())
    assert command_line(grandchild)
    await child.stop(grace_s=0.1)
    assert child.returncode == -signal.SIGKILL
    async with asyncio.timeout(20):
        while command_line(grandchild):
            await asyncio.sleep(0.02)
    assert not list(tmp_path.glob("*.pid"))


async def test_a_command_that_does_not_exist_is_in_the_log(tmp_path: Path):
    """A child whose program is missing ends at once with the reason in its log."""
    log = LogFile(tmp_path / "child.log")
    child = await Child.spawn("child", ["/no/such/program"], run_folder=tmp_path, log=log, env=os.environ)
    assert await child.wait() == 1
    await child.stop(0)
    assert "No such file" in log.tail()


def test_a_log_rotates_at_a_line_end(tmp_path: Path):
    """A full file moves aside whole; every line is in one of the two, and the tail is the end of the newer."""
    log = LogFile(tmp_path / "x.log", max_bytes=100)
    assert log.tail() == ""
    for n in range(12):
        log.write(b"line %03d " % n)
        log.write(b"ends\n")
    older, newer = (tmp_path / "x.log.1").read_text().splitlines(), (tmp_path / "x.log").read_text().splitlines()
    assert older + newer == [f"line {n:03d} ends" for n in range(12)][-len(older + newer):]
    assert newer and log.tail(1) == "line 011 ends"
