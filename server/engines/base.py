"""The engine port. Implemented by the real engines (inside the worker), by the scripted one, and by the proxy that the
server holds (`remote.py`), so that one contract suite tests them all."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from kvstore.receipt import Receipt

from .channel import Generate, HealthReport, Ledger, Pressure, Progress, Ready, Report, TurnEvent, Verb


class EngineError(Exception):
    """Base of what an engine call raises."""


class EngineUnavailable(EngineError):
    """The engine is starting, restarting or gone. Retryable; nothing was changed."""


class EngineStartError(EngineError):
    """The engine cannot start: half-hooked, a wrong model, no memory. Not retryable without a change."""


Listener = Callable[[Ledger | Pressure | Progress], None]
"""Gets what the engine says unasked. Called on the event loop; must not block."""


class Engine(Protocol):
    async def start(self, listen: Listener) -> Ready:
        """Bring it up. Raises EngineStartError."""

    def generate(self, turn: Generate) -> AsyncIterator[TurnEvent]:
        """Deltas, then exactly one Finished or Failed. Closing the iterator early aborts the turn.

        A turn whose pages are not all on the device is restored first, without holding up other turns; the tokens
        that came back are in `Finished.usage.cached` by tier and in `Finished.receipt`. An engine that dies ends the
        turn with Failed(code="engine_died", retryable=True).
        """

    async def abort(self, turn_id: str) -> None:
        """Stop it soon; it ends with Finished(reason="abort"). An unknown or finished turn is ignored."""

    async def run(self, verb: Verb) -> Receipt:
        """Do one KV verb. What cannot be done is a receipt (refused, failed), not an exception; raises
        EngineUnavailable only."""

    async def report(self, request: Report) -> Ledger:
        """Raises EngineUnavailable."""

    async def health(self) -> HealthReport:
        """Raises EngineUnavailable."""

    async def close(self) -> None:
        """Stop now. Running turns end as Failed."""
