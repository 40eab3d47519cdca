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
from umbel.lang.ir import Join, Select, Text
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
from .fold_selects import can_fold, fold_one_choice_selects
from .gang_siblings import gang_siblings
from .merge_literals import MIN_MERGED, merge_literals
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


def stays_as_written(piece: RequestGraph) -> bool:
    """Whether `PASSES` leave a piece alone, seen at a glance: most pieces are a text and a gen."""
    return len(piece.nodes) <= MIN_MERGED and not any(map(_may_change, piece.nodes))


def _may_change(node: GraphNode) -> bool:
    return type(node.op) is Join or can_fold(node)


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
    each node of the program is. The backend's session knows `_events` and not this one: a cycle of
    each run would wait for the garbage collection, which walks all results that are kept.
    """

    __slots__ = (
        "_alone",
        "_backend",
        "_batch",
        "_events",
        "_ids",
        "_inner",
        "_options",
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
        self._events: _Events | None = None  # None for one piece that is as it was written
        self._ids: list[int] | None = None  # of each node of the program
        self._alone: dict[int, int] = _NONE  # ids of merged nodes handed over again, or -1

    def extend(self, piece: RequestGraph) -> None:
        """Rewrite a piece and hand it over; see `Session`."""
        stays = self._passes is PASSES and stays_as_written(piece)
        if stays and self._options.is_whole:
            self._inner = self._backend.open(self._told_of_trunk(piece), self._sink)
            self._inner.extend(piece)
            return
        events = self._events
        if events is None:
            events = self._events = _Events(self._sink)
        done = Rewritten.unchanged(piece)
        if not stays:
            for run in self._passes:  # checked in tests: what a state wrote is trusted too
                done = run(done)
        graph = done.graph
        if self._ids is not None or len(graph.nodes) < len(piece.nodes):
            graph = self._numbered(done, events.origins)
        else:
            events.origins += done.origins
        if (
            graph is not piece and events.is_plain
        ):  # what the backend's thread reads: after the rest
            events.is_plain = all(map(_tells_itself, graph.nodes, done.origins))
        if self._inner is None:
            self._inner = self._backend.open(self._told_of_trunk(graph), events.receive)
        self._inner.extend(graph)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes of the program; a text of several stops when all of them are meant."""
        if self._inner is None:
            return
        if nodes is not None and self._ids is not None:
            meant = set(nodes)
            ids = sorted({self._ids[node] for node in meant})
            origins = self._origins
            nodes = [i for i in ids if all(origin.id in meant for origin in origins[i])]
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

    @property
    def _origins(self) -> list[tuple[GraphNode, ...]]:
        assert self._events is not None, "something was handed over that may be renumbered"
        return self._events.origins

    def _numbered(self, done: Rewritten, all_origins: list[tuple[GraphNode, ...]]) -> RequestGraph:
        """Return a piece under the backend's ids, and note which is which."""
        old_base, base = done.graph.base, len(all_origins)
        if self._ids is None:
            self._ids, self._alone = list(range(old_base)), {}
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
        offset = len(all_origins) - old_base

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
        all_origins += done.origins
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
        handed = self._origins
        group = handed[self._ids[node]]
        at = None if group[0].parent is None else self._ids[group[0].parent]
        for origin in group:
            if self._alone[origin.id] < 0:
                self._alone[origin.id] = len(handed)
                text = Text((literal_of(origin.op) or "",))
                again.append(GraphNode(len(handed), origin.address, text, at))
                handed.append(())
            at = self._alone[origin.id]
            if origin.id == node:
                return


#: before anything was merged; never written to
_NONE: dict[int, int] = {}


class _Events:
    """Takes a backend's events and passes them on under the program's own nodes."""

    __slots__ = ("_sink", "is_plain", "origins")

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self.origins: list[tuple[GraphNode, ...]] = []  # of each node handed over
        self.is_plain = True  # events can be passed on as they are

    def receive(self, events: Sequence[Event]) -> None:
        """Take a batch of events."""
        if self.is_plain:
            self._sink(events)
            return
        told: list[Event] = []
        for event in events:
            if 0 <= event.node < len(self.origins):
                told += _told(event, self.origins[event.node])
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
