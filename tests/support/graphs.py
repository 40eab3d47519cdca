"""Request graphs for tests: a small builder, and random ones as a Hypothesis strategy."""

from __future__ import annotations

from hypothesis import strategies as st

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Join, JoinMode, JoinPolicy, Op, Ref, RoleEnd, RoleStart, Text

from .fake_engine import FAILING


class GraphBuilder:
    """Adds nodes one by one; `piece` gives those since the last piece."""

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self._base = 0

    def add(self, op: Op, parent: int | None = None, address: str = "") -> int:
        node_id = len(self.nodes)
        self.nodes.append(GraphNode(node_id, address or str(node_id), op, parent))
        return node_id

    def text(self, text: str, parent: int | None = None) -> int:
        return self.add(Text((text,)), parent)

    def gen(self, name: str, parent: int | None = None) -> int:
        return self.add(Gen(name), parent)

    def fork(self, parent: int | None, of: int) -> list[int]:
        gang = f"{len(self.nodes)}"
        return [self.add(Branch(i, of, gang), parent) for i in range(of)]

    def join(
        self,
        branches: list[int],
        parent: int | None,
        policy: JoinPolicy = "all",
        mode: JoinMode = "gather",
        k: int = 1,
    ) -> int:
        return self.add(Join(tuple(branches), policy, mode, k), parent)

    def piece(self) -> RequestGraph:
        base, self._base = self._base, len(self.nodes)
        return RequestGraph(tuple(self.nodes[base:]), base)


def chain(*ops: Op) -> RequestGraph:
    """Return a program of these operations, each after the one before."""
    builder = GraphBuilder()
    at: int | None = None
    for op in ops:
        at = builder.add(op, at)
    return builder.piece()


@st.composite
def graphs(draw: st.DrawFn) -> list[GraphNode]:
    """Programs of texts, references, turns, gens (some fail) and forks that join.

    No join takes the first branch to come: which that is depends on time.
    """
    builder = GraphBuilder()
    for _ in range(draw(st.integers(1, 6))):
        known = [None, *range(len(builder.nodes))]
        at = draw(st.sampled_from(known))
        kind = draw(st.sampled_from(["text", "ref", "role", "gen", "gen", "broken", "fork"]))
        if kind == "text":
            builder.text(draw(st.text(max_size=3)), at)
        elif kind == "ref" and builder.nodes:
            target = draw(st.integers(0, len(builder.nodes) - 1))
            builder.add(Text(("see ", Ref(target))), at)
        elif kind == "role":
            start = builder.add(RoleStart("user"), at)
            builder.add(RoleEnd("user"), builder.gen("inside", start))
        elif kind == "broken":
            builder.gen(FAILING, at)
        elif kind == "fork":
            names = draw(st.lists(st.sampled_from(["a", "b", FAILING]), min_size=1, max_size=3))
            tips = builder.fork(at, len(names))
            ends = [builder.gen(name, tip) for name, tip in zip(names, tips, strict=True)]
            policy: JoinPolicy = draw(st.sampled_from(["all", "collect"]))
            mode: JoinMode = draw(st.sampled_from(["gather", "append"]))
            builder.gen("after", builder.join(ends, at, policy, mode))
        else:
            builder.gen("x", at)
    return builder.nodes
