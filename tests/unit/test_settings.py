"""Settings: one tree from defaults, TOML, environment and command line, in that order; what is unknown is refused."""

import os
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from server.settings import Settings, environment, load

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """The tester's own environment does not count."""
    for name in [n for n in os.environ if n.startswith("REKINDLE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "c.toml"
        path.write_text(text, encoding="utf-8")
        return path
    return write


def test_later_sources_win_and_leave_the_rest(toml, monkeypatch):
    """File over defaults, environment over file, command line over both; neighbours in the same section stay."""
    path = toml("[server]\nport = 1\nhost = 'a'\ngrace_s = 3\n")
    assert load(path).server.port == 1 and load().server.port == 8080
    monkeypatch.setenv("REKINDLE_SERVER__PORT", "2")
    monkeypatch.setenv("REKINDLE_SERVER__HOST", "b")
    settings = load(path, server={"port": 3})
    assert (settings.server.port, settings.server.host, settings.server.grace_s, settings.server.heartbeat_s) == (3, "b", 3, 20)
    assert load(path).server.port == 2


def test_the_data_folder_has_its_own_variable(monkeypatch, toml):
    """REKINDLE_DATA moves everything the server writes; --data wins over it."""
    assert load().data == Path("data")
    monkeypatch.setenv("REKINDLE_DATA", "/srv/x")
    assert load(toml("data = 'y'")).data == Path("/srv/x")
    assert load(data=Path("/z")).data == Path("/z")


def test_a_tree_built_in_code_ignores_the_environment(monkeypatch):
    """Settings(...) is what it is given, so tests and embedders are not surprised."""
    monkeypatch.setenv("REKINDLE_SERVER__PORT", "2")
    assert Settings().server.port == 8080 and Settings(server={"port": 7}).server.port == 7


@pytest.mark.parametrize(("text", "key"), [
    ("prot = 1", "prot"), ("[server]\nprot = 1", "server.prot"), ("[servre]\nport = 1", "servre"), ("[limits]\nturns = 1", "limits.turns")])
def test_an_unknown_key_is_refused_by_its_name(toml, text, key):
    """A misspelled key never silently does nothing."""
    with pytest.raises(ValueError, match=rf"(?m)^{key}$"):
        load(toml(text))


@pytest.mark.parametrize(("name", "says"), [("REKINDLE_SERVER__PROT", "server.prot"), ("REKINDLE_SERVRE__PORT", "REKINDLE_SERVRE__PORT")])
def test_an_unknown_variable_is_refused_by_its_name(monkeypatch, name, says):
    """Also in the environment, where it names a section."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=says):
        load()


def test_variables_of_others_are_left_alone(monkeypatch):
    """REKINDLE_URL and the like belong to other programs."""
    monkeypatch.setenv("REKINDLE_URL", "http://x")
    assert load() == Settings()


@pytest.mark.parametrize("overrides", [{"server": {"prot": 1}}, {"serve": {}}, {"server": {"port": 70000}}, {"server": {"port": "x"}},
                                       {"engine": {"kind": "other"}}, {"limits": {"max_turns": 0}}, {"pressure": {"low": 0.95}},
                                       {"offload": {"chunk_tokens": 24}}, {"server": {"port": None}}, {"model": {"path": None}}])
def test_wrong_overrides_are_refused(overrides):
    """Keys, types, ranges and values that do not fit each other."""
    with pytest.raises(ValueError, match=next(iter(overrides))):
        load(**overrides)


def test_none_can_be_said_everywhere(toml, monkeypatch):
    """"none" lifts a ceiling in TOML and environment, None on the command line; where None means nothing it is refused."""
    assert load(toml("[limits]\nmax_turns = 'none'\n[idle]\nto_host_s = 'none'")).idle.to_host_s is None
    monkeypatch.setenv("REKINDLE_LIMITS__MAX_TURNS", "none")
    assert load().limits.max_turns is None
    assert load(limits={"max_turns": 5}).limits.max_turns == 5
    assert load(limits={"max_turns": None}).limits.max_turns is None
    monkeypatch.setenv("REKINDLE_SERVER__PORT", "none")
    with pytest.raises(ValueError, match=r"server\.port"):
        load()


def test_lists_and_tables_in_the_environment_are_json(monkeypatch):
    """Origins and further engine arguments can be set there too."""
    monkeypatch.setenv("REKINDLE_SERVER__ALLOWED_ORIGINS", '["https://a.example"]')
    monkeypatch.setenv("REKINDLE_ENGINE__EXTRA_ARGS", '{"tp_size": 2}')
    settings = load()
    assert settings.server.allowed_origins == ("https://a.example",) and settings.engine.extra_args == {"tp_size": 2}


def test_the_tree_cannot_be_changed():
    """Frozen at every level."""
    settings = load()
    with pytest.raises(ValidationError):
        settings.data = Path("x")
    with pytest.raises(ValidationError):
        settings.server.port = 1


def test_a_file_that_is_no_toml_or_not_there_says_which(toml, tmp_path):
    """The message names the file."""
    with pytest.raises(ValueError, match=r"c\.toml"):
        load(toml("[server"))
    with pytest.raises(OSError, match=r"nope\.toml"):
        load(tmp_path / "nope.toml")


def test_children_do_not_get_secrets(monkeypatch):
    """The environment for child processes lacks REKINDLE_SECRET..., and only that."""
    monkeypatch.setenv("REKINDLE_SECRET_X", "s")
    monkeypatch.setenv("REKINDLE_DATA", "d")
    assert "REKINDLE_SECRET_X" not in environment() and environment()["REKINDLE_DATA"] == "d"


def test_the_shipped_default_is_the_default_spelled_out():
    """configs/cpu-demo.toml names every setting and changes none."""
    path = CONFIGS / "cpu-demo.toml"
    assert load(path) == Settings()
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, field in Settings.model_fields.items():
        if name != "data":
            assert set(tree[name]) == set(field.annotation.model_fields), name


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_profile_is_valid(path):
    """Each file in configs/ loads."""
    assert load(path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_profile_is_valid(path: Path) -> None:
    """Each file in configs/ is accepted, and copies go in whole pages."""
    settings = load(path)
    assert settings.offload.chunk_tokens % settings.engine.page_tokens == 0
