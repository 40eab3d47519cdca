"""Turns selects of one choice into the text that they append; needs no backend to decide.

No backend scores them either: the point is that the text then merges with its neighbours, so that
a literal run is one node.
"""

from __future__ import annotations

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Select, Text

from .rewritten import Rewritten


def fold_one_choice_selects(piece: Rewritten) -> Rewritten:
    """Replace selects that have nothing to choose by their choice."""
    nodes = piece.graph.nodes
    if not any(can_fold(node) for node in nodes):
        return piece
    folded = tuple(
        GraphNode(node.id, node.address, Text((node.op.choices[0],)), node.parent)
        if isinstance(node.op, Select) and can_fold(node)
        else node
        for node in nodes
    )
    return Rewritten(RequestGraph(folded, piece.graph.base), piece.origins)


def can_fold(node: GraphNode) -> bool:
    """Whether a select has one choice: it runs no model, so its timeout and terminator are idle."""
    return type(node.op) is Select and len(node.op.choices) == 1
