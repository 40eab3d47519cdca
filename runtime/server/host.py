"""What the server asks of an engine; knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from umbel.lang.errors import UmbelError
from umbel.lang.graph import RequestGraph
from umbel.lang.results import Event, NodeResult, RunOptions

EventSink = Callable[[Sequence[Event]], None]


class HostSession(Protocol):
    """One run in the engine; may be used from any thread."""

    def extend(self, piece: RequestGraph, failed: Mapping[int, UmbelError] = ...) -> None:
        """Hand over nodes, those in `failed` as having ended elsewhere.

        Where there is much text, that may take as long as encoding it does.
        """
        ...

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes (all, by default) that have not ended."""
        ...

    def close(self) -> None:
        """Promise that no more nodes come. Idempotent."""
        ...


class EngineHost(Protocol):
    """Runs request graphs: `runtime.engine.Engine`, or what a test puts in its place."""

    def open(
        self,
        options: RunOptions,
        sink: EventSink,
        resolved: dict[int, NodeResult] | None = None,
        failed: dict[int, UmbelError] | None = None,
    ) -> HostSession:
        """Start a run whose events go to `sink`, from any thread; raises EngineStoppedError.

        Nodes in `resolved` or `failed` have ended before: they are taken as done.
        """
        ...

    def stats(self) -> Mapping[str, float]:
        """Return the engine's counters; may be called from any thread."""
        ...
