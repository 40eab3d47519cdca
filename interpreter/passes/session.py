"""Runs the passes over every piece that is handed to a backend, and takes its events back.

What a program sees is what it wrote: events come under the program's own nodes. Backends that ask
for graphs as they were written (`Capabilities.verbatim`) get them so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from umbel.lang.choice_scoring import only_choice
from umbel.lang.errors import from_wire, to_wire
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.graph_state import poisoned
from umbel.lang.ir import Select, Text
from umbel.lang.results import (
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    NodeStarted,
    RunOptions,
    TextDelta,
)

from ..backends.base import Backend, EventSink, Session
from .common_trunk import BatchTrunk
from .fold_selects import fold_one_choice_selects
from .gang_siblings import gang_siblings
from .merge_literals import merge_literals
from .rewritten import Pass, Rewritten, literal_of, with_edges

#: in their order: what was folded can merge, and merging renumbers
PASSES: tuple[Pass, ...] = (fold_one_choice_selects, gang_siblings, merge_literals)


def rewrite(piece: RequestGraph, passes: Sequence[Pass] = PASSES) -> Rewritten:
    """Run passes over a piece, and check what each of them did; raises ProgramError."""
    done = Rewritten.unchanged(piece)
    for run in passes:
        done = run(done)
        done.check()
    return done


def open_session(
    backend: Backend,
    options: RunOptions,
    sink: EventSink,
    *,
    batch: BatchTrunk | None = None,
    passes: Sequence[Pass] = PASSES,
) -> Session:
    """Start a run on a backend behind the passes; `batch` is that of the run, if it is a row."""
    if backend.capabilities.verbatim:
        return backend.open(options, sink)
    return RewritingSession(backend, options, sink, batch, passes)


class RewritingSession:
    """A session that hands rewritten pieces on. Opens the backend's own with the first piece.

    As long as no node was merged, the ids are the program's own; from then on `_ids` says where
    each node of the program is.
    """

    __slots__ = (
        "_alone",
        "_backend",
        "_batch",
        "_ids",
        "_inner",
        "_is_plain",
        "_options",
        "_origins",
        "_passes",
        "_sink",
    )

    def __init__(
        self,
        backend: Backend,
        options: RunOptions,
        sink: EventSink,
        batch: BatchTrunk | None,
        passes: Sequence[Pass],
    ) -> None:
        self._backend = backend
        self._options = options
        self._sink = sink
        self._batch = batch
        self._passes = passes
        self._inner: Session | None = None
        self._origins: list[tuple[GraphNode, ...]] = []  # of each node handed over
        self._ids: list[int] | None = None  # of each node of the program
        self._alone: dict[int, int] = {}  # ids of merged nodes that were handed over again, or -1
        self._is_plain = True  # events can be passed on as they are

    def extend(self, piece: RequestGraph) -> None:
        """Rewrite a piece and hand it over; see `Session`."""
        done = Rewritten.unchanged(piece)
        for run in self._passes:  # checked in tests: what a state wrote is trusted too
            done = run(done)
        graph = done.graph
        if self._ids is not None or len(graph.nodes) < len(piece.nodes):
            graph = self._numbered(done)
        else:
            self._origins += done.origins
        if graph is not piece and self._is_plain:  # what the backend's thread reads: after the rest
            self._is_plain = all(map(_tells_itself, graph.nodes, done.origins))
        if self._inner is None:
            self._inner = self._backend.open(self._told_of_trunk(graph), self._receive)
        self._inner.extend(graph)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes of the program; a text of several stops when all of them are meant."""
        if self._inner is None:
            return
        if nodes is not None and self._ids is not None:
            meant = set(nodes)
            ids = sorted({self._ids[node] for node in meant})
            nodes = [i for i in ids if all(origin.id in meant for origin in self._origins[i])]
            if not nodes:
                return
        self._inner.cancel(nodes)

    def close(self) -> None:
        """Promise that no more pieces come."""
        if self._inner is not None:
            self._inner.close()

    def _told_of_trunk(self, first: RequestGraph) -> RunOptions:
        if self._batch is None or not self._backend.capabilities.trunks:
            return self._options
        trunk = self._batch.narrow(first)
        if trunk is None:
            return self._options
        options = msgspec.structs.replace(self._options, trunk=trunk)
        self._batch.keep(self._backend, options)
        return options

    # --- numbers -----------------------------------------------------------------------------

    def _numbered(self, done: Rewritten) -> RequestGraph:
        """Return a piece under the backend's ids, and note which is which."""
        old_base, base = done.graph.base, len(self._origins)
        if self._ids is None:
            self._ids = list(range(old_base))
        ids, alone = self._ids, self._alone
        again: list[GraphNode] = []
        if alone:
            for node in done.graph.nodes:
                if (
                    node.parent is not None
                    and node.parent < old_base
                    and self._is_inside(node.parent)
                ):
                    self._hand_again(node.parent, again)
                for edge in node.deps:
                    if edge in alone and (type(node.op) is Text or self._is_inside(edge)):
                        self._hand_again(edge, again)
        offset = len(self._origins) - old_base

        def number(edge: int) -> int:
            if edge >= old_base:
                return edge + offset
            return alone[edge] if edge in alone and self._is_inside(edge) else ids[edge]

        def of_value(edge: int) -> int:
            return edge + offset if edge >= old_base else alone.get(edge, ids[edge])

        numbered: Sequence[GraphNode] = done.graph.nodes
        if offset or old_base:
            numbered = [
                with_edges(node, number, node.id + offset, of_value=of_value) for node in numbered
            ]
        self._origins += done.origins
        ids += [0] * sum(map(len, done.origins))
        for node, origins in zip(numbered, done.origins, strict=True):
            for origin in origins:
                ids[origin.id] = node.id
                if len(origins) > 1:
                    alone[origin.id] = -1
        return RequestGraph((*again, *numbered), base)

    def _is_inside(self, node: int) -> bool:
        """Whether others were merged into a node of the program, behind it."""
        assert self._ids is not None, "nodes have numbers"
        origins = self._origins[self._ids[node]]
        return len(origins) > 1 and origins[-1].id != node

    def _hand_again(self, node: int, again: list[GraphNode]) -> None:
        """Hand over by itself a text that was merged with others and now is built on or read.

        It fails when the text it continues fails, as it would have done; its events say nothing.
        """
        assert self._ids is not None, "something was merged"
        group = self._origins[self._ids[node]]
        at = None if group[0].parent is None else self._ids[group[0].parent]
        for origin in group:
            if self._alone[origin.id] < 0:
                self._alone[origin.id] = len(self._origins)
                text = Text((literal_of(origin.op) or "",))
                again.append(GraphNode(len(self._origins), origin.address, text, at))
                self._origins.append(())
            at = self._alone[origin.id]
            if origin.id == node:
                return

    # --- events ------------------------------------------------------------------------------

    def _receive(self, events: Sequence[Event]) -> None:
        if self._is_plain:
            self._sink(events)
            return
        told: list[Event] = []
        for event in events:
            if 0 <= event.node < len(self._origins):
                told += _told(event, self._origins[event.node])
        if told:
            self._sink(told)


def _told(event: Event, origins: tuple[GraphNode, ...]) -> Sequence[Event]:
    """Return an event as the nodes of the program would have given it."""
    if not origins:
        return ()
    first = origins[0]
    match event:
        case NodeStarted():
            return (NodeStarted(first.id),)
        case TextDelta(text=text):
            return (TextDelta(first.id, text),)
        case NodeFinished(result=result):
            if len(origins) == 1 and type(first.op) is not Select:
                return (event if first.id == event.node else NodeFinished(first.id, result),)
            return [NodeFinished(origin.id, _result_of(origin, result)) for origin in origins]
        case NodeFailed(error=error):
            found: list[Event] = [NodeFailed(first.id, error)]
            if len(origins) > 1:
                rest = to_wire(poisoned(from_wire(error), first.address))
                found += [NodeFailed(origin.id, rest) for origin in origins[1:]]
            return found


def _result_of(origin: GraphNode, result: NodeResult) -> NodeResult:
    text = literal_of(origin.op)
    if text is None:
        return result
    return only_choice(origin.op) if isinstance(origin.op, Select) else NodeResult(text=text)


def _tells_itself(node: GraphNode, origins: tuple[GraphNode, ...]) -> bool:
    """Whether a node's events are those of the one node of the program that it stands for."""
    return len(origins) == 1 and origins[0].id == node.id and type(origins[0].op) is type(node.op)
