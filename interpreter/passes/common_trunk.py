"""What all rows of a batch begin with, as a graph of its own: constant text and turns.

A backend that is told can compute it before the first row needs it, and keep it until the last:
a batch has a run without nodes open on each backend for as long as it may bring more rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import RoleEnd, RoleStart, Text
from umbel.lang.results import Event, RunOptions

from ..backends.base import Backend, Session
from .rewritten import literal_of

#: characters of text below which a trunk is not worth telling
MIN_TRUNK = 64


def common_trunk(graphs: Sequence[RequestGraph]) -> RequestGraph:
    """Return the longest beginning that the graphs share: nodes that follow each other from the
    start and are known before anything runs. The last text may be the beginning of each one's own.

    Of one graph it is all of its constant beginning; of none it is empty.
    """
    if not graphs:
        return RequestGraph(())
    trunk = _constant(graphs[0])
    for graph in graphs[1:]:
        trunk = _meet(trunk, graph.nodes)
    return RequestGraph(tuple(trunk))


def has_trunk(graph: RequestGraph, trunk: RequestGraph) -> bool:
    """Whether a graph begins with a trunk: the legality of telling a backend so."""
    return _meet(trunk.nodes, graph.nodes) == list(trunk.nodes)


class _Kept(NamedTuple):
    """A trunk that a backend was told of, and the run without nodes that it is kept for."""

    backend: Backend
    trunk: RequestGraph
    session: Session


class BatchTrunk:
    """The common trunk of the rows of one batch seen so far. Rows may come from any thread.

    It only shrinks, and ends for good where it gets too short to matter. Two rows that come at once
    may leave it longer than it is; each row's answer is true of that row nonetheless.
    """

    def __init__(self) -> None:
        self._trunk: RequestGraph | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}  # by the backend's id
        self._is_closed = False

    def narrow(self, row: RequestGraph) -> RequestGraph | None:
        """Take a row's first piece into account; return the trunk, once there are two rows.

        The same object is returned for as long as the trunk stays the same.
        """
        if self._is_over:
            return None
        before = self._trunk
        nodes = _constant(row) if before is None else _meet(before.nodes, row.nodes)
        if sum(len(literal_of(node.op) or "") for node in nodes) < MIN_TRUNK:
            self._is_over = True
            self.close()
            return None
        if before is not None and len(nodes) == len(before.nodes) and nodes[-1] is before.nodes[-1]:
            return before
        self._trunk = RequestGraph(tuple(nodes))
        return None if before is None else self._trunk

    def keep(self, backend: Backend, options: RunOptions) -> None:
        """Have a backend keep the trunk in a row's options until the batch ends, or it shrinks.

        Raises what opening a run on the backend does.
        """
        trunk = options.trunk
        assert trunk is not None, "there is a trunk to keep"
        kept = self._kept.get(id(backend))
        if kept is not None and kept.trunk is trunk:
            return
        with self._lock:
            kept = self._kept.get(id(backend))
            if self._is_closed or (kept is not None and kept.trunk is trunk):
                return
            told = RunOptions(priority=options.priority, trunk=trunk)
            self._kept[id(backend)] = _Kept(backend, trunk, backend.open(told, _ignore))
        if kept is not None:
            kept.session.close()

    def close(self) -> None:
        """Note that the batch is over, or its trunk: nothing is kept any more. Idempotent."""
        with self._lock:
            self._is_closed = True
            kept, self._kept = self._kept, {}
        for entry in kept.values():
            entry.session.close()


def _ignore(_: Sequence[Event]) -> None:
    """Take the events of a run that has no nodes."""


def is_constant(node: GraphNode) -> bool:
    """Whether what a node appends is known before anything runs, by the text or the role alone."""
    if type(node.op) is Text:
        return literal_of(node.op) is not None
    return isinstance(node.op, RoleStart | RoleEnd)


def _constant(graph: RequestGraph) -> list[GraphNode]:
    found: list[GraphNode] = []
    for i, node in enumerate(graph.nodes):
        if node.id != i or node.parent != (i - 1 if i else None) or not is_constant(node):
            break
        found.append(node)
    return found


def _meet(trunk: Sequence[GraphNode], nodes: Sequence[GraphNode]) -> list[GraphNode]:
    """Return what both begin with; the nodes of the trunk itself as far as they are equal."""
    found: list[GraphNode] = []
    for one, other in zip(trunk, nodes, strict=False):
        if one == other:
            found.append(one)
            continue
        text, longer = literal_of(one.op), literal_of(other.op)
        is_beside = one.id == other.id and one.parent == other.parent
        if not is_beside or type(other.op) is not Text or text is None or longer is None:
            break
        if longer.startswith(text):
            found.append(one)
        elif length := _common_length(text, longer):
            found.append(GraphNode(one.id, one.address, Text((text[:length],)), one.parent))
        break
    return found


def _common_length(text: str, other: str) -> int:
    """Return how many characters two texts share at their beginnings, by bisection."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(text[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
