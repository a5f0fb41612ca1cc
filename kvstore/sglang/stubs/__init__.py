"""Lets SGLang run on a machine without CUDA packages. Nothing here acts unless a process is started with `environment()`.

`path/` goes on PYTHONPATH, so that every process of the engine (its scheduler is spawned, not forked) loads
`path/sitecustomize.py` before anything else. What a machine really has is never replaced: each stand-in is the last resort
of the import system.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

PATH = Path(__file__).parent / "path"


def environment(base: Mapping[str, str] | None = None, *, offline: bool = True) -> dict[str, str]:
    """What to add to the environment of an engine process with `device = "cpu"`.

    `base` is the environment that it is added to (default: ours); its PYTHONPATH is kept, after the stand-ins.
    `offline=False` leaves the model hub reachable, for a model that is given by its hub name.
    """
    before = (os.environ if base is None else base).get("PYTHONPATH", "").split(os.pathsep)
    path = [str(PATH), *(entry for entry in before if entry and entry != str(PATH))]
    added = {"PYTHONPATH": os.pathsep.join(path), "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    return added | {"HF_HUB_OFFLINE": "1"} if offline else added


def install() -> None:
    """The same for this process, for one that was not started with `environment()`. Before sglang or torchvision is imported."""
    if str(PATH) not in sys.path:
        sys.path.append(str(PATH))
    from rekindle_cpu_stubs import install as install_finders

    install_finders()
