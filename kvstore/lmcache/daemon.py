"""How the LMCache daemon is started: `lmcache server` with a host tier (its L1) and a storage tier (its L2, files)."""

import json
from pathlib import Path


def command(*, python: str, port: int, http_port: int, chunk_tokens: int, host_gb: float, storage_path: Path,
            storage_gb: float, session_ttl_s: float = 600) -> list[str]:
    """The argument vector of the daemon. Both ports are on loopback: the daemon has no authentication.

    storage_gb is enforced by `sweep.sweep_storage`, because the `fs` adapter never evicts (and `fs_native`, which does,
    forgets what is on the disk when it restarts).
    """
    # --l1-init-size-gb must be a whole number; lazily grown, so that a small host tier stays small.
    return [
        python, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http_port),
        "--chunk-size", str(chunk_tokens),
        "--l1-size-gb", f"{host_gb:g}", "--l1-init-size-gb", str(max(1, int(host_gb))),
        "--eviction-policy", "LRU",
        "--l2-adapter", json.dumps({"type": "fs", "base_path": str(storage_path), "relative_tmp_dir": "tmp"}),
        # What a restore loads from storage stays in host memory too: the next restore is quicker.
        "--l2-prefetch-policy", "retain",
        "--session-ttl-seconds", f"{session_ttl_s:g}",
        "--server-module", json.dumps({"module_path": "kvstore.lmcache.module"}),
    ]


def environment() -> dict[str, str]:
    """What the daemon's environment needs besides ours."""
    return {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_DISABLE_BANNER": "1"}
