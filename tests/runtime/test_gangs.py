"""Which branches the scheduler is told to start together: those that meet in a join."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.engine_harness import Collector, drive, make_engine
from tests.support.graphs import GraphBuilder

from umbel.interpreter.passes import rewrite
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen
from umbel.lang.results import RunOptions
from umbel.runtime.request import Request


def forked(joined: Sequence[int], *, nested: bool = False) -> RequestGraph:
    """Three branches of a gen each, of which a join waits for some."""
    builder = GraphBuilder()
    ends = [builder.gen(f"g{i}", b) for i, b in enumerate(builder.fork(builder.text("abc"), 3))]
    if nested:
        for branch in builder.fork(ends[0], 2):
            builder.gen("n", branch)
    if joined:
        builder.join([ends[i] for i in joined], 0)
    return rewrite(builder.piece()).graph


def told(pieces: Sequence[RequestGraph], *, is_whole: bool) -> dict[str, bool]:
    """Return which gens are to start together, by their address."""
    engine = make_engine()
    requests: list[Request] = []
    add = engine.core.scheduler.add

    def note(request: Request) -> None:
        requests.append(request)
        add(request)

    engine.core.scheduler.add = note  # type: ignore[method-assign]
    session = engine.open(RunOptions(is_whole=is_whole), Collector())
    for piece in pieces:
        session.extend(piece)
    session.close()
    drive(engine)
    assert all(request.gang for request in requests), "siblings stay neighbours in the queue"
    nodes = [node for piece in pieces for node in piece.nodes]
    return {nodes[request.node_id].address: request.starts_together for request in requests}


def gens_of(graph: RequestGraph) -> list[str]:
    return [node.address for node in graph.nodes if isinstance(node.op, Gen)]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("joined", [[0, 1, 2], [0, 2]])
def test_branches_start_together_that_a_join_waits_for(joined: list[int], is_whole: bool) -> None:
    graph = forked(joined)
    assert told([graph], is_whole=is_whole) == {
        address: i in joined for i, address in enumerate(gens_of(graph))
    }


def test_branches_that_never_meet_need_not_start_together() -> None:
    assert set(told([forked([])], is_whole=True).values()) == {False}


def test_branches_of_a_run_that_may_grow_may_still_meet() -> None:
    assert set(told([forked([])], is_whole=False).values()) == {True}


def test_a_fork_in_a_branch_is_a_gang_of_its_own() -> None:
    graph = forked([0, 1, 2], nested=True)
    *outer, first, second = gens_of(graph)
    found = told([graph], is_whole=True)
    assert [found[address] for address in outer] == [True] * 3
    assert not found[first]
    assert not found[second]
