"""Runs inside the LMCache daemon (`--server-module`): answers what the daemon's own interface cannot.

rekindle.where    on which tiers each chunk of a token sequence is, without locking or loading anything
rekindle.delete   free a sequence's chunks on chosen tiers
rekindle.usage    bytes held by tier

It also lets the daemon's CPU context accept SGLang's pools, which come as [K layers] and [V layers]: stock 0.5.6 calls
data_ptr() on such a list.
"""

import json
import time
import uuid
from typing import Any

from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_object_keys
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

LOOKUP_TIMEOUT_S = 5.0
HOST, STORAGE, BOTH, NOWHERE = "h", "s", "b", "-"
"""One letter a chunk in the answer of `rekindle.where`."""


class _Half(list):
    """[K layers] or [V layers] of a split pool; answers the tensor questions that the CPU context asks."""

    def data_ptr(self) -> int:
        return self[0].data_ptr()

    def numel(self) -> int:
        return sum(t.numel() for t in self)

    def element_size(self) -> int:
        return self[0].element_size()

    @property
    def dtype(self) -> Any:
        return self[0].dtype


def _accept_split_pools() -> None:
    from lmcache.v1.platform.devices.cpu import cache_context

    stock = cache_context.normalize_and_discover_per_layer_formats

    def normalize(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        caches, formats = stock(*args, **kwargs)
        if isinstance(caches, (list, tuple)) and caches and isinstance(caches[0], (list, tuple)):
            caches = [_Half(half) for half in caches]
        return caches, formats

    cache_context.normalize_and_discover_per_layer_formats = normalize


def build_server_modules(ctx: Any) -> "RekindleModule":
    """The factory that `--server-module` names."""
    _accept_split_pools()
    return RekindleModule(ctx.server_context)


class RekindleModule:
    def __init__(self, context: Any) -> None:
        self._context = context
        self._incarnation = uuid.uuid4().hex

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict:
        return {}

    def close(self) -> None:
        """Nothing of its own to release."""

    def _keys(self, request: dict) -> tuple[list, int]:
        """(object keys, ranks per chunk) of the request's token sequence."""
        keys, chunks = resolve_object_keys(self._context.token_hasher, request["model"], request["world_size"],
                                           request["tokens"], request["salt"])
        return keys, (len(keys) // chunks if chunks else 1)

    def _on_storage(self, request: dict, keys: list) -> list[bool]:
        found = [False] * len(keys)
        layouts = self._context.layout_desc_registry.find_group_layout_descs(request["model"], request["world_size"])
        for _, adapter in self._context.storage_manager.l2_adapters():
            task = adapter.submit_lookup_and_lock_task(keys, layouts)
            deadline = time.monotonic() + LOOKUP_TIMEOUT_S
            while (bits := adapter.query_lookup_and_lock_result(task)) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError("the storage tier did not answer a lookup")
                time.sleep(0.0005)
            hits = [i for i in range(len(keys)) if bits.test(i)]
            for i in hits:
                found[i] = True
            adapter.submit_unlock([keys[i] for i in hits])
        return found

    @server_module_handler("rekindle.where")
    def where(self, payload: bytes) -> bytes:
        request = json.loads(payload)
        keys, ranks = self._keys(request)
        if not keys:
            return b'""'
        managers = list(self._context.storage_manager._l1_managers_by_id.values())
        host = [any(m.get_object_state(key) is not None for m in managers) for key in keys]
        storage = self._on_storage(request, keys)
        letters = []
        for i in range(0, len(keys), ranks):
            on_host, on_storage = all(host[i:i + ranks]), all(storage[i:i + ranks])
            letters.append({(1, 1): BOTH, (1, 0): HOST, (0, 1): STORAGE, (0, 0): NOWHERE}[on_host, on_storage])
        return json.dumps("".join(letters)).encode()

    @server_module_handler("rekindle.delete")
    def delete(self, payload: bytes) -> bytes:
        """request: chunks (indices), tiers. Answer: chunks freed by tier, and those refused because they are being read."""
        request = json.loads(payload)
        keys, ranks = self._keys(request)
        doomed = [key for i in request["chunks"] for key in keys[i * ranks:(i + 1) * ranks]]
        answer = {"host": 0, "storage": 0, "locked": 0}
        if doomed and "host" in request["tiers"]:
            deleted, locked = self._context.storage_manager.delete_l1_keys(doomed)
            answer["host"], answer["locked"] = deleted // ranks, locked // ranks
        if doomed and "storage" in request["tiers"]:
            there = self._on_storage(request, doomed)
            for _, adapter in self._context.storage_manager.l2_adapters():
                adapter.delete(doomed)
            answer["storage"] = sum(there) // ranks
        return json.dumps(answer).encode()

    @server_module_handler("rekindle.usage")
    def usage(self, payload: bytes) -> bytes:
        used, total = self._context.storage_manager.get_l1_usage()
        return json.dumps({"host_bytes": int(used), "host_total_bytes": int(total), "incarnation": self._incarnation}).encode()
