"""What passes take and give: a piece of a graph, and which of the program's nodes is where in it.

Knows no pass and no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from umbel.lang.errors import ProgramError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Join, Op, Ref, Select, Text


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A piece after some passes. Its edges inside the piece have its own ids, the others the run's.

    `origins[i]` are the nodes of the program that node i stands for, first to last, each with the
    id, address and edges that the program gave it. Seeds, errors and events go by these.
    """

    graph: RequestGraph
    origins: tuple[tuple[GraphNode, ...], ...]

    @classmethod
    def unchanged(cls, piece: RequestGraph) -> Rewritten:
        """Return a piece as the program wrote it."""
        return cls(piece, tuple((node,) for node in piece.nodes))

    def check(self) -> None:
        """Raise ProgramError unless the rewrite is legal.

        Ids and edges are in order. Every node of the program is in one place, under the address of
        the first one there. Places of several, and those whose operation changed, are literal text,
        all of it. Edges lead to where the program's lead, and never into the middle of a place;
        what is read is in a place of its own. A branch may be told more of its join.
        """
        self.graph.check()
        base, count = self.graph.base, sum(map(len, self.origins))
        both = list(zip(self.graph.nodes, self.origins, strict=True))
        places = {origin.id: node.id for node, own in both for origin in own}
        if len(places) != count or places.keys() != set(range(base, base + count)):
            raise ProgramError("a node of the program is lost, or stands in two places")
        ends = {own[-1].id for own in self.origins}

        def number(edge: int) -> int:
            if edge >= base and edge not in ends:
                raise ProgramError(f"node {edge} is built on, but something was merged into it")
            return places.get(edge, edge)

        def of_value(edge: int) -> int:
            if edge >= base and len(self.origins[places[edge] - base]) > 1:
                raise ProgramError(f"node {edge} is read, but it was merged with others")
            return places.get(edge, edge)

        for node, own in both:
            expected = with_edges(own[0], number, node.id, of_value=of_value)
            literals = [literal_of(origin.op) for origin in own]
            if isinstance(expected.op, Branch) and isinstance(node.op, Branch):
                op: Op = msgspec.structs.replace(expected.op, meets=node.op.meets)
            elif None not in literals and (len(own) > 1 or isinstance(node.op, Text)):
                op = Text(("".join(map(str, literals)),))
            else:
                op = expected.op
            if len(own) > 1 and None in literals:
                raise ProgramError(f"{node.address}: more than literal text was merged")
            if node != GraphNode(node.id, own[0].address, op, expected.parent):
                raise ProgramError(f"{node.address} is not what the program wrote there")


#: a pure function; it returns what it was given where there is nothing to do
Pass = Callable[[Rewritten], Rewritten]


def literal_of(op: Op) -> str | None:
    """Return the text that an operation appends whatever happens; None where that is not known."""
    if type(op) is Text:
        parts = op.parts
        return parts[0] if len(parts) == 1 and type(parts[0]) is str else None
    if type(op) is Select and len(op.choices) == 1:
        return op.choices[0]
    return None


def with_edges(
    node: GraphNode,
    number: Callable[[int], int],
    new_id: int,
    *,
    of_value: Callable[[int], int] | None = None,
) -> GraphNode:
    """Return a node under another id, its edges renumbered; `of_value` numbers what a Ref reads."""
    op = node.op
    if type(op) is Text:
        if literal_of(op) is None:
            read = of_value or number
            op = Text(tuple(Ref(read(p.node)) if type(p) is Ref else p for p in op.parts))
    elif type(op) is Join:
        op = msgspec.structs.replace(op, branches=tuple(map(number, op.branches)))
    parent = None if node.parent is None else number(node.parent)
    return GraphNode(new_id, node.address, op, parent)
