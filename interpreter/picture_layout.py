"""Where the parts of a plan's picture stand; knows sizes and edges, no colours and no HTML.

Time runs to the right. Nodes that follow each other without a fork share a card. The branches of
a fork fan out from the end of their stem and a join gathers them; the stem itself goes straight on
through the middle of the fan. A subtree has its rows for itself, but for what follows a join: that
stands to the right of all that was joined, on the stem's own axis.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from umbel.lang.graph import GraphNode
from umbel.lang.ir import Branch, Gen, Join, RoleEnd, Select, Text

CARD_WIDTH = 224.0
PADDING = 6.0  # above a card's first row and below its last
ROW_GAP = 14.0  # between cards
MARGIN = 28.0
_LANE = 9.0  # half of what a stem needs to pass between branches
_GAP = 64.0  # between columns, before a fan widens it
_WIDEST_GAP = 190.0


@dataclass(frozen=True, slots=True)
class Row:
    """A node's place: its card, and its top and height inside the whole picture."""

    node: int
    card: int
    y: float
    height: float

    @property
    def middle(self) -> float:
        """The height at which its edges start and end."""
        return self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Card:
    """A run of nodes without a fork between them."""

    nodes: tuple[int, ...]
    x: float
    y: float
    height: float

    @property
    def axis(self) -> float:
        """The height at which it is entered and left."""
        return self.y + self.height / 2

    @property
    def right(self) -> float:
        """The x of its right side."""
        return self.x + CARD_WIDTH


@dataclass(frozen=True, slots=True)
class Edge:
    """A line between two nodes: level for `level`, then turning from `y1` to `y2` within `turn`,
    then level again.
    """

    source: int
    target: int
    x1: float
    y1: float
    x2: float
    y2: float
    level: float
    turn: float


@dataclass(frozen=True, slots=True)
class Layout:
    """A picture's geometry. `stems` are prefix edges, `joins` and `values` data edges."""

    width: float
    height: float
    cards: tuple[Card, ...]
    rows: tuple[Row, ...]  # by node
    stems: tuple[Edge, ...]
    joins: tuple[Edge, ...]
    values: tuple[Edge, ...]


class _Block(NamedTuple):
    """Subtrees with a common axis, and what they need above and below it."""

    offsets: dict[int, float]  # by segment
    up: float
    down: float

    def moved(self, offset: float) -> _Block:
        """Return the block with its axis at `offset` of the old one."""
        offsets = {segment: at - offset for segment, at in self.offsets.items()}
        return _Block(offsets, self.up + offset, self.down - offset)


@dataclass(slots=True)
class _Segment:
    nodes: list[int]
    parent: int | None  # segment
    column: int = 0
    children: list[int] = field(default_factory=list)
    height: float = 0.0
    last_column: int = 0  # of its subtree
    up: float = 0.0  # what its subtree needs above its axis
    down: float = 0.0
    offsets: dict[int, float] = field(default_factory=dict)  # children's axes, from its own
    axis: float = 0.0


def lay_out(nodes: Sequence[GraphNode]) -> Layout:
    """Place the nodes of a whole graph."""
    segments, segment_of = _segments(nodes)
    _choose_columns(nodes, segments, segment_of)
    for segment in segments:
        segment.height = 2 * PADDING + sum(row_height(nodes[i]) for i in segment.nodes)
    for index in reversed(range(len(segments))):
        _stack(nodes, segments, segment_of, index)
    y = MARGIN
    for segment in segments:
        if segment.parent is None:
            segment.axis = y + segment.up
            y = segment.axis + segment.down + ROW_GAP
        for child, offset in segment.offsets.items():
            segments[child].axis = segment.axis + offset
    lefts = _column_lefts(segments)
    cards = tuple(
        Card(tuple(s.nodes), lefts[s.column], s.axis - s.height / 2, s.height) for s in segments
    )
    rows = _rows(nodes, cards)
    stems, joins, values = _edges(nodes, cards, rows)
    return Layout(
        max((card.right for card in cards), default=0.0) + MARGIN,
        max((card.y + card.height for card in cards), default=0.0) + MARGIN,
        cards,
        rows,
        stems,
        joins,
        values,
    )


def row_height(node: GraphNode) -> float:
    """Return the height of a node's row."""
    match node.op:
        case Gen() | Select():
            return 40.0
        case Text():
            return 21.0
        case RoleEnd():
            return 9.0
        case _:
            return 19.0


def _segments(nodes: Sequence[GraphNode]) -> tuple[list[_Segment], list[int]]:
    num_children = [0] * len(nodes)
    for node in nodes:
        if node.parent is not None:
            num_children[node.parent] += 1
    segments: list[_Segment] = []
    segment_of: list[int] = []
    for node in nodes:
        parent = node.parent
        if parent is None or num_children[parent] > 1 or isinstance(node.op, Branch | Join):
            segment_of.append(len(segments))
            segments.append(_Segment([node.id], None if parent is None else segment_of[parent]))
            if parent is not None:
                segments[segment_of[parent]].children.append(len(segments) - 1)
        else:
            segment_of.append(segment_of[parent])
            segments[segment_of[parent]].nodes.append(node.id)
    return segments, segment_of


def _choose_columns(
    nodes: Sequence[GraphNode], segments: list[_Segment], segment_of: list[int]
) -> None:
    """Put each segment right of its parent, and a join right of all that grew on its branches."""
    for segment in segments:
        parent = segment.parent
        column = 0 if parent is None else segments[parent].column + 1
        op = nodes[segment.nodes[0]].op
        if isinstance(op, Join):
            for root in _roots(nodes, segments, segment_of, op):
                column = max(column, segments[root].last_column + 1)
        segment.column = segment.last_column = column
        at = parent
        while at is not None and segments[at].last_column < column:
            segments[at].last_column = column
            at = segments[at].parent


def _roots(
    nodes: Sequence[GraphNode], segments: list[_Segment], segment_of: list[int], join: Join
) -> list[int]:
    """Return the segments that a join's branches begin with."""
    roots: list[int] = []
    for last in join.branches:
        at: int | None = segment_of[last]
        while at is not None and not isinstance(nodes[segments[at].nodes[0]].op, Branch):
            at = segments[at].parent
        root = segment_of[last] if at is None else at
        if root not in roots:
            roots.append(root)
    return roots


def _stack(
    nodes: Sequence[GraphNode], segments: list[_Segment], segment_of: list[int], index: int
) -> None:
    """Place a segment's children around its axis; their own subtrees are placed already."""
    segment = segments[index]
    joins: dict[int, tuple[int, list[int]]] = {}  # first branch -> join, branches
    placed: set[int] = set()
    for child in segment.children:
        op = nodes[segments[child].nodes[0]].op
        if not isinstance(op, Join):
            continue
        roots = [r for r in _roots(nodes, segments, segment_of, op) if r in segment.children]
        is_clear = all(segments[r].last_column < segments[child].column for r in roots)
        if roots and is_clear and placed.isdisjoint(roots):
            joins[roots[0]] = (child, roots)
            placed.update(roots, (child,))
    blocks: list[_Block] = []
    for child in segment.children:
        if child in joins:
            join, roots = joins[child]
            blocks.append(_fan(segments, roots, join))
        elif child not in placed:
            blocks.append(_Block({child: 0.0}, segments[child].up, segments[child].down))
    segment.up = segment.down = segment.height / 2
    if blocks:
        pile, axes = _pile(blocks)
        pile = pile.moved((axes[0] + axes[-1]) / 2)
        segment.offsets = pile.offsets
        segment.up, segment.down = max(segment.up, pile.up), max(segment.down, pile.down)


def _fan(segments: list[_Segment], branches: list[int], join: int) -> _Block:
    """Place branches on both sides of the lane on which their stem goes on to the join."""
    blocks = [_Block({b: 0.0}, segments[b].up, segments[b].down) for b in branches]
    half = (len(blocks) + 1) // 2
    pile, axes = _pile([*blocks[:half], _Block({join: 0.0}, _LANE, _LANE), *blocks[half:]])
    offsets, up, down = pile.moved(axes[half])
    return _Block(offsets, max(up, segments[join].up), max(down, segments[join].down))


def _pile(blocks: Sequence[_Block]) -> tuple[_Block, list[float]]:
    """Put blocks below each other; return them as one, with their axes from the first one's."""
    offsets: dict[int, float] = {}
    axes: list[float] = []
    bottom = -blocks[0].up - ROW_GAP
    for block in blocks:
        axis = bottom + ROW_GAP + block.up
        axes.append(axis)
        offsets |= {segment: axis + at for segment, at in block.offsets.items()}
        bottom = axis + block.down
    return _Block(offsets, blocks[0].up, bottom), axes


def _column_lefts(segments: Sequence[_Segment]) -> list[float]:
    """Return each column's x; the more a fan spreads, the wider the gap it has to do so."""
    gaps = [_GAP] * (max((s.column for s in segments), default=0) + 1)
    for segment in segments:
        spread = max(map(abs, segment.offsets.values()), default=0.0)
        gaps[segment.column] = max(gaps[segment.column], min(_GAP + spread / 5, _WIDEST_GAP))
    lefts = [MARGIN]
    for gap in gaps:
        lefts.append(lefts[-1] + CARD_WIDTH + gap)
    return lefts


def _rows(nodes: Sequence[GraphNode], cards: Sequence[Card]) -> tuple[Row, ...]:
    rows: dict[int, Row] = {}
    for index, card in enumerate(cards):
        y = card.y + PADDING
        for node in card.nodes:
            height = row_height(nodes[node])
            rows[node] = Row(node, index, y, height)
            y += height
    return tuple(rows[i] for i in range(len(nodes)))


def _edges(
    nodes: Sequence[GraphNode], cards: Sequence[Card], rows: Sequence[Row]
) -> tuple[tuple[Edge, ...], tuple[Edge, ...], tuple[Edge, ...]]:
    """Return the lines between cards: stems turn where they start, joins where they end."""
    stems: list[Edge] = []
    joins: list[Edge] = []
    values: list[Edge] = []
    lefts = sorted({card.x for card in cards})
    for node in nodes:
        row, card = rows[node.id], cards[rows[node.id].card]
        if node.parent is not None and rows[node.parent].card != row.card:
            start = cards[rows[node.parent].card]
            turn = lefts[bisect_right(lefts, start.x)] - start.right
            stems.append(
                Edge(node.parent, node.id, start.right, start.axis, card.x, card.axis, 0.0, turn)
            )
        for dep in dict.fromkeys(node.deps):
            source, start = rows[dep], cards[rows[dep].card]
            if not isinstance(node.op, Join):
                turn = card.x - start.right
                values.append(
                    Edge(dep, node.id, start.right, source.middle, card.x, row.middle, 0.0, turn)
                )
                continue
            y = start.axis if dep == start.nodes[-1] else source.middle
            turn = card.x - (lefts[bisect_left(lefts, card.x) - 1] + CARD_WIDTH)
            level = card.x - turn - start.right
            joins.append(Edge(dep, node.id, start.right, y, card.x, card.axis, level, turn))
    return tuple(stems), tuple(joins), tuple(values)
