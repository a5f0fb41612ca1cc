"""All settings: one frozen typed tree, from TOML and the environment, parsed once. Unknown keys are refused.

Order, later wins: defaults here, the TOML file (`--config`), `REKINDLE_...` variables (`REKINDLE_DATA=/var/lib/rekindle`,
`REKINDLE_SERVER__PORT=9000`), options of the command line. Where None is allowed, TOML and the environment say "none".
"""

import os
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

PREFIX, DELIMITER = "REKINDLE_", "__"

Bytes = int
Tokens = int


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _none(cls, tree: Any) -> Any:
        """TOML has no null."""
        if not isinstance(tree, dict):
            return tree
        return {key: None if value == "none" and _allows_none(cls, key) else value for key, value in tree.items()}


def _allows_none(part: type[BaseModel], key: str) -> bool:
    field = part.model_fields.get(key)
    return field is not None and type(None) in get_args(field.annotation)


class ServerSettings(Part):
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    """0 takes a free one and prints it."""
    allowed_origins: tuple[str, ...] = ()
    """Besides the server's own. Scheme, host and port are compared whole."""
    frame_bytes: Bytes = Field(default=16 << 20, ge=1024)
    heartbeat_s: float = Field(default=20, gt=0)
    grace_s: float = Field(default=10, ge=0)
    """How long a turn outlives its last watching socket."""
    replay_events: int = Field(default=4096, ge=1)
    """Events kept per session for a lossless resume."""
    waiting_sockets: int = Field(default=256, ge=1)
    """Sockets that have not signed in yet, in all; one more is refused until one has signed in or gone."""
    waiting_sockets_per_address: int = Field(default=32, ge=1)
    """The same from one address. Behind a proxy that does not tell its clients' addresses, that is everybody."""
    outbox_events: int = Field(default=1024, ge=1)
    """Events buffered for one socket; a reader that stays behind is detached and resumes by seq."""


class ModelSettings(Part):
    path: str = "demo"
    """A folder or a hub name; `demo` is the bundled model."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    revision: str | None = None


class EngineSettings(Part):
    kind: Literal["sglang", "scripted"] = "sglang"
    device: Literal["cpu", "cuda"] = "cpu"
    context_tokens: Tokens = Field(default=8192, ge=64)
    device_tokens: Tokens | None = Field(default=16384, ge=64)
    """Size of the device pool; None lets the engine take what its memory fraction gives."""
    page_tokens: Tokens = Field(default=16, ge=1)
    max_running_turns: int = Field(default=4, ge=1)
    start_timeout_s: float = Field(default=600, gt=0)
    extra_args: dict[str, Any] = {}
    """Further SGLang server arguments, by their names there."""


class OffloadSettings(Part):
    """The LMCache daemon: host and storage tiers."""

    enabled: bool = True
    chunk_tokens: Tokens = Field(default=16, ge=1)
    """LMCache's unit, a multiple of the page. What is beyond the last whole chunk is recomputed after a spill."""
    host_gb: float = Field(default=1.0, gt=0)
    storage_gb: float = Field(default=8.0, gt=0)
    timeout_s: float = Field(default=3.0, gt=0)
    """The longest that one call to the daemon may take before it counts as gone."""


class IdleSettings(Part):
    """A session without a running turn is spilled after these times since its last token; None: never."""

    to_host_s: float | None = Field(default=120, gt=0)
    to_storage_s: float | None = Field(default=900, gt=0)
    check_s: float = Field(default=1.0, gt=0)


class PressureSettings(Part):
    """Share of the device pool in use at which idle sessions are spilled, and down to which."""

    high: float = Field(default=0.90, gt=0, le=1)
    low: float = Field(default=0.75, gt=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> "PressureSettings":
        if self.low > self.high:
            raise ValueError(f"pressure.low is {self.low}, above pressure.high, {self.high}")
        return self


class LimitSettings(Part):
    """Server-wide defaults; a session may ask for less, an admin may set anything. None: no ceiling."""

    max_turns: int | None = Field(default=200, ge=1)
    tokens_per_session: Tokens | None = Field(default=None, ge=1)
    tokens_per_turn: Tokens | None = Field(default=None, ge=1)
    images_per_message: int | None = Field(default=8, ge=0)
    device_bytes: Bytes | None = Field(default=None, ge=1)
    host_bytes: Bytes | None = Field(default=None, ge=1)
    storage_bytes: Bytes | None = Field(default=None, ge=1)
    default_output_tokens: Tokens = Field(default=256, ge=1)
    """Where a turn does not say max_output_tokens."""


class ImageSettings(Part):
    max_bytes: Bytes = Field(default=12 << 20, ge=1)
    max_pixels: int = Field(default=50_000_000, ge=1)
    workers: int = Field(default=2, ge=1)
    """Images decoded at once."""
    decoding_bytes: Bytes = Field(default=256 << 20, ge=1 << 20)
    """Decoded bytes in flight, at 4 a pixel; what does not fit waits."""
    max_waiting: int = Field(default=64, ge=0)
    """Images that may wait to be decoded; one more is told busy."""


class LogSettings(Part):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    """auto: console for a person at a terminal, else json."""


class Settings(BaseSettings):
    """`Settings(...)` takes exactly what it is given; `load` reads file and environment."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    data: Path = Path("data")
    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    offload: OffloadSettings = OffloadSettings()
    idle: IdleSettings = IdleSettings()
    pressure: PressureSettings = PressureSettings()
    limits: LimitSettings = LimitSettings()
    images: ImageSettings = ImageSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _fitting(self) -> "Settings":
        if self.offload.chunk_tokens % self.engine.page_tokens:
            raise ValueError(f"offload.chunk_tokens is {self.offload.chunk_tokens}, no multiple of engine.page_tokens, {self.engine.page_tokens}")
        return self

    @classmethod
    def settings_customise_sources(cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
                                   *_: Any, **__: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def load(config: Path | None = None, **overrides: Any) -> Settings:
    """Read the TOML file, lay environment and overrides over it. Raises ValueError (pydantic's, naming the key) or OSError.

    `overrides` are nested dicts of the command line and win over everything.
    """
    tree: dict[str, Any] = {}
    if config:
        try:
            tree = tomllib.loads(config.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{config}: {error}") from error
    return Settings(**_merge(_merge(tree, _environment()), overrides))


def _environment() -> dict[str, Any]:
    """The variables of the tree. Those without a section may be somebody else's (REKINDLE_URL is the client's); one that names
    a section which is not there is a mistake and raises ValueError."""
    for name in os.environ:
        section = name.removeprefix(PREFIX).partition(DELIMITER)[0].lower()
        if name.startswith(PREFIX) and DELIMITER in name and section not in Settings.model_fields:
            raise ValueError(f"{name}: there is no section {section}")
    return EnvSettingsSource(Settings, env_prefix=PREFIX, env_nested_delimiter=DELIMITER)()


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        out[key] = _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def environment() -> dict[str, str]:
    """The environment that child processes get: ours, without secrets of ours."""
    return {k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_SECRET")}
