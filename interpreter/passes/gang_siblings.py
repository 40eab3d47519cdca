"""Marks the branches of which none is of use without the others: a join waits for all of them.

Siblings of one fork are one gang by their `Branch.gang`. Which gangs end together only the join
tells, and a scheduler that admits a branch wants to know that before.
"""

from __future__ import annotations

import msgspec

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Join

from .rewritten import Rewritten


def gang_siblings(piece: Rewritten) -> Rewritten:
    """Set `Branch.meets` on branches that a join of the same piece waits for."""
    graph = piece.graph
    marked = {
        first.id
        for node in graph.nodes
        if isinstance(node.op, Join) and can_gang(node.op)
        for last in node.op.branches
        if (first := _first_of(graph, last)) is not None
    }
    if not marked:
        return piece
    nodes = tuple(_marked(node) if node.id in marked else node for node in graph.nodes)
    return Rewritten(RequestGraph(nodes, graph.base), piece.origins)


def can_gang(join: Join) -> bool:
    """Whether a join waits for every one of several branches."""
    return len(join.branches) > 1 and join.policy != "any"


def _first_of(graph: RequestGraph, last: int) -> GraphNode | None:
    """Return the Branch node of the branch that ends here, if it is in this piece."""
    at: int | None = last
    while at is not None and at >= graph.base:
        node = graph.nodes[at - graph.base]
        if isinstance(node.op, Branch):
            return node
        at = node.parent
    return None


def _marked(node: GraphNode) -> GraphNode:
    assert isinstance(node.op, Branch)
    op = msgspec.structs.replace(node.op, meets=True)
    return GraphNode(node.id, node.address, op, node.parent)
