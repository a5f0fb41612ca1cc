"""The command line: serve, check-config, and commands against a running server (REKINDLE_URL, REKINDLE_API_KEY)."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from pydantic import ValidationError

from . import settings as settings_module
from .client.errors import RekindleError
from .client.rest import Rest

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="A chat server that remembers: long conversations with pictures, their KV kept on GPU, memory and disk.")
sessions = typer.Typer(no_args_is_help=True, help="Sessions of a running server.")
budgets = typer.Typer(no_args_is_help=True, help="Limits of sessions of a running server.")
app.add_typer(sessions, name="sessions")
app.add_typer(budgets, name="budgets")

Config = Annotated[Path | None, typer.Option(help="A TOML file.", exists=True, dir_okay=False)]
SessionId = Annotated[str, typer.Argument(help="s_...", callback=lambda text: quote(text, safe=""))]
ADMIN_KEY_FILE = "admin.key"
CONFIG_ERROR = 2


def load(config: Path | None, **overrides: Any) -> settings_module.Settings:
    """Exits with a message that names the wrong key."""
    try:
        return settings_module.load(config, **overrides)
    except ValidationError as error:
        wrong = [f"  {'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors(include_input=False)]
        problem = "\n" + "\n".join(wrong)
    except (ValueError, OSError) as error:
        problem = str(error)
    typer.echo(f"the configuration is not valid: {problem}", err=True)
    raise typer.Exit(CONFIG_ERROR)


@app.command()
def serve(config: Config = None,
          model: Annotated[str | None, typer.Option(help="A folder or a hub name; `demo` is the bundled model.")] = None,
          host: Annotated[str | None, typer.Option()] = None,
          port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
          data: Annotated[Path | None, typer.Option(help="The folder that everything is kept in.")] = None) -> None:
    """Run the server until it is told to stop."""
    from .serving import run  # the web framework, which the other commands do not need

    overrides: dict[str, Any] = {"data": data} if data is not None else {}
    if model is not None:
        overrides["model"] = {"path": model}
    if network := {name: value for name, value in (("host", host), ("port", port)) if value is not None}:
        overrides["server"] = network
    raise typer.Exit(run(load(config, **overrides), ADMIN_KEY_FILE))


@app.command("check-config")
def check_config(config: Config = None) -> None:
    """Print the settings in force, or what is wrong with them."""
    typer.echo(load(config).model_dump_json(indent=2))


# ---- commands against a running server -------------------------------------------------------------------------
def call(method: str, path: str, body: Any = None) -> Any:
    """Exits with the server's refusal."""
    url = os.environ.get("REKINDLE_URL", "http://127.0.0.1:8080")
    try:
        return Rest(url, _key()).call(method, path, body)
    except (RekindleError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _key() -> str | None:
    """The given key, else the one that the server's first start left in the data folder."""
    if key := os.environ.get("REKINDLE_API_KEY"):
        return key
    file = Path(os.environ.get("REKINDLE_DATA", "data")) / ADMIN_KEY_FILE
    return file.read_text().strip() if file.exists() else None


def show(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


@sessions.command("ls")
def list_sessions(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Those used last, first."""
    found = call("GET", "/v1/sessions?limit=500")["data"]
    if as_json:
        show(found)
        return
    for s in found:
        kv = s["kv"]
        typer.echo(f"{s['id']}  {kv['state']:<9} {s['used']['turns']:>4} turns {s['used']['tokens']:>7} tokens   "
                   f"device {kv['bytes']['device']:>11}  host {kv['bytes']['host']:>11}  storage {kv['bytes']['storage']:>11}   {s['title']}")


@sessions.command("show")
def show_session(session_id: SessionId) -> None:
    show(call("GET", f"/v1/sessions/{session_id}") | {"kv": call("GET", f"/v1/sessions/{session_id}/kv")})


@sessions.command()
def spill(session_id: SessionId, to: Annotated[str, typer.Option(help="host or storage")] = "host") -> None:
    """Free its device pages; its next turn brings them back."""
    show(call("POST", f"/v1/sessions/{session_id}/spill", {"to": to}))


@sessions.command()
def restore(session_id: SessionId) -> None:
    """Bring its pages back to the device."""
    show(call("POST", f"/v1/sessions/{session_id}/restore"))


@sessions.command()
def pin(session_id: SessionId, seconds: Annotated[float, typer.Option(help="0 unpins.")] = 3600) -> None:
    """Keep its pages on the device for a while."""
    show(call("POST", f"/v1/sessions/{session_id}/pin", {"seconds": seconds}))


@sessions.command("rm")
def remove(session_id: SessionId) -> None:
    """Delete it, transcript and pages, for good."""
    call("DELETE", f"/v1/sessions/{session_id}")
    typer.echo(f"{session_id} is deleted")


@budgets.command("show")
def show_budget(session_id: SessionId) -> None:
    session = call("GET", f"/v1/sessions/{session_id}")
    show({"limits": session["limits"], "used": session["used"], "kv_bytes": session["kv"]["bytes"]})


@budgets.command("set")
def set_budget(session_id: SessionId, limits: Annotated[list[str], typer.Argument(help="max_turns=50 host_bytes=none ...")]) -> None:
    """Set limits of a session (none: back to the server's default)."""
    try:
        changes = {name: None if value == "none" else int(value) for name, value in (pair.split("=", 1) for pair in limits)}
    except ValueError:
        raise typer.BadParameter("limits look like max_turns=50 or host_bytes=none") from None
    show(call("PATCH", f"/v1/sessions/{session_id}/limits", changes)["limits"])


if importlib.util.find_spec("server.bench"):
    from .bench import bench

    app.command()(bench)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
