"""Submits programs to an engine that has no thread of its own, and drives it until all ended.

Knows graphs and time; neither workloads nor tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from umbel.lang.errors import EngineError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Join, Select
from umbel.lang.results import Event, NodeFailed, NodeFinished, NodeResult, RunOptions

from ..engine import Engine
from .arms import Submission

_STUCK_S = 120.0  # without a step: longer than any constraint may take to compile


class BenchmarkError(EngineError):
    """A program of a benchmark did not end as it should."""


class Client:
    """One program on its way through an engine: submits it, and notes how it ends.

    What it does in a sink happens between two steps, on the thread that drives the engine.
    """

    def __init__(self, engine: Engine, graph: RequestGraph, row: int) -> None:
        self.error = ""  # why it failed, if it did
        self.started_s = self.ended_s = 0.0
        self.ended_step = 0
        self.row = row
        self._engine = engine
        self._graph = graph
        self._model_nodes = [n.id for n in graph.nodes if isinstance(n.op, Gen | Select)]
        self._on_end: Callable[[], None] = lambda: None

    def start(self, submission: Submission, on_end: Callable[[], None]) -> None:
        """Submit the program, or the first part of it; `on_end` is called once."""
        self._on_end = on_end
        self.started_s = time.perf_counter()
        match submission:
            case "graph":
                self._submit_pieces([len(self._graph.nodes)])
            case "nodes":
                self._submit_pieces([*(i + 1 for i in self._model_nodes), len(self._graph.nodes)])
            case "requests":
                self._submit_request(0, {})

    def _submit_pieces(self, ends: list[int]) -> None:
        """Extend one session by nodes up to each of `ends`, when those before it have ended."""
        submitted = num_ended = 0

        def submit_next() -> None:
            nonlocal submitted
            base, submitted = submitted, next(end for end in ends if end > submitted)
            session.extend(RequestGraph(self._graph.nodes[base:submitted], base))

        def sink(events: Sequence[Event]) -> None:
            nonlocal num_ended
            num_ended += self._count_ended(events)
            if num_ended < submitted:
                return
            if submitted < ends[-1]:
                submit_next()
            else:
                session.close()
                self._end()

        session = self._engine.open(RunOptions(row=self.row), sink)
        submit_next()

    def _submit_request(self, position: int, results: dict[int, NodeResult]) -> None:
        """Run one gen or select as a program of its own, on the path that leads to it; go on."""
        path = _path(self._graph.nodes, self._model_nodes[position])
        last = len(path) - 1

        def sink(events: Sequence[Event]) -> None:
            self._count_ended(events)
            for event in events:
                if isinstance(event, NodeFinished) and event.node == last:
                    results[self._model_nodes[position]] = event.result
                    if position + 1 < len(self._model_nodes):
                        self._submit_request(position + 1, results)
                    else:
                        self._end()

        known = {i: results[node.id] for i, node in enumerate(path) if node.id in results}
        session = self._engine.open(RunOptions(row=self.row), sink, known)
        parents = (None, *range(last))
        nodes = zip(path, parents, strict=True)
        session.extend(
            RequestGraph(
                tuple(GraphNode(i, n.address, n.op, parent) for i, (n, parent) in enumerate(nodes))
            )
        )
        session.close()

    def _count_ended(self, events: Sequence[Event]) -> int:
        num_ended = 0
        for event in events:
            if isinstance(event, NodeFinished):
                num_ended += 1
            elif isinstance(event, NodeFailed):
                num_ended += 1
                if not self.error:
                    self.error = f"{event.error.type}: {event.error.message}"
                    self._end()
        return num_ended

    def _end(self) -> None:
        if not self.ended_s:
            self.ended_s = time.perf_counter()
            self.ended_step = self._engine.core.scheduler.stats.steps
            self._on_end()


@dataclass(frozen=True, slots=True)
class DriveResult:
    """What was seen while an engine ran programs that all came at once."""

    time_s: float
    latencies_s: list[float]  # of each program, from its submission to its last node's end
    latencies_steps: list[int]  # the same in passes
    decode_steps: int  # passes that computed at least one sampled token's row
    peak_kv_tokens: int  # rows that could not have been evicted after a step, at most
    cpu_s: float  # of the thread, in steps


def drive(engine: Engine, graphs: Sequence[RequestGraph], submission: Submission) -> DriveResult:
    """Run programs to their end; raises BenchmarkError if one fails or the engine gets stuck."""
    clients = [Client(engine, graph, row) for row, graph in enumerate(graphs)]
    num_open = len(clients)

    def on_end() -> None:
        nonlocal num_open
        num_open -= 1

    scheduler = engine.core.scheduler
    decode_steps = peak = 0
    cpu_s = 0.0
    started = stepped = time.perf_counter()
    for client in clients:
        client.start(submission, on_end)
    while num_open:
        before, cpu_started = scheduler.stats.tokens_decoded, time.thread_time()
        has_stepped = engine.step()
        cpu_s += time.thread_time() - cpu_started
        if has_stepped:
            stepped = time.perf_counter()
        elif time.perf_counter() - stepped > _STUCK_S:
            raise BenchmarkError(f"{num_open} programs are left, and nothing runs")
        else:
            time.sleep(0.0002)  # a constraint is being compiled
        decode_steps += scheduler.stats.tokens_decoded > before
        peak = max(peak, scheduler.allocator.num_slots - scheduler.num_available)
    for client in clients:
        if client.error:
            raise BenchmarkError(f"program {client.row} failed: {client.error}")
    ended = max(client.ended_s for client in clients)
    latencies = [client.ended_s - client.started_s for client in clients]
    in_steps = [client.ended_step for client in clients]
    return DriveResult(ended - started, latencies, in_steps, decode_steps, peak, cpu_s)


def _path(nodes: Sequence[GraphNode], last: int) -> list[GraphNode]:
    """Return the nodes whose text leads to a node, without those that append nothing."""
    path: list[GraphNode] = []
    at: int | None = last
    while at is not None:
        node = nodes[at]
        is_silent = isinstance(node.op, Branch) or (
            isinstance(node.op, Join) and node.op.mode == "gather"
        )
        if not is_silent:
            path.append(node)
        at = node.parent
    path.reverse()
    return path
