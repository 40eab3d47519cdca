"""Builds request graphs node by node, without a program; knows no workload."""

from __future__ import annotations

from umbel.lang.constraints import Regex
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Join, Op, Select, Text
from umbel.lang.sampling_params import SamplingParams


class GraphBuilder:
    """Adds nodes in the order in which a client that does one thing at a time would run them."""

    def __init__(self) -> None:
        self._nodes: list[GraphNode] = []

    def graph(self) -> RequestGraph:
        """Return what was built, checked."""
        graph = RequestGraph(tuple(self._nodes))
        graph.check()
        return graph

    def text(self, text: str, parent: int | None) -> int:
        """Append text."""
        return self.add(Text((text,)), parent)

    def gen(self, num_tokens: int, parent: int | None) -> int:
        """Generate exactly so many tokens, greedily."""
        return self.add(Gen("", SamplingParams(max_tokens=num_tokens, ignore_eos=True)), parent)

    def gen_regex(self, pattern: str, max_tokens: int, parent: int | None) -> int:
        """Generate text that a regular expression describes."""
        sampling = SamplingParams(max_tokens=max_tokens)
        return self.add(Gen("", sampling, constraint=Regex(pattern)), parent)

    def select(self, choices: tuple[str, ...], parent: int | None) -> int:
        """Score choices, and append the winner."""
        return self.add(Select("", choices), parent)

    def branch(self, index: int, of: int, parent: int | None) -> int:
        """Begin one branch of a fork of `parent`."""
        return self.add(Branch(index, of, str(parent)), parent)

    def after(self, others: tuple[int, ...], parent: int | None) -> int:
        """Go on from `parent` when others have ended too; appends nothing."""
        return self.add(Join(others), parent)

    def add(self, op: Op, parent: int | None) -> int:
        """Add any operation; its address is its place in the order."""
        node_id = len(self._nodes)
        self._nodes.append(GraphNode(node_id, str(node_id), op, parent))
        return node_id
