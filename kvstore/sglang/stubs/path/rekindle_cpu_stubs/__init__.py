"""Import finders that stand in for what SGLang's CPU mode asks for and a machine without CUDA lacks. Imports nothing until asked.

- `sgl_kernel`: the few helpers that the CPU mode calls by name (`sgl_kernel.py` here), unless the real package is installed.
- `triton`: SGLang's own stub (`sglang/_triton_stub.py`), unless the real package is installed.
- `torchvision`: PyPI's build is made for CUDA's torch and cannot load its operators beside a CPU torch, where its import then
  fails on two names. These are declared first, but only where the operators do not load.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent
_declared = []  # torch drops the declarations of a Library that is garbage


def install() -> None:
    """Idempotent. The stand-ins go last, after all that could find the real package."""
    if not any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        sys.meta_path.append(_StandIns())
        sys.meta_path.insert(0, _BeforeTorchvision())


class _StandIns(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sgl_kernel":
            return spec_from_file_location(name, _HERE / "sgl_kernel.py")
        if name == "triton" and (stub := _triton_stub()) is not None:
            # Importlib takes a module's own spec where a finder has filled sys.modules, and the stub's has no loader.
            stub.__spec__ = ModuleSpec(name, _Made(stub), is_package=True)
            return stub.__spec__
        return None


class _Made(Loader):
    """For a module that exists already."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _triton_stub() -> ModuleType | None:
    """SGLang's stub as `sys.modules["triton"]`, loaded by its file: `import sglang` would itself import triton."""
    sglang = PathFinder.find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        return None
    spec = spec_from_file_location("_sglang_triton_stub", Path(sglang.submodule_search_locations[0]) / "_triton_stub.py")
    source = module_from_spec(spec)
    spec.loader.exec_module(source)
    finder = next(f for f in sys.meta_path if isinstance(f, _StandIns))
    sys.meta_path.remove(finder)  # the stub first asks whether there is a real triton, which must not lead back here
    try:
        source.install()
    finally:
        sys.meta_path.append(finder)
    return sys.modules["triton"]


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing: acts once, just before torchvision is found by another."""

    done = False

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not self.done:
            self.done = True
            _declare_torchvision_operators()


def _declare_torchvision_operators() -> None:
    package = PathFinder.find_spec("torchvision")
    if package is None:
        return
    import torch

    try:
        torch.ops.load_library(str(Path(package.submodule_search_locations[0]) / "_C.so"))
    except OSError:  # made for another torch: CUDA's libraries are not there
        operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(operators)
