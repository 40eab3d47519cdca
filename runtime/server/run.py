"""One run on behalf of one client: from the engine's thread to the server's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self

from umbel.lang.errors import UmbelError, WireError, from_wire
from umbel.lang.graph import RequestGraph
from umbel.lang.results import Event, NodeFailed, NodeFinished, NodeResult, RunOptions, TextDelta
from umbel.lang.wire import RunRequest, RunResponse

from .service import Service

# An engine encodes long texts where they are handed over: from here on, no other client is to wait
# for that. A shorter text takes less time than the way to a thread and back.
_MIN_CHARS = 1024


class ServerRun:
    """Hands a graph to an engine and gives its events to the loop that made it.

    The number of events is bounded by what the nodes may generate, so a slow reader never holds up
    the engine; who lets a graph grow minds `num_pending`. `end` must be called once, on the loop:
    what has not ended then is cancelled.
    """

    def __init__(
        self,
        service: Service,
        options: RunOptions,
        resolved: dict[int, NodeResult] | None = None,
        failed: dict[int, UmbelError] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._metrics = service.metrics
        self._arrived = time.monotonic()
        self._has_text = False
        self._is_closed = False
        self._open: set[int] = set()
        self._pending: list[Event] = []
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._session = service.engine.open(options, self._sink, resolved, failed)
        self._metrics.runs_active.inc()

    @classmethod
    async def of_request(cls, service: Service, request: RunRequest) -> Self:
        """Start a checked request, which is the whole graph. Raises EngineStoppedError."""
        failed = {node: from_wire(error) for node, error in request.failed.items()}
        run = cls(service, request.options, request.resolved, failed)
        try:
            await run._hand_over(request.graph, {}, request.open_nodes())
            run.close()
        except BaseException:  # a server that stops cancels what is being handed over
            run.end()
            raise
        return run

    async def extend(self, graph: RequestGraph, failed: Mapping[int, UmbelError]) -> None:
        """Hand over more nodes, those in `failed` as ended; await one call before the next.

        Raises ProgramError for a piece that is not the next, EngineStoppedError: the run can only
        be ended then.
        """
        opened = {node.id for node in graph.nodes if node.id not in failed}
        await self._hand_over(graph, failed, opened)

    async def _hand_over(
        self, graph: RequestGraph, failed: Mapping[int, UmbelError], opened: set[int]
    ) -> None:
        self._open |= opened  # first: events may come before another thread is done
        if graph.num_chars < _MIN_CHARS:
            self._session.extend(graph, failed)
        else:
            await asyncio.to_thread(self._session.extend, graph, failed)

    def close(self) -> None:
        """Note that no more nodes come: `events` ends when these have."""
        self._is_closed = True
        self._session.close()
        self._wake.set()

    @property
    def num_pending(self) -> int:
        """How many events wait to be read."""
        return len(self._pending)

    async def wait_until_taken(self) -> None:
        """Wait until somebody takes the pending events."""
        self._taken.clear()
        await self._taken.wait()

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
        """Yield what has come since the last time, until no node is open and none can come.

        Yields nothing (an empty tuple) after `keep_alive_s` without an event.
        """
        while self._open or self._pending or not self._is_closed:
            if not self._pending:
                self._wake.clear()
                try:
                    # not wait_for: before Python 3.12 it may swallow a cancellation
                    async with asyncio.timeout(keep_alive_s):
                        await self._wake.wait()
                except TimeoutError:
                    yield ()
                continue
            events, self._pending = tuple(self._pending), []
            self._taken.set()
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
        is_cut = bool(self._open) or not self._is_closed
        self._metrics.runs_active.dec()
        self._metrics.runs.labels("cancelled" if is_cut else "completed").inc()
        self._metrics.run_seconds.observe(time.monotonic() - self._arrived)
        if is_cut:
            self._session.close()  # first: what another thread is about to hand over comes no more
            self._session.cancel()
