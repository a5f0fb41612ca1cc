"""The stand-ins that let SGLang's CPU mode start. Each test uses a fresh interpreter: imports cannot be undone."""

import os
import subprocess
import sys
from pathlib import Path

from kvstore.sglang import stubs


def run(code: str, path: Path | None = None) -> str:
    base = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    env = base | stubs.environment(base)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_environment_keeps_what_was_there_and_names_the_stand_ins_once() -> None:
    """PYTHONPATH of the parent survives behind the stand-ins, however often it is asked for."""
    once = stubs.environment({"PYTHONPATH": "/a:/b"})
    assert once["PYTHONPATH"] == f"{stubs.PATH}:/a:/b"
    assert stubs.environment(once) == once
    assert stubs.environment({})["PYTHONPATH"] == str(stubs.PATH)
    assert once["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_hub_model_stays_reachable() -> None:
    """Only an engine with a model on disk is cut off from the hub."""
    assert stubs.environment({})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in stubs.environment({}, offline=False)


def test_triton_torchvision_and_sgl_kernel_import_also_in_a_spawned_process() -> None:
    """What SGLang imports at start is there in the first process and in one that multiprocessing spawns."""
    code = "import triton.language, triton.backends.compiler, torchvision.transforms, sgl_kernel"
    spawn = f"import multiprocessing as m\np = m.get_context('spawn').Process(target=exec, args=({code!r},))\np.start(); p.join()\nprint(p.exitcode)"
    assert run(f"{code}\n{spawn}") == "0"


def test_real_packages_win(tmp_path: Path) -> None:
    """A triton and an sgl_kernel that are installed are the ones imported."""
    for name in ("triton", "sgl_kernel"):
        (tmp_path / f"{name}.py").write_text("REAL = True")
    assert run("import triton, sgl_kernel; print(triton.REAL, sgl_kernel.REAL)", tmp_path) == "True True"


def test_a_kernel_that_is_not_there_says_so_when_called() -> None:
    """Naming an unknown kernel is fine, as SGLang's imports do; calling it raises with its name."""
    code = "import sgl_kernel\nk = sgl_kernel.some_kernel\ntry: k(1)\nexcept NotImplementedError as e: print(e)"
    assert "sgl_kernel.some_kernel" in run(code)


def test_the_two_helpers_move_slots() -> None:
    """Slots are laid into their requests' rows, and copies between overlapping slots read everything first."""
    code = """
import torch, sgl_kernel
rows = torch.zeros(3, 6, dtype=torch.int32)
t = torch.tensor
sgl_kernel.assign_req_to_token_pool_cpu(t([2, 0]), rows, t([1, 0]), t([3, 3]), t([7, 8, 4, 5, 6]), 6)
kv = torch.arange(8.).reshape(4, 2)
sgl_kernel.copy_all_layer_kv_cache_cpu(t([kv.data_ptr()]), t([8]), t([1, 2]), t([0, 1]))
print(rows.tolist(), kv[:, 0].tolist())
"""
    assert run(code) == "[[4, 5, 6, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 7, 8, 0, 0, 0]] [0.0, 0.0, 2.0, 6.0]"
