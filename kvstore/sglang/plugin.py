"""The out-of-tree plugin (entry point group `sglang.srt.plugins`): every place where we hook into SGLang, as one table."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .config import PluginConfig, current

BACKEND = "rekindle"
"""The name for --radix-cache-backend."""
POLL_S = 0.0005


class Hook(NamedTuple):
    target: str
    kind: str
    function: Callable[..., Any]
    process: str
    """front or scheduler: where it must have applied."""


# ---- front process ---------------------------------------------------------------------------------------------
def _front_channel(result: Any, manager: Any, server_args: Any) -> None:
    from sglang.utils import TypeBasedDispatcher

    from .control import FrontChannel
    from .messages import ControlAnswer

    manager.rekindle = FrontChannel(manager)
    manager._result_dispatcher += TypeBasedDispatcher([(ControlAnswer, manager.rekindle.receive)])


async def _process_images(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    from .images import ImageRecords, processor_output

    image_data = kwargs.get("image_data")
    if image_data and isinstance(image_data[0], ImageRecords):
        return processor_output(processor, image_data[0], kwargs["request_obj"].input_ids)
    return await original(processor, *args, **kwargs)


# ---- scheduler process -----------------------------------------------------------------------------------------
def _scheduler_channel(result: Any, scheduler: Any) -> None:
    from sglang.utils import TypeBasedDispatcher

    from .control import SchedulerControl
    from .messages import ControlRequest

    control = SchedulerControl(scheduler, scheduler.tree_cache.ops, targets("scheduler"))
    scheduler._request_dispatcher += TypeBasedDispatcher([(ControlRequest, control.handle)])


def _step(original: Callable[..., Any], scheduler: Any, requests: list) -> Any:
    """Once per scheduler step, in the scheduler thread."""
    result = original(scheduler, requests)
    ops = scheduler.tree_cache.ops
    ops.poll()
    running = scheduler.running_batch
    if running.batch_is_full and running.is_empty():
        # Stock 0.5.17 sets it when a waiting turn finds no room and clears it only when a running one ends. Room that an
        # operation of ours gives back with nothing running would never be noticed, and every waiting turn wait for ever.
        running.batch_is_full = False
    if ops.busy and not scheduler.waiting_queue and running.is_empty():
        time.sleep(POLL_S)                           # nothing to compute: the daemon needs the core more than our polling does
    return result


def _idle(result: bool, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Pages of an operation under way are in no tree and no request: neither a leak, nor the time to sleep."""
    return result and not scheduler.tree_cache.ops.busy


def _attach_images(result: Any, scheduler: Any, request: Any) -> None:
    """At admission: an image that is nowhere ends the request with an error, not the engine."""
    from .images import ImagesMissing, VisionFiles, attach

    if request.multimodal_inputs is not None:
        try:
            attach(request.multimodal_inputs.mm_items, VisionFiles(Path(_config().vision_folder)))
        except ImagesMissing as missing:
            request.set_finish_with_abort(f"images_missing:{missing}")


def build_cache(context: Any) -> Any:
    """The factory behind --radix-cache-backend."""
    from kvstore.lmcache.client import OffloadClient

    from .cache import SessionRadixCache
    from .ops import SessionOps

    config, client = _config(), None
    cache = SessionRadixCache(context.params)
    if config.offload_url is not None:
        if context.tp_size != 1:
            raise NotImplementedError(f"offload is proved for one rank; tensor parallel size is {context.tp_size}")
        pool = cache.token_to_kv_pool_allocator.get_kvcache()
        client = OffloadClient(url=config.offload_url, fingerprint=config.fingerprint, page_tokens=cache.page_size,
                               chunk_tokens=config.chunk_tokens, world_size=context.tp_size, rank=context.tp_rank,
                               k_pool=pool.k_buffer, v_pool=pool.v_buffer, timeout_s=config.timeout_s,
                               heartbeat_s=config.heartbeat_s)
    cache.ops = SessionOps(cache, client, config.timeout_s)
    return cache


def _config() -> PluginConfig:
    config = current()
    if config is None:
        raise RuntimeError("this process was not started by Rekindle's worker")
    return config


# ---- the table -------------------------------------------------------------------------------------------------
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators", "AFTER", _front_channel, "front"),
    Hook("sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor.process_mm_data_async", "AROUND", _process_images, "front"),
    Hook(f"{_SCHEDULER}.init_request_dispatcher", "AFTER", _scheduler_channel, "scheduler"),
    Hook(f"{_SCHEDULER}.process_input_requests", "AROUND", _step, "scheduler"),
    Hook(f"{_SCHEDULER}.is_fully_idle", "AFTER", _idle, "scheduler"),
    Hook(f"{_SCHEDULER}._maybe_compute_mrope_positions", "AFTER", _attach_images, "scheduler"),
)


def targets(process: str) -> tuple[str, ...]:
    return tuple(hook.target for hook in HOOKS if hook.process == process)


def register() -> None:
    """Called by SGLang in each of its processes. Does nothing in those that Rekindle did not start."""
    if current() is None:
        return
    from sglang.srt.managers.io_struct import hook_custom_types
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .messages import ControlAnswer, ControlRequest

    hook_custom_types(ControlRequest, ControlAnswer)
    register_radix_cache_backend(BACKEND, build_cache)
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from . import cpu

        cpu.install()
