"""One run on behalf of one HTTP request: from the engine's thread to the server's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from umbel.lang.errors import WireError, from_wire
from umbel.lang.results import Event, NodeFailed, NodeFinished, NodeResult, TextDelta
from umbel.lang.wire import RunRequest, RunResponse

from ..metrics import EngineMetrics
from .host import EngineHost


class ServerRun:
    """Starts a checked request on an engine and gives its events to the loop that made it.

    The number of events is bounded by what the run may generate, so a slow reader never holds up
    the engine. `end` must be called once, on the loop: what has not ended then is cancelled.
    """

    def __init__(self, engine: EngineHost, request: RunRequest, metrics: EngineMetrics) -> None:
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._arrived = time.monotonic()
        self._has_text = False
        self._open = request.open_nodes()
        self._pending: list[Event] = []
        self._wake = asyncio.Event()
        failed = {node: from_wire(error) for node, error in request.failed.items()}
        self._session = engine.open(request.options, self._sink, request.resolved, failed)
        try:
            self._session.extend(request.graph)
        finally:
            self._session.close()
        metrics.runs_active.inc()

    def _sink(self, events: Sequence[Event]) -> None:
        """Take events on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, tuple(events))
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _take(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if event.node not in self._open:
                continue  # it had ended before
            self._pending.append(event)
            if isinstance(event, TextDelta) and not self._has_text:
                self._has_text = True
                self._metrics.time_to_first_token.observe(time.monotonic() - self._arrived)
            elif isinstance(event, NodeFinished | NodeFailed):
                self._open.discard(event.node)
                outcome = "finished" if isinstance(event, NodeFinished) else "failed"
                self._metrics.nodes.labels(outcome).inc()
        self._wake.set()

    async def events(self, keep_alive_s: float) -> AsyncIterator[tuple[Event, ...]]:
        """Yield what has come since the last time, until every node has ended.

        Yields nothing (an empty tuple) after `keep_alive_s` without an event.
        """
        while self._open or self._pending:
            if not self._pending:
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), keep_alive_s)
                except TimeoutError:
                    yield ()
                    continue
            events, self._pending = tuple(self._pending), []
            yield events

    async def response(self) -> RunResponse:
        """Wait for every node to end and return their outcomes."""
        results: dict[int, NodeResult] = {}
        errors: dict[int, WireError] = {}
        async for events in self.events(keep_alive_s=3600.0):
            for event in events:
                if isinstance(event, NodeFinished):
                    results[event.node] = event.result
                elif isinstance(event, NodeFailed):
                    errors[event.node] = event.error
        return RunResponse(results, errors)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes (all, by default) that have not ended."""
        if nodes is not None:
            nodes = [node for node in nodes if node in self._open]
        self._session.cancel(nodes)

    def end(self) -> None:
        """Cancel what has not ended, and count the run."""
        self._metrics.runs_active.dec()
        self._metrics.runs.labels("cancelled" if self._open else "completed").inc()
        self._metrics.run_seconds.observe(time.monotonic() - self._arrived)
        if self._open:
            self._session.cancel()
