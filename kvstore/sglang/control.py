"""The typed command channel between the front process and the scheduler: many commands in flight, each with an id.

(SGLang's own FanOutCommunicator allows one at a time; a restore of a second must not hold up the others.)
"""

import asyncio
import os
import uuid
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from .compat import applied
from .messages import ControlAnswer, ControlRequest
from .ops import Branch, SessionOps
from .tasks import Operation


class ControlError(RuntimeError):
    """The scheduler could not do it; the message says why."""


class FrontChannel:
    """In the front process, one per tokenizer manager."""

    def __init__(self, tokenizer_manager: Any) -> None:
        self._manager = tokenizer_manager
        self._waiting: dict[str, asyncio.Future[ControlAnswer]] = {}

    async def call(self, verb: str, owner: str | None = None, sequences: Sequence[Branch] = (), **args: Any) -> dict[str, Any]:
        """The answer's data. Raises ControlError; a scheduler that dies takes this process with it."""
        self._manager.auto_create_handle_loop()      # without it the answer would never be read
        op_id = uuid.uuid4().hex
        future = asyncio.get_running_loop().create_future()
        self._waiting[op_id] = future
        wire = [{"tokens": s.tokens.tobytes(), "salt": s.salt, "private_from": s.private_from} for s in sequences]
        try:
            self._manager._dispatch_to_scheduler(ControlRequest(op_id=op_id, verb=verb, owner=owner, sequences=wire, args=args))
            answer = await future
        finally:
            self._waiting.pop(op_id, None)
        if not answer.ok:
            raise ControlError(answer.data["error"])
        return answer.data

    def receive(self, answer: ControlAnswer) -> None:
        future = self._waiting.get(answer.op_id)
        if future is not None and not future.done():
            future.set_result(answer)


class SchedulerControl:
    """In the scheduler: starts operations, answers when they are over."""

    def __init__(self, scheduler: Any, ops: SessionOps, hooks: Sequence[str]) -> None:
        self._scheduler, self._ops, self._hooks = scheduler, ops, hooks

    def handle(self, request: ControlRequest) -> ControlAnswer | None:
        """The dispatcher's handler; an answer now, or None and later."""
        immediate: dict[str, Callable[[], dict[str, Any]]] = {"probe": self._probe, "pressure": self._pressure}
        if request.verb in immediate:
            return ControlAnswer(op_id=request.op_id, ok=True, data=immediate[request.verb]())

        def done(result: Any, error: BaseException | None) -> None:
            data = result if error is None else {"error": str(error) or repr(error)}
            answer = ControlAnswer(op_id=request.op_id, ok=error is None, data=data)
            self._scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)

        try:
            operation = self._operation(request)
        except (KeyError, TypeError, ValueError) as error:
            return ControlAnswer(op_id=request.op_id, ok=False, data={"error": f"{request.verb}: {error!r}"})
        self._ops.tasks.start(operation, done)
        return None

    def _operation(self, request: ControlRequest) -> Operation:
        branches = [Branch(_tokens(s["tokens"]), s["salt"], s["private_from"]) for s in request.sequences]
        match request.verb:
            case "restore":
                return self._ops.restore(request.owner, branches)
            case "spill":
                return self._ops.spill(request.owner, branches, request.args["to"])
            case "demote":
                return self._ops.demote(request.owner, branches)
            case "drop":
                return self._ops.drop(request.owner, branches)
            case "pin":
                return self._ops.pin(request.owner, branches, request.args["until"])
            case "report":
                return self._ops.report(request.owner, branches)
            case other:
                raise ValueError(f"unknown verb {other}")

    def _probe(self) -> dict[str, Any]:
        """Proof that we really run here: what was patched, and that the step hook has polled."""
        return {"pid": os.getpid(), "cache": type(self._scheduler.tree_cache).__name__,
                "applied": applied(self._hooks), "polls": self._ops.tasks.polls}

    def _pressure(self) -> dict[str, Any]:
        free, cached, in_flight, total = self._ops.cache.gauges()
        client = self._ops.client
        return {"free": free, "cached": cached, "in_flight": in_flight, "total": total, "epoch": self._ops.cache.epoch,
                "quarantined": self._ops.quarantined, "healthy": client is not None and client.healthy,
                "host_bytes": client.host_bytes if client is not None else 0,
                "violations": self._ops.cache.sanity() if not self._ops.busy else []}


def _tokens(raw: bytes) -> array:
    out = array("q")
    out.frombytes(raw)
    return out
