"""The engine's side of the LMCache daemon: every call answers a future, nothing blocks the scheduler.

Why not LMCache's own SGLang connector: it waits in the scheduler thread (up to 300 s for a dead daemon), knows no
salt, takes the model's path for its key (so a changed model would find old KV), and forgets its registration when the
daemon restarts.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import zmq
from lmcache import torch_dev
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.platform.base.event_ipc import get_event_ipc_backend
from lmcache.v1.platform.kv_wrap import wrap_one_kv_cache

log = logging.getLogger("rekindle.offload")


class OffloadError(RuntimeError):
    """The daemon refused or failed a call."""


class OffloadClient:
    """One engine rank's connection.

    k_pool, v_pool: per-layer tensors [slots, kv_heads, head_dim] on one device. They are wrapped here, at once (on a CPU
    that moves them into shared memory, so it must happen before anything is written to them); the daemon is
    registered with by the heartbeat thread, so that neither start nor recovery waits for it. It lives as long as its process;
    the daemon forgets the pools of an engine that is silent for two minutes.

    `healthy` is True while the daemon answers and knows our pools. Futures have query() and result(timeout).
    """

    def __init__(self, *, url: str, fingerprint: str, page_tokens: int, chunk_tokens: int, world_size: int, rank: int,
                 k_pool: Sequence[torch.Tensor], v_pool: Sequence[torch.Tensor], timeout_s: float, heartbeat_s: float) -> None:
        if chunk_tokens % page_tokens:
            raise ValueError(f"a chunk of {chunk_tokens} tokens is not a multiple of the page of {page_tokens}")
        self.fingerprint, self.page_tokens, self.chunk_tokens = fingerprint, page_tokens, chunk_tokens
        self.world_size, self.rank, self.timeout_s = world_size, rank, timeout_s
        self.device = k_pool[0].device
        self._instance_id = os.getpid()
        self._events = get_event_ipc_backend(self.device)
        self._events.check_event_support(self.device)
        self._pools = [wrap_one_kv_cache(t) for t in (*k_pool, *v_pool)]
        self._rpc = RequestClientFactory.create(url, context=zmq.Context.instance())
        self.incarnation = ""
        """Of the daemon we are registered with; another one has never heard of our transfers."""
        self.host_bytes = 0
        """Held in host memory by the daemon, as of the last heartbeat."""
        self._known = threading.Event()
        self._heartbeat_s = heartbeat_s
        self._thread = threading.Thread(target=self._heartbeat, name="offload-heartbeat", daemon=True)
        self._thread.start()

    # ---- health ------------------------------------------------------------------------------------------------
    @property
    def healthy(self) -> bool:
        return self._known.is_set()

    def suspect(self, why: object) -> None:
        """A call failed: stop using the daemon until the heartbeat has registered with it again."""
        if self._known.is_set():
            log.warning("the LMCache daemon is not used until it answers again: %s", why)
        self._known.clear()

    def _heartbeat(self) -> None:
        while True:
            try:
                if self._known.is_set():
                    self._rpc.ping(self._instance_id).result(timeout=self.timeout_s)
                    usage = self.call("rekindle.usage").result(timeout=self.timeout_s)
                    if usage["incarnation"] != self.incarnation:
                        raise OffloadError("it is another daemon now")
                    self.host_bytes = usage["host_bytes"]
                else:
                    self._register()
                    self._known.set()
                    log.info("registered with the LMCache daemon")
            except Exception as error:  # noqa: BLE001  whatever the transport raises means: not now
                self.suspect(repr(error))
            time.sleep(self._heartbeat_s if self._known.is_set() else min(1.0, self._heartbeat_s))

    def _register(self) -> None:
        chunk = self._rpc.get_chunk_size().result(timeout=self.timeout_s)
        if chunk != self.chunk_tokens:
            raise OffloadError(f"the daemon's chunk is {chunk} tokens, ours {self.chunk_tokens}")
        hints = {"tokens_per_block": self.page_tokens, "kv_list_layout": "k_v"}
        self._rpc.register_kv_cache(self._instance_id, self._pools, self.fingerprint, self.world_size,
                                    EngineType.SGLANG, hints, []).result(timeout=self.timeout_s)
        self.incarnation = self.call("rekindle.usage").result(timeout=self.timeout_s)["incarnation"]

    # ---- calls -------------------------------------------------------------------------------------------------
    def key(self, tokens: Sequence[int], start: int, end: int, request_id: str, salt: str, *, any_rank: bool = False) -> IPCCacheServerKey:
        """Names the chunks of tokens[start:end); both are multiples of the chunk. Hashes run from token 0."""
        return IPCCacheServerKey(model_name=self.fingerprint, world_size=self.world_size, num_kv_readers=1,
                                 worker_id=None if any_rank else self.rank, token_ids=tuple(tokens), start=start, end=end,
                                 request_id=request_id, cache_salt=salt)

    def call(self, method: str, **request: Any) -> "JsonFuture":
        """A call of our own module in the daemon (module.py)."""
        payload = {"model": self.fingerprint, "world_size": self.world_size, **request}
        return JsonFuture(self._rpc.server_module_call(ServerModuleCallRequest(method=method, payload=json.dumps(payload).encode())))

    def where(self, tokens: Sequence[int], salt: str) -> "JsonFuture":
        """Future of one letter a whole chunk: h(ost), s(torage), b(oth), - (module.py)."""
        return self.call("rekindle.where", tokens=list(tokens), salt=salt)

    def delete(self, tokens: Sequence[int], salt: str, chunks: Sequence[int], tiers: Sequence[str]) -> "JsonFuture":
        return self.call("rekindle.delete", tokens=list(tokens), salt=salt, chunks=list(chunks), tiers=list(tiers))

    def lookup(self, tokens: Sequence[int], end: int, request_id: str, salt: str) -> Any:
        """Starts loading tokens[:end) from storage to host, with read locks; poll `loaded`, then retrieve or unlock."""
        return self._rpc.lookup(self.key(tokens, 0, end, request_id, salt, any_rank=True), self.world_size)

    def loaded(self, request_id: str) -> Any:
        """Future of the number of chunks found and locked on the host, or of None while it is loading."""
        return self._rpc.query_prefetch_status(request_id)

    def unlock(self, tokens: Sequence[int], start: int, end: int, request_id: str, salt: str) -> None:
        """Releases read locks of a lookup that nothing will retrieve. Nothing to wait for."""
        if start < end and self.healthy:
            self._rpc.free_lookup_locks(self.key(tokens, start, end, request_id, salt, any_rank=True), self.world_size)

    def retrieve(self, tokens: Sequence[int], start: int, end: int, pages: Sequence[int], skip_tokens: int, request_id: str, salt: str) -> Any:
        """Host -> device, into `pages` (one id a page of [start, end)), the first skip_tokens left untouched. Future of bool.

        Consumes the lookup's locks of that range. The pages must stay ours until the future is done: a daemon that
        does not answer may still write to them.
        """
        event, handle = self._event()
        raw = self._rpc.retrieve(self.key(tokens, start, end, request_id, salt), self._instance_id, [list(pages)], handle, skip_tokens)
        return self._device_future(raw, event)

    def store(self, tokens: Sequence[int], start: int, end: int, pages: Sequence[int], request_id: str, salt: str) -> Any:
        """Device -> host (and on to storage, in the daemon). Future of bool; the pages must not change until then."""
        event, handle = self._event()
        raw = self._rpc.store(self.key(tokens, start, end, request_id, salt), self._instance_id, [list(pages)], handle)
        return self._device_future(raw, event)

    def end(self, request_id: str) -> None:
        """The request is over: the daemon may forget it."""
        if self.healthy:
            self._rpc.end_session(request_id)

    def _event(self) -> tuple[Any, bytes]:
        # Orders the daemon's copy behind what the current stream has written so far.
        event = self._events.create_event(self.device)
        self._events.record_event(event, torch_dev.current_stream())
        return event, self._events.export_event(event, self.device)

    def _device_future(self, raw: Any, event: Any) -> Any:
        raw.retain_reference(event)                  # the exported event must outlive the request
        return raw.to_device_future(device=self.device, event_backend=self._events)


class JsonFuture:
    """The JSON answer of our module. result() raises OffloadError when the handler failed."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def query(self) -> bool:
        return self._raw.query()

    def result(self, timeout: float | None = None) -> Any:
        answer = self._raw.result(timeout=timeout)
        if not answer.success:
            raise OffloadError(answer.error)
        return json.loads(answer.payload)
