from __future__ import annotations

import pytest

from umbel.lang.errors import ProgramError
from umbel.lang.graph import GraphNode, RequestGraph, decode, encode
from umbel.lang.ir import Branch, Join, JoinPolicy, Op, Ref, Text


def graph(*ops: tuple[Op, int | None], base: int = 0) -> RequestGraph:
    nodes = (GraphNode(base + i, f"at{i}", op, parent) for i, (op, parent) in enumerate(ops))
    return RequestGraph(tuple(nodes), base)


FORK: list[tuple[Op, int | None]] = [
    (Text(("a",)), None),
    (Branch(0, 2, "0"), 0),
    (Branch(1, 2, "0"), 0),
]


def test_edges_may_lead_to_earlier_pieces() -> None:
    piece = graph((Text(("b", Ref(0))), 2), (Join((1, 2)), 3), base=3)
    piece.check()
    assert decode(encode(piece)) == piece


@pytest.mark.parametrize(
    "broken",
    [
        graph((Text(("a",)), 0)),
        graph((Text(("a",)), 1), (Text(("b",)), None)),
        graph((Text(("a",)), -1)),
        graph((Text((Ref(0),)), None)),
        graph((Text((Ref(-1),)), None)),
        RequestGraph((GraphNode(1, "0", Text(("a",))),)),
        RequestGraph((GraphNode(0, "0", Text(("a",))),), base=1),
    ],
)
def test_ids_are_consecutive_and_edges_lead_backwards(broken: RequestGraph) -> None:
    with pytest.raises(ProgramError, match=r"stands where|has an edge to"):
        broken.check()
    with pytest.raises(ProgramError):
        decode(encode(broken))


@pytest.mark.parametrize("policy", ["all", "collect", "any"])
@pytest.mark.parametrize("branches", [(1, 1), (1, 2, 1), (0, 1)])
def test_a_join_names_each_branch_once_and_not_its_own_prefix(
    branches: tuple[int, ...], policy: JoinPolicy
) -> None:
    graph(*FORK, (Join((1, 2), policy), 0)).check()
    with pytest.raises(ProgramError, match="twice"):
        graph(*FORK, (Join(branches, policy), 0)).check()
