"""Walks a run's graph for a backend that has no graphs of its own.

Text, turns, forks and joins are settled here; gens and selects are handed to the backend one by
one, as soon as they are ready. Not thread-safe: one thread or loop owns an executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from umbel.lang.choice_scoring import only_choice
from umbel.lang.errors import UmbelError, to_wire
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.graph_state import Changes, GraphState, NodeStatus
from umbel.lang.ir import Gen, Join, Pick, Ref, Select, Text
from umbel.lang.results import Event, NodeFailed, NodeFinished, NodeResult, NodeStarted, TextDelta
from umbel.lang.transcript import Message, appended_text, messages_of, path_to

from .backends.base import EventSink

_EMPTY = NodeResult()


class Executor:
    """One run's graph, driven by its owner.

    After each call that moves the run on, `take_ready` gives the gens and selects to start and
    `take_stopped` the started ones whose answers are not wanted any more (cancelled, poisoned).
    The owner answers with `finish` or `fail`. Events collect until `deliver` sends them to the
    sink as one batch.
    """

    __slots__ = ("_events", "_ready", "_sink", "_state", "_stopped")

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._state = GraphState()
        self._events: list[Event] = []
        self._ready: list[GraphNode] = []
        self._stopped: list[int] = []

    @property
    def is_idle(self) -> bool:
        """Whether every node so far has ended."""
        return self._state.is_done

    def take_ready(self) -> list[GraphNode]:
        """Return the nodes to start, each once, without those that have ended since."""
        if not self._ready:
            return []
        ready, self._ready = self._ready, []
        return [node for node in ready if self._state.status[node.id] is NodeStatus.READY]

    def take_stopped(self) -> Sequence[int]:
        """Return the nodes to stop, each once."""
        if not self._stopped:
            return ()
        stopped, self._stopped = self._stopped, []
        return stopped

    def add(self, piece: RequestGraph) -> None:
        """Take in more of the graph."""
        self._advance(self._state.add(piece))

    def delta(self, node: int, text: str) -> None:
        """Pass on more text of a started gen."""
        if text and self._state.status[node] is NodeStatus.READY:
            self._events.append(TextDelta(node, text))

    def finish(self, node: int, result: NodeResult) -> None:
        """Record a started node's result and go on with what it makes ready."""
        if self._state.status[node] is NodeStatus.READY:
            self._finish(node, result)

    def fail(self, node: int, error: UmbelError) -> None:
        """Record a started node's failure."""
        if self._state.status[node] is NodeStatus.READY:
            self._advance(self._state.fail(node, error))

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Cancel nodes (all, by default) that have not ended."""
        self._advance(self._state.cancel(None if nodes is None else list(nodes)))

    def fail_all(self, error: Callable[[GraphNode], UmbelError]) -> None:
        """Fail every node that has not ended, each with its own error."""
        for node in self._state.unfinished():
            if self._state.status[node] is NodeStatus.READY:
                self._stopped.append(node)
            self._advance(self._state.fail(node, error(self._state.nodes[node])))

    def deliver(self) -> None:
        """Send the collected events."""
        if self._events:
            events, self._events = self._events, []
            self._sink(events)

    def text_before(self, node: GraphNode) -> str:
        """Return the text that a ready node continues, without turn borders."""
        return "".join(text for _, text in self._steps(node))

    def messages_before(self, node: GraphNode) -> list[Message]:
        """Return the turns that a ready node continues."""
        return messages_of(self._steps(node))

    def _steps(self, node: GraphNode) -> list[tuple[GraphNode, str]]:
        path = path_to(self._state.nodes, node.parent)
        return [(at, appended_text(at, self._state.results[at.id])) for at in path]

    def _finish(self, node: int, result: NodeResult) -> None:
        self._events.append(NodeFinished(node, result))
        self._advance(self._state.finish(node, result))

    def _advance(self, changes: Changes) -> None:
        state, events = self._state, self._events
        todo = deque((changes,))
        while todo:
            now = todo.popleft()
            if now.failed:
                self._stopped += now.cancelled
                for node_id, error in now.failed:
                    events.append(NodeFailed(node_id, to_wire(error)))
            for node_id in now.ready:
                if state.status[node_id] is not NodeStatus.READY:
                    continue  # cancelled by what became ready before it
                node = state.nodes[node_id]
                result = None if type(node.op) is Gen else self._settled(node)
                if result is None:
                    events.append(NodeStarted(node_id))
                    self._ready.append(node)
                else:
                    events.append(NodeFinished(node_id, result))
                    todo.append(state.finish(node_id, result))

    def _settled(self, node: GraphNode) -> NodeResult | None:
        """Return the result of a node that needs no model; None for one that does."""
        op = node.op
        if type(op) is Text:
            if len(op.parts) == 1 and isinstance(op.parts[0], str):
                return NodeResult(text=op.parts[0])
            texts = (
                self._state.results[part.node].text if isinstance(part, Ref) else part
                for part in op.parts
            )
            return NodeResult(text="".join(texts))
        match op:
            case Gen():
                return None
            case Select(choices=(_,)):
                return only_choice(op)
            case Select():
                return None
            case Join():
                return self._state.join_result(node.id)
            case Pick(sample=sample):
                assert node.parent is not None, "a Pick continues a Gen"
                return NodeResult(text=self._state.results[node.parent].samples[sample].text)
            case _:
                return _EMPTY
