"""The real SGLang, token in and token out, with sessions in its radix cache. Lives in a worker process of ours only:
a dead scheduler takes its host process with it."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvstore.lmcache import daemon
from kvstore.receipt import Outcome, Receipt
from kvstore.sglang import compat, stubs
from kvstore.sglang.config import PluginConfig, publish
from kvstore.sglang.images import ImageRecords, VisionFiles

from .base import EngineStartError, Listener
from .channel import (
    Cached,
    Delta,
    Failed,
    Finished,
    Generate,
    HealthReport,
    Ledger,
    Progress,
    Ready,
    Report,
    Restore,
    Timings,
    TurnEvent,
    Usage,
    Verb,
)
from .config import EngineConfig
from .sglang_images import ImagePreparer, records

log = logging.getLogger("rekindle.engine")
WATCH_S = 0.25


class SGLangEngine:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._running: dict[str, str] = {}
        """turn id -> session id"""
        self._aborted: set[str] = set()
        self._engine: Any = None
        self._images: ImagePreparer | None = None
        self._watcher: asyncio.Task[None] | None = None

    # ---- life --------------------------------------------------------------------------------------------------
    async def start(self, listen: Listener) -> Ready:
        config = self._config
        try:
            compat.check_versions()
        except compat.Incompatible as error:
            raise EngineStartError(str(error)) from error
        publish(PluginConfig(fingerprint=config.fingerprint, vision_folder=config.vision_folder,
                             offload_url=config.offload_url, chunk_tokens=config.chunk_tokens, timeout_s=config.offload_timeout_s))
        os.environ |= daemon.environment()           # for LMCache's client side, in the processes spawned from here
        if config.device == "cpu":
            os.environ |= stubs.environment()
            stubs.install()
        listen(Progress(stage="engine", detail=f"loading SGLang with {config.model_path}"))
        await asyncio.sleep(0.05)                    # let it leave: the loop stands still while the model loads
        import sglang

        from kvstore.sglang import plugin

        from .sglang_pages import SGLangPages  # these import SGLang, so not before its stand-ins are in place

        arguments = self._arguments()
        try:
            # Blocks for as long as the model loads; signal handlers need the main thread, so there is no other place.
            self._engine = sglang.Engine(**arguments)
        except Exception as error:
            raise EngineStartError(f"SGLang did not start: {error!r}") from error
        self._manager = self._engine.tokenizer_manager
        listen(Progress(stage="engine", detail="proving that every hook applied"))
        hooks = await self._prove(plugin)
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        token_bytes = self._kv_token_bytes()
        self._pages = SGLangPages(self._manager.rekindle, config, token_bytes)
        self._images = ImagePreparer(self._manager, Path(config.image_folder), VisionFiles(Path(config.vision_folder)))
        await self._warm_up()
        self._listen = listen
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        capabilities = ("spill", "restore", "prefetch", "demote", "drop", "pin") if config.offload_url else ("drop", "pin")
        return Ready(engine="sglang", model=config.model_path, fingerprint=config.fingerprint, page_tokens=config.page_tokens,
                     token_bytes=token_bytes, device_tokens=info["max_total_num_tokens"], context_tokens=self._manager.context_len,
                     capabilities=capabilities + (("images",) if self._manager.mm_processor is not None else ()), hooks=hooks)

    def _arguments(self) -> dict[str, Any]:
        config = self._config
        arguments: dict[str, Any] = {
            "model_path": config.model_path, "device": config.device, "dtype": config.dtype, "log_level": config.log_level,
            "context_length": config.context_tokens, "page_size": config.page_tokens, "max_total_tokens": config.device_tokens,
            "max_running_requests": config.max_running_turns, "radix_cache_backend": "rekindle", "enable_cache_report": True,
            "skip_tokenizer_init": True, "sleep_on_idle": True, "random_seed": 0,
        }
        if config.device == "cpu":
            arguments |= {"attention_backend": "torch_native", "disable_cuda_graph": True}
        if config.device == "cpu" or config.offload_url is not None:
            # Copies are ordered behind the scheduler's own stream, on which the forward pass runs only without overlap. With it a
            # pass in flight could still write to a page that was freed, allocated to a restore and filled meanwhile.
            arguments["disable_overlap_schedule"] = True
        arguments |= config.extra_args
        if config.offload_url is not None and not arguments["disable_overlap_schedule"]:
            raise EngineStartError("offload needs disable_overlap_schedule: copies are not ordered behind an overlapped forward pass")
        return arguments

    async def _prove(self, plugin: Any) -> dict[str, str]:
        """Every hook in both processes, or EngineStartError."""
        front = compat.applied(plugin.targets("front"))
        try:
            hooks = compat.prove("front", front)
            channel = getattr(self._manager, "rekindle", None)
            if channel is None:
                raise compat.Incompatible("the command channel was not installed in the front process")
            await asyncio.wait_for(channel.call("probe"), 30)
            answer = await asyncio.wait_for(channel.call("probe"), 30)     # by now a whole step has passed, and its hook with it
            hooks |= compat.prove("scheduler", answer["applied"])
            if answer["cache"] != "SessionRadixCache" or answer["polls"] < 1:
                raise compat.Incompatible(f"the scheduler runs {answer['cache']} with {answer['polls']} polls")
        except TimeoutError as error:
            raise EngineStartError("the scheduler does not answer the command channel") from error
        except compat.Incompatible as error:
            raise EngineStartError(str(error)) from error
        return hooks

    def _kv_token_bytes(self) -> int:
        import torch

        model, args = self._manager.model_config, self._engine.server_args
        name = args.kv_cache_dtype
        dtype = model.dtype if name == "auto" else torch.uint8 if name.startswith("fp8") else getattr(torch, name)
        heads = model.get_num_kv_heads(args.tp_size) * args.tp_size
        return 2 * model.num_hidden_layers * heads * model.head_dim * dtype.itemsize

    async def _warm_up(self) -> None:
        """The first step compiles and allocates; not at the expense of the first user."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(input_ids=[1, 1], sampling_params={"max_new_tokens": 1, "temperature": 0}, stream=True)
        async for _ in self._manager.generate_request(request, None):
            pass

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._images is not None:
            self._images.close()
        if self._engine is not None:
            self._engine.shutdown()

    # ---- turns -------------------------------------------------------------------------------------------------
    async def generate(self, turn: Generate) -> AsyncIterator[TurnEvent]:
        began = time.monotonic()
        self._running[turn.turn_id] = turn.session_id
        try:
            try:
                await self._images.prepare(turn.content)
            except (OSError, ValueError) as error:
                yield Failed(turn_id=turn.turn_id, code="image_unusable", message=str(error), retryable=False)
                return
            restored = await self._restore_for(turn)
            restore_ms = 1e3 * (time.monotonic() - began)
            async for event in self._stream(turn, restored, began, restore_ms):
                yield event
        finally:
            if self._running.pop(turn.turn_id, None) is not None and turn.turn_id in self._manager.rid_to_state:
                self._manager.abort_request(turn.turn_id)    # the iterator was closed early
            self._aborted.discard(turn.turn_id)

    async def _restore_for(self, turn: Generate) -> Receipt | None:
        """Bring back what is below; a failure only means that more is computed."""
        if self._config.offload_url is None:
            return None
        verb = Restore(op_id=turn.turn_id, session_id=turn.session_id, generation=turn.generation, contents=(turn.content,))
        receipt = await self._pages.run(verb)
        return receipt if receipt.tokens or receipt.outcome in (Outcome.FAILED, Outcome.PARTIAL) else None

    async def _stream(self, turn: Generate, restored: Receipt | None, began: float, restore_ms: float) -> AsyncIterator[TurnEvent]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        content, sampling, sent, first_s, last = turn.content, turn.sampling, 0, 0.0, None
        parameters = {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
                      "stop_token_ids": list(sampling.stop_token_ids), "ignore_eos": sampling.ignore_eos}
        if sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed
        request = GenerateReqInput(
            input_ids=list(content.token_ids), sampling_params=parameters, stream=True, rid=turn.turn_id,
            session_id=turn.session_id, extra_key=content.salt or None,
            image_data=[ImageRecords(records(content))] if content.images else None)
        if turn.turn_id in self._aborted:
            yield self._finished(turn, "abort", {}, 0, restored, began, restore_ms, first_s)
            return
        meta: dict[str, Any] = {}
        try:
            async for chunk in self._manager.generate_request(request, None):
                meta, ids = chunk["meta_info"], chunk["output_ids"]
                if len(ids) > sent:
                    first_s = first_s or time.monotonic()
                    yield Delta(turn_id=turn.turn_id, token_ids=list(ids[sent:]))
                    sent, last = len(ids), ids[-1]
        except ValueError as error:
            code = "images_missing" if "images_missing" in str(error) else "engine_refused"
            yield Failed(turn_id=turn.turn_id, code=code, message=str(error), retryable=code == "images_missing")
            return
        reason = (meta.get("finish_reason") or {})
        kind = reason.get("type", "abort")
        if kind == "abort" and turn.turn_id not in self._aborted:
            yield Failed(turn_id=turn.turn_id, code="engine_refused", message=reason.get("message", "aborted"), retryable=False)
            return
        if kind == "length" and not sampling.ignore_eos and last in sampling.stop_token_ids:
            kind = "stop"                            # it ended where the limit was, but it did end
        yield self._finished(turn, kind, meta, sent, restored, began, restore_ms, first_s)

    def _finished(self, turn: Generate, reason: str, meta: dict, sent: int, restored: Receipt | None, began: float,
                  restore_ms: float, first_s: float) -> Finished:
        cached = int(meta.get("cached_tokens", 0))
        below = restored.source if restored is not None else {}
        host, storage = min(below.get("host", 0), cached), min(below.get("storage", 0), cached)
        usage = Usage(prompt_tokens=len(turn.content.token_ids), completion_tokens=sent,
                      cached=Cached(device=max(0, cached - host - storage), host=host, storage=storage))
        now = time.monotonic()
        ttft = 1e3 * (first_s - began) if first_s else 0.0
        timings = Timings(restore_ms=restore_ms if restored is not None else 0.0, prefill_ms=max(0.0, ttft - restore_ms),
                          ttft_ms=ttft, total_ms=1e3 * (now - began))
        return Finished(turn_id=turn.turn_id, reason=reason, usage=usage, timings=timings, receipt=restored)

    async def abort(self, turn_id: str) -> None:
        if turn_id in self._running:
            self._aborted.add(turn_id)
            self._manager.abort_request(turn_id)

    # ---- pages and health --------------------------------------------------------------------------------------
    async def run(self, verb: Verb) -> Receipt:
        if verb.session_id in self._running.values():
            return self._pages.receipt(verb, outcome=Outcome.REFUSED, reason="a turn is running")
        return await self._pages.run(verb)

    async def report(self, request: Report) -> Ledger:
        return await self._pages.report(request)

    async def health(self) -> HealthReport:
        _, pressure = await self._pages.pressure()
        return HealthReport(op_id="", running_turns=len(self._running), pressure=pressure)

    async def _watch(self) -> None:
        """Tell the server of changes: pressure whenever it differs, the ledger whenever its epoch does."""
        told, told_epoch = None, -1
        while True:
            epoch, pressure = await self._pages.pressure()
            if pressure != told:
                told = pressure
                self._listen(pressure)
            if epoch != told_epoch:
                ledger = await self._pages.report(Report(op_id=""))
                told_epoch = ledger.epoch            # it may be a step ahead of what we asked for
                self._listen(ledger)
            await asyncio.sleep(WATCH_S)
