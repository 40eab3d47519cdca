"""Who will still read a place of a graph, and when; against a plain walk over the whole graph."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine_harness import graphs
from tests.support.graphs import GraphBuilder

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Join, Select, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.graph_readers import GraphReaders

GEN = Gen("g", SamplingParams(max_tokens=5))


def is_read(nodes: tuple[GraphNode, ...], place: int, ended: set[int], is_open: bool) -> bool:
    """The definition, walked anew each time."""
    joined = {b for node in nodes if isinstance(node.op, Join) for b in node.op.branches}
    children = [node for node in nodes if node.parent == place]
    if is_open and place not in joined and all(isinstance(c.op, Branch) for c in children):
        return True
    for child in children:
        if isinstance(child.op, Gen | Select):
            if child.id not in ended:
                return True
        elif is_read(nodes, child.id, ended, is_open):
            return True
    return False


@given(graphs(), st.data())
def test_a_place_is_read_as_long_as_a_walk_over_the_graph_finds_a_reader(
    graph: RequestGraph, data: st.DataObject
) -> None:
    readers = GraphReaders()
    added: tuple[GraphNode, ...] = ()
    ended: set[int] = set()
    is_open = True
    unread: set[int] = set()

    def check() -> None:
        for node in added:
            expected = is_read(added, node.id, ended, is_open)
            assert (readers.place_read(node.id) == node.id) == expected
            if expected:
                unread.discard(node.id)
            else:
                assert node.id in unread, "nobody was told that the place is read no more"

    while True:
        todo = [n.id for n in added if isinstance(n.op, Gen | Select) and n.id not in ended]
        rest = len(graph.nodes) - len(added)
        if todo and (not rest or data.draw(st.booleans())):
            node = data.draw(st.sampled_from(todo))
            ended.add(node)
            unread |= set(readers.ended(node))
            assert readers.ended(node) == [], "the second time changes nothing"
        elif rest:
            piece = graph.nodes[len(added) :][: data.draw(st.integers(1, rest))]
            unread -= {n.parent for n in piece if n.parent is not None}
            unread |= set(readers.add(piece).unread)
            added += piece
        elif is_open:
            is_open = False
            unread |= set(readers.close())
        else:
            break
        check()
    assert all(readers.place_read(node.id) is None for node in added)


def test_the_graph_says_how_many_steps_are_left() -> None:
    builder = GraphBuilder()
    stem = builder.add(Text(("a",)), None)
    first = builder.add(GEN, stem)
    second = builder.add(GEN, builder.add(Text(("b",)), first))
    third = builder.add(Select("s", ("x", "y")), second)
    readers = GraphReaders()
    assert readers.add(builder.piece().nodes).read == []
    assert readers.steps_left(stem) == 0
    assert readers.steps_left(first) == 5
    assert readers.steps_left(second) == 10
    assert readers.steps_left(third) is None  # whoever goes on from there
    readers.ended(first)
    assert readers.steps_left(second) == 5


def test_a_branch_that_waits_for_others_is_read_after_them() -> None:
    builder = GraphBuilder()
    heads = [builder.add(Branch(i, 2, "fork"), None) for i in range(2)]
    ends = [builder.add(GEN, head) for head in heads]
    join = builder.add(Join((ends[0],)), ends[1])
    late = builder.add(GEN, join)
    readers = GraphReaders()
    readers.add(builder.piece().nodes)
    assert readers.ended(ends[1]) == [heads[1]]
    assert readers.place_read(ends[1]) == ends[1]
    assert readers.steps_left(ends[1]) == 0
    assert readers.ended(late) == [join, ends[1]]  # what comes now goes on from its end
    assert readers.place_read(late) == late
    readers.ended(ends[0])
    assert readers.place_read(ends[0]) is None  # joined: nobody appends to it


def test_more_of_the_graph_says_who_reads_a_tail() -> None:
    builder = GraphBuilder()
    first = builder.add(GEN, None)
    readers = GraphReaders()
    readers.add(builder.piece().nodes)
    readers.ended(first)
    assert readers.steps_left(first) is None
    text = builder.add(Text(("tool",)), first)
    assert readers.add(builder.piece().nodes).read == []
    builder.add(GEN, text)
    assert readers.add(builder.piece().nodes).read == [text, first]
    assert readers.steps_left(first) == 0


def test_a_place_whose_readers_failed_is_read_no_more() -> None:
    builder = GraphBuilder()
    first = builder.add(GEN, None)
    text = builder.add(Text(("b",)), first)
    second = builder.add(GEN, text)
    readers = GraphReaders()
    readers.add(builder.piece().nodes)
    readers.ended(first)
    assert readers.ended(second, failed=True) == [second, text, first]
