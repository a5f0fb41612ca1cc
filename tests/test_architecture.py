"""The shape of the source tree: which way dependencies point, what pure files may import, and how long a file may be."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "sessions", "kvstore")
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
         for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
"""Module name -> file."""

CORES = {
    "kvstore.geometry", "kvstore.receipt", "kvstore.fingerprint", "kvstore.ledger", "kvstore.budget", "kvstore.policy", "kvstore.planner",
    "sessions.model", "sessions.tree", "sessions.lifecycle", "sessions.budgets", "sessions.stream", "sessions.errors",
    "server.wire", "server.protocol", "server.admission",
}
"""The decisions of the system. These must be pure; other files may say that they are, and are held to it too."""
UNCERTAIN = {"asyncio", "concurrent", "datetime", "logging", "multiprocessing", "os", "random", "secrets", "select", "selectors", "shutil",
             "signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid"}
"""Standard modules whose results depend on more than the arguments."""
ENGINES = {"sglang", "vllm", "lmcache"}
ENGINE_ROOMS = ("kvstore.sglang", "kvstore.vllm", "kvstore.lmcache", "server.engines")
HEAVY = ENGINES | {"torch", "transformers", "triton"}
FORBIDDEN = [
    ("sessions", "server"), ("sessions", "kvstore"), ("kvstore", "server"), ("kvstore", "sessions"), ("server.client", "kvstore"),
    ("server.client", "sessions"),
]
MAX_LINES = 300
DECLARATIONS = {"server.wire"}
"""Only dataclasses and tables, which are read like a document and may be longer."""


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imports(module: str) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, by its absolute name; `from x import y` gives x.y where that is a module."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[:len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base


def says_pure(module: str) -> bool:
    return (ast.get_docstring(ast.parse(FILES[module].read_text(encoding="utf-8"))) or "").startswith("PURE")


def test_the_test_sees_imports_of_every_form(tmp_path, monkeypatch):
    """Absolute, relative, aliased and nested imports are all found; otherwise the tests below could not fail."""
    path = tmp_path / "x.py"
    path.write_text("import os.path\nfrom . import wire\nfrom .engines import channel as c\nfrom kvstore import geometry\n"
                    "def f():\n    from sessions.model import Turn\n    import torch as t\n")
    monkeypatch.setitem(FILES, "server.x", path)
    assert list(imports("server.x")) == ["os.path", "server.wire", "server.engines.channel", "kvstore.geometry", "sessions.model", "torch"]
    assert len(FILES) > 30


@pytest.mark.parametrize(("package", "banned"), FORBIDDEN)
def test_dependencies_point_one_way(package, banned):
    """server uses sessions and kvstore; those two know neither it nor each other; the client knows nothing of the server's."""
    wrong = {(module, used) for module in FILES if within(module, package) for used in imports(module) if within(used, banned)}
    assert not wrong


def test_the_client_stands_alone():
    """The client library imports nothing of the server's besides itself, since it is installed without it."""
    wrong = {(module, used) for module in FILES if within(module, "server.client") for used in imports(module)
             if within(used, "server") and not within(used, "server.client")}
    assert not wrong


PURE = {module for module in FILES if says_pure(module)} | {"sessions.errors"}
"""An error tree needs no such word."""


def test_the_cores_say_that_they_are_pure():
    """Every decision of the system is in a file whose docstring begins with PURE."""
    assert not CORES - PURE


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_file_is_pure(module):
    """It imports the standard library, without clock, chance, threads or files of the system, and other pure files."""
    wrong = {used for used in imports(module)
             if not (used in PURE or (used.partition(".")[0] in sys.stdlib_module_names and used.partition(".")[0] not in UNCERTAIN))}
    assert not wrong


def test_engines_are_imported_in_their_rooms_only():
    """SGLang, vLLM and LMCache are behind their adapters."""
    wrong = {(module, used) for module in FILES if not any(within(module, room) for room in ENGINE_ROOMS)
             for used in imports(module) if used.partition(".")[0] in ENGINES}
    assert not wrong


def test_the_server_process_loads_nothing_heavy():
    """Besides the engine rooms and the builder of the demo model nothing imports torch or transformers."""
    wrong = {(module, used) for module in FILES if not any(within(module, room) for room in (*ENGINE_ROOMS, "server.demo"))
             for used in imports(module) if used.partition(".")[0] in HEAVY}
    assert not wrong


def test_files_stay_short():
    """A file is one concept that fits into a reader's head."""
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in FILES.items()}
    assert not {module: lines for module, lines in lengths.items() if lines > MAX_LINES and module not in DECLARATIONS}


def test_every_file_says_what_it_is():
    """Each module with any code has a docstring."""
    assert not [module for module, path in FILES.items()
                if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
