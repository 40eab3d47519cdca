"""Says in words how a node differs from the one that was recorded; decides nothing by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from umbel.lang.graph import GraphNode
from umbel.lang.ir import Join, Ref, Text

_SHOWN = 30  # characters of a value on either side of the place where it differs


def difference(
    asked: GraphNode,
    asked_nodes: Sequence[GraphNode],
    recorded: GraphNode,
    recorded_nodes: Sequence[GraphNode],
) -> str:
    """Return the first thing that differs; other nodes are compared by their addresses."""
    before = dict(_facts(recorded, recorded_nodes))
    for name, value in _facts(asked, asked_nodes):
        if name not in before or before[name] != value:
            return f"{name} is {_around(value, before.get(name, ''))}, " + (
                f"and was {_around(before.get(name, ''), value)}"
            )
    return "it builds on other nodes"


def _facts(node: GraphNode, nodes: Sequence[GraphNode]) -> Iterator[tuple[str, str]]:
    op = node.op
    yield "the operation", type(op).__name__
    if isinstance(op, Text):
        parts = (f"⟨{nodes[p.node].address}⟩" if isinstance(p, Ref) else p for p in op.parts)
        yield "the text", "".join(parts)
    elif isinstance(op, Join):
        yield "the rule", f"{op.policy} {op.mode} {op.k}"
        yield "what it joins", ", ".join(nodes[branch].address for branch in op.branches)
    else:
        yield from _fields(op)
    yield "what it continues", "nothing" if node.parent is None else nodes[node.parent].address


def _fields(value: msgspec.Struct) -> Iterator[tuple[str, str]]:
    for name in value.__struct_fields__:
        item = getattr(value, name)
        if isinstance(item, msgspec.Struct):
            yield name, type(item).__name__
            yield from _fields(item)
        else:
            yield name, item if isinstance(item, str) else repr(item)


def _around(value: str, other: str) -> str:
    """Return the part of a value in which it differs from another."""
    at = next((i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), None)
    at = min(len(value), len(other)) if at is None else at
    start, end = max(at - _SHOWN, 0), at + _SHOWN
    if start < 6:
        start = 0
    shown = repr(value[start:end])
    return f"{'...' if start else ''}{shown}{'...' if end < len(value) else ''}"
