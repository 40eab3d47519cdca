"""The ways in which a workload is run: settings of the engine, graphs rewritten, or submitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Join, Op, Ref, Select, Text

from .graph_builder import GraphBuilder

Submission = Literal["graph", "nodes", "requests"]


def unchanged(graph: RequestGraph) -> RequestGraph:
    """Return the graph as it is."""
    return graph


def separate_choices(graph: RequestGraph) -> RequestGraph:
    """Return the graph with each select's choices as sequences of their own, not as one tree.

    Each choice is a branch that is prefilled and then asked for one token, which is how engines
    without token trees score a choice. The first choice is appended, whatever the scores.
    """
    builder = GraphBuilder()
    new_id: dict[int, int] = {}
    for node in graph.nodes:
        parent = None if node.parent is None else new_id[node.parent]
        if not isinstance(node.op, Select):
            new_id[node.id] = builder.add(_with_edges(node.op, new_id), parent)
            continue
        ends = []
        for index, choice in enumerate(node.op.choices):
            branch = builder.branch(index, len(node.op.choices), parent)
            ends.append(builder.gen(1, builder.text(choice, branch)))
        joined = builder.after(tuple(ends), parent)
        new_id[node.id] = builder.text(node.op.choices[0], joined)
    return builder.graph()


def _with_edges(op: Op, new_id: Mapping[int, int]) -> Op:
    """Return an operation that reads the same nodes under their new ids."""
    match op:
        case Text():
            parts = (Ref(new_id[p.node]) if isinstance(p, Ref) else p for p in op.parts)
            return Text(tuple(parts))
        case Join():
            return msgspec.structs.replace(op, branches=tuple(new_id[b] for b in op.branches))
        case _:
            return op


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a workload.

    `submission`: whole graphs; or node by node, each when the one before it has ended; or each
    gen and select as a program of its own, so that the engine knows of nothing to come.
    """

    name: str
    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    rewrite: Callable[[RequestGraph], RequestGraph] = unchanged
    submission: Submission = "graph"


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("default", "the engine's own settings, whole graphs"),
        Arm("lru", "what was used longest ago is evicted first", {"eviction": "lru"}),
        Arm("no-cache", "no prefix is kept or shared", {"prefix_cache": False}),
        Arm("no-tree", "choices as separate sequences", rewrite=separate_choices),
        Arm("fcfs", "requests in the order in which they came", {"policy": "fcfs"}),
        Arm("random", "requests in random order", {"policy": "random"}),
        Arm("no-parallel", "one branch after the other", submission="nodes"),
        Arm(
            "no-graph",
            "one request at a time, as a plain client would: no graph, no tree",
            rewrite=separate_choices,
            submission="requests",
        ),
    )
}
