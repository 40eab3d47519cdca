"""An engine without a model: a gen's value is a hash of the text before it.

So two ways of running a program agree exactly when every node saw the same prefix. One thread runs
everything, as in the real engine. A gen whose name is in `held` waits for `release`.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import assert_never

from umbel.lang.errors import EngineError, EngineStoppedError, ProgramError, UmbelError, to_wire
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.graph_state import Changes, GraphState
from umbel.lang.ir import Branch, Gen, Image, Join, Pick, Ref, RoleEnd, RoleStart, Select, Text
from umbel.lang.results import (
    ChoiceScore,
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    NodeStarted,
    RunOptions,
    Sample,
    TextDelta,
)

EventSink = Callable[[Sequence[Event]], None]
_NONE: Mapping[int, UmbelError] = MappingProxyType({})
FAILING = "broken"  # a gen of this name fails


@dataclass(eq=False)
class FakeRun:
    options: RunOptions
    sink: EventSink
    resolved: dict[int, NodeResult]
    failed: dict[int, UmbelError]
    state: GraphState = field(default_factory=GraphState)
    held: dict[str, list[int]] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)  # addresses of the nodes that ran here


class FakeSession:
    def __init__(self, engine: FakeEngine, run: FakeRun) -> None:
        self._engine = engine
        self._run = run
        self._num_nodes = 0

    def extend(self, piece: RequestGraph, failed: Mapping[int, UmbelError] = _NONE) -> None:
        piece.check()
        if piece.base != self._num_nodes:
            raise ProgramError(f"the piece starts at {piece.base}; the run has {self._num_nodes}")
        self._engine.check_running()
        self._num_nodes += len(piece.nodes)
        self._run.failed.update(failed)
        self._engine.post(lambda: self._engine.extend(self._run, piece))

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        ids = None if nodes is None else list(nodes)
        self._engine.post(lambda: self._engine.cancel(self._run, ids))

    def close(self) -> None:
        pass


class FakeEngine:
    def __init__(self, held: Sequence[str] = ()) -> None:
        self.runs: list[FakeRun] = []
        self.cancelled = threading.Event()  # a run was cancelled as a whole
        self.cancelled_nodes = threading.Event()  # single nodes were
        self._held = set(held)
        self._stopped = False
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def open(
        self,
        options: RunOptions,
        sink: EventSink,
        resolved: dict[int, NodeResult] | None = None,
        failed: dict[int, UmbelError] | None = None,
    ) -> FakeSession:
        self.check_running()
        run = FakeRun(options, sink, resolved or {}, failed or {})
        self.runs.append(run)
        return FakeSession(self, run)

    def check_running(self) -> None:
        if self._stopped:
            raise EngineStoppedError("the engine is no longer running")

    def stats(self) -> dict[str, float]:
        return {"steps": 7, "forward_s": 1.5, "kv_slots": 64, "unknown": 1}

    def release(self, name: str) -> None:
        """Let the gens called `name` go on, now and later."""

        def go() -> None:
            self._held.discard(name)
            for run in self.runs:
                for node_id in run.held.pop(name, ()):
                    self._apply(run, self._end_gen(run, run.state.nodes[node_id]))

        self.post(go)

    def close(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._commands.put(None)
            self._thread.join()

    def post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    def extend(self, run: FakeRun, piece: RequestGraph) -> None:
        self._apply(run, run.state.add(piece))

    def cancel(self, run: FakeRun, nodes: list[int] | None) -> None:
        if nodes is None and run.state.unfinished():
            self.cancelled.set()
        if nodes:
            self.cancelled_nodes.set()
        self._apply(run, run.state.cancel(nodes))

    def _loop(self) -> None:
        while (command := self._commands.get()) is not None:
            command()
        error = EngineStoppedError("the engine is no longer running")
        for run in self.runs:
            for node_id in run.state.unfinished():
                self._apply(run, run.state.fail(node_id, error))

    def _apply(self, run: FakeRun, changes: Changes) -> None:
        todo = [changes]
        while todo:
            change = todo.pop(0)
            for node_id, error in change.failed:
                if node_id not in run.failed:
                    run.sink([NodeFailed(node_id, to_wire(error))])
            for node_id in change.ready:
                todo.append(self._start(run, run.state.nodes[node_id]))

    def _start(self, run: FakeRun, node: GraphNode) -> Changes:
        if node.id in run.failed:
            return run.state.fail(node.id, run.failed[node.id])
        if node.id in run.resolved:
            return run.state.finish(node.id, run.resolved[node.id])
        run.ran.append(node.address)
        match node.op:
            case Gen(name=name):
                run.sink([NodeStarted(node.id)])
                if name in self._held:
                    run.held.setdefault(name, []).append(node.id)
                    return Changes()
                return self._end_gen(run, node)
            case Select(choices=choices):
                row = (
                    ChoiceScore(choices[0], (1,), (float("-inf"),), float("-inf"), 0.0, 0.0, 1.0),
                )
                return self._finish(run, node, NodeResult(choices[0], scores=row))
            case Text(parts=parts):
                texts = [
                    run.state.results[part.node].text if isinstance(part, Ref) else part
                    for part in parts
                ]
                return self._finish(run, node, NodeResult("".join(texts)))
            case RoleStart(role=role):
                return self._finish(run, node, NodeResult(f"<{role}>"))
            case RoleEnd(role=role):
                return self._finish(run, node, NodeResult(f"</{role}>"))
            case Branch():
                return self._finish(run, node, NodeResult())
            case Join():
                return self._finish(run, node, run.state.join_result(node.id))
            case Pick(sample=sample):
                assert node.parent is not None
                text = run.state.results[node.parent].samples[sample].text
                return self._finish(run, node, NodeResult(text))
            case Image():
                raise AssertionError("no test sends an image")
            case _:
                assert_never(node.op)

    def _end_gen(self, run: FakeRun, node: GraphNode) -> Changes:
        assert isinstance(node.op, Gen)
        if node.id not in run.state.unfinished():
            return Changes()
        if node.op.name == FAILING:
            return self._fail(run, node, EngineError(f"{node.address} broke"))
        prefix = self._prefix(run, node)
        key = f"{run.options.seed}|{run.options.row}|{node.address}|{prefix}"
        value = hashlib.blake2b(key.encode(), digest_size=4).hexdigest() + " \u2028é\n"
        ids = tuple(value.encode())
        run.sink([TextDelta(node.id, char) for char in value])
        sample = Sample(value, token_ids=ids, num_kept=len(ids))
        return self._finish(run, node, NodeResult(value, samples=(sample,)))

    def _finish(self, run: FakeRun, node: GraphNode, result: NodeResult) -> Changes:
        run.sink([NodeFinished(node.id, result)])
        return run.state.finish(node.id, result)

    def _fail(self, run: FakeRun, node: GraphNode, error: UmbelError) -> Changes:
        return run.state.fail(node.id, error)

    def _prefix(self, run: FakeRun, node: GraphNode) -> str:
        texts = []
        at = node.parent
        while at is not None:
            texts.append(run.state.results[at].text)
            at = run.state.nodes[at].parent
        return "".join(reversed(texts))
