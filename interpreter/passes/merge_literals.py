"""Makes one node of literal texts that follow each other and that nothing else looks at.

Every node costs its bookkeeping at the backend and an event back, whatever is in it. Numbering the
others anew costs as much, so a piece is left alone unless most of it would go: a program that
appends its prompt in many pieces. Token ids don't change: a literal run is encoded whole, however
it was appended (rule 6).
"""

from __future__ import annotations

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Text

from .rewritten import Rewritten, literal_of, with_edges

#: a piece is merged where so many of its nodes go away, and half of them (measured: from 8 texts
#: before a gen on it pays, and up to 4 it costs)
MIN_MERGED = 6


def merge_literals(piece: Rewritten, min_merged: int = MIN_MERGED) -> Rewritten:
    """Merge chains of literal texts, and number the nodes anew; `min_merged` of 1: wherever any."""
    base, nodes = piece.graph.base, piece.graph.nodes
    if len(nodes) <= min_merged:
        return piece
    heads = _heads(piece.graph, max(min_merged, len(nodes) // 2) if min_merged > 1 else 1)
    if not heads:
        return piece
    numbers: list[int] = []  # of the nodes of this piece

    def number(edge: int) -> int:
        return numbers[edge - base] if edge >= base else edge

    merged: list[GraphNode] = []
    texts: dict[int, list[str]] = {}  # by new id, where several came together
    origins: list[tuple[GraphNode, ...]] = []
    for node, own in zip(nodes, piece.origins, strict=True):
        if node.id in heads:
            assert node.parent is not None, "it continues a text"
            at = number(node.parent)
            if at not in texts:
                texts[at] = [literal_of(merged[at - base].op) or ""]
            texts[at].append(literal_of(node.op) or "")
            origins[at - base] += own
        else:
            at = base + len(merged)
            merged.append(node if at == node.id else with_edges(node, number, at))
            origins.append(own)
        numbers.append(at)
    for at, parts in texts.items():
        node = merged[at - base]
        merged[at - base] = GraphNode(node.id, node.address, Text(("".join(parts),)), node.parent)
    return Rewritten(RequestGraph(tuple(merged), base), tuple(origins))


def _heads(graph: RequestGraph, least: int) -> set[int]:
    """Return the nodes to merge into the text before them; none where they are too few."""
    base, nodes = graph.base, graph.nodes
    found = []
    before = False  # whether the node before is a literal: most chains are written in one go
    for node in nodes:
        is_literal = type(node.op) is Text and can_merge(node)
        if is_literal and (before or node.parent != node.id - 1):
            parent = node.parent
            if parent is not None and parent >= base and can_merge(nodes[parent - base]):
                found.append(node)
        before = is_literal
    if len(found) < least:
        return set()
    num_users = [0] * len(nodes)
    read: set[int] = set()  # whose text goes into others
    for node in nodes:
        parent = node.parent
        if parent is not None and parent >= base:
            num_users[parent - base] += 1
        for edge in node.deps:
            if edge >= base:
                num_users[edge - base] += 1
        if type(node.op) is Text:
            read.update(node.deps)
    return {
        node.id
        for node in found
        if node.id not in read and node.parent is not None and num_users[node.parent - base] == 1
    }


def can_merge(node: GraphNode) -> bool:
    """Whether a node is literal text: it fails only with what it continues.

    So of two that follow each other neither can fail alone. Besides, nothing else may build on the
    first, and nothing may read the text of either.
    """
    return type(node.op) is Text and literal_of(node.op) is not None
