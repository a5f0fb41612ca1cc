"""We bind to private names of SGLang and LMCache, so the versions are exact and every hook is proved at start."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

PINS = {"sglang": "0.5.17", "lmcache": "0.5.6"}


class Incompatible(RuntimeError):
    """A version or a hook is not what this code was written for. The engine must not start."""


def check_versions(pins: dict[str, str] = PINS) -> None:
    """Raises Incompatible naming every package that differs."""
    wrong = []
    for package, wanted in pins.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            wrong.append(f"{package} is {found}, needed is {wanted}")
    if wrong:
        raise Incompatible("; ".join(wrong))


def applied(targets: Iterable[str]) -> dict[str, bool]:
    """For each hook target: did SGLang's registry patch it in this process? (It only logs a hook that fails.)"""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return {target: target in HookRegistry._patched for target in targets}


def prove(process: str, state: dict[str, bool]) -> dict[str, str]:
    """hook -> where it was proved. Raises Incompatible naming every hook that did not apply."""
    missing = [name for name, ok in state.items() if not ok]
    if missing:
        raise Incompatible(f"hooks did not apply in the {process} process: {', '.join(missing)}")
    return {name: process for name in state}
