"""GraphState against a plain model of the rules: each node ends once, and failures spread right."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbel.lang.errors import BackendError, CancelledError, GenerationError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.graph_state import Changes, GraphState, NodeStatus
from umbel.lang.ir import Branch, Gen, Join, JoinPolicy, Op, Ref, Text
from umbel.lang.results import NodeResult


class Growing(RuleBasedStateMachine):
    """Grows a graph of several sequences while its nodes end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = GraphState()
        self.tails: list[int | None] = [None]  # sequences that can be appended to
        self.terminal: dict[int, str] = {}  # nodes reported as ended, and how
        self.ready: set[int] = set()  # reported ready, not ended
        self.pending: list[GraphNode] = []

    def _add(self, op: Op, parent: int | None) -> int:
        node_id = len(self.state.nodes) + len(self.pending)
        self.pending.append(GraphNode(node_id, str(node_id), op, parent))
        return node_id

    def _take(self, changes: Changes) -> None:
        for node, error in changes.failed:
            assert node not in self.terminal, "a node ends once"
            assert isinstance(error, GenerationError | CancelledError | BackendError)
            self.terminal[node] = "failed"
        for node in changes.cancelled:
            assert node in self.ready, "only started nodes have to be stopped"
            assert self.terminal[node] == "failed"
        self.ready -= set(self.terminal)
        for node in changes.ready:
            assert node not in self.ready, "a node becomes ready once"
            assert node not in self.terminal, "what is ready has not failed"
            self.ready.add(node)

    @rule(data=st.data(), kind=st.sampled_from(["text", "gen", "ref"]))
    def append(self, data: st.DataObject, kind: str) -> None:
        at = data.draw(st.integers(0, len(self.tails) - 1))
        known = len(self.state.nodes) + len(self.pending)
        op: Op = Gen("x") if kind == "gen" else Text(("t",))
        if kind == "ref" and known:
            op = Text(("t", Ref(data.draw(st.integers(0, known - 1)))))
        self.tails[at] = self._add(op, self.tails[at])

    @rule(
        data=st.data(),
        of=st.integers(1, 3),
        policy=st.sampled_from(["all", "collect", "any"]),
        length=st.integers(0, 2),
    )
    def fork_and_join(self, data: st.DataObject, of: int, policy: JoinPolicy, length: int) -> None:
        at = data.draw(st.integers(0, len(self.tails) - 1))
        parent = self.tails[at]
        lasts = []
        for index in range(of):
            last = self._add(Branch(index, of, f"g{parent}"), parent)
            for _ in range(length):
                last = self._add(Gen("y"), last)
            lasts.append(last)
        k = data.draw(st.integers(1, of)) if policy == "any" else 1
        self.tails[at] = self._add(Join(tuple(lasts), policy, "append", k), parent)

    @rule()
    def start_another_sequence(self) -> None:
        self.tails.append(None)

    @precondition(lambda self: self.pending)
    @rule()
    def hand_over(self) -> None:
        piece = RequestGraph(tuple(self.pending), len(self.state.nodes))
        piece.check()
        self.pending = []
        self._take(self.state.add(piece))

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.ready)))
        op = self.state.nodes[node].op
        result = (
            self.state.join_result(node) if isinstance(op, Join) else NodeResult(text=f"<{node}>")
        )
        self.ready.discard(node)
        self.terminal[node] = "finished"
        self._take(self.state.finish(node, result))

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.ready)))
        self._take(self.state.fail(node, BackendError("down")))

    @precondition(lambda self: self.state.nodes)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        nodes = st.integers(0, len(self.state.nodes) - 1)
        self._take(self.state.cancel(data.draw(st.lists(nodes, max_size=3))))

    @invariant()
    def statuses_are_what_was_reported(self) -> None:
        status = self.state.status
        ended = {i for i, s in enumerate(status) if s in (NodeStatus.FINISHED, NodeStatus.FAILED)}
        assert ended == set(self.terminal)
        assert {i for i, s in enumerate(status) if s is NodeStatus.READY} == self.ready
        assert self.state.unfinished() == sorted(set(range(len(status))) - ended)
        assert self.state.is_done == (len(ended) == len(status))
        assert set(self.state.results) == {i for i in ended if self.terminal[i] == "finished"}
        assert set(self.state.errors) == {i for i in ended if self.terminal[i] == "failed"}

    @invariant()
    def every_node_stands_where_its_edges_put_it(self) -> None:
        status = self.state.status
        for node in self.state.nodes:
            edges = [*node.deps, *([] if node.parent is None else [node.parent])]
            states = [status[e] for e in edges]
            now = status[node.id]
            if isinstance(node.op, Join) and node.op.policy != "all":
                self._check_lenient(node, node.op)
            elif NodeStatus.FAILED in states:
                assert now is NodeStatus.FAILED
            elif all(s is NodeStatus.FINISHED for s in states):
                assert now is not NodeStatus.WAITING
            else:
                # it can have been cancelled on its own
                assert now in (NodeStatus.WAITING, NodeStatus.FAILED)

    def _check_lenient(self, node: GraphNode, op: Join) -> None:
        status = self.state.status
        branches = [status[b] for b in op.branches]
        now = status[node.id]
        parent = NodeStatus.FINISHED if node.parent is None else status[node.parent]
        num_finished = branches.count(NodeStatus.FINISHED)
        num_ended = num_finished + branches.count(NodeStatus.FAILED)
        if parent is NodeStatus.FAILED:
            assert now is NodeStatus.FAILED
        elif now in (NodeStatus.READY, NodeStatus.FINISHED):
            assert num_ended == len(branches)
            assert op.policy == "collect" or num_finished >= op.k
        elif now is NodeStatus.WAITING:
            assert num_ended < len(branches) or parent is not NodeStatus.FINISHED
            if op.policy == "any" and parent is NodeStatus.FINISHED:
                num_failed = num_ended - num_finished
                assert num_finished < op.k <= len(branches) - num_failed

    def teardown(self) -> None:
        if self.pending:
            self.hand_over()
        self._take(self.state.cancel())
        assert self.state.is_done
        assert set(self.terminal) == set(range(len(self.state.nodes)))


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_rule_8_append_mode_joins_texts_in_branch_order() -> None:
    state = GraphState()
    branches = [GraphNode(i, f"f[{i}]", Branch(i, 3, "f")) for i in range(3)]
    texts = [GraphNode(3 + i, f"f[{i}].0", Gen("v"), parent=i) for i in range(3)]
    join = GraphNode(6, "0", Join((3, 4, 5), mode="append"))
    state.add(RequestGraph((*branches, *texts, join)))
    for node in range(3):
        state.finish(node, NodeResult())
    for node, text in ((5, "c"), (3, "a"), (4, "b")):
        changes = state.finish(node, NodeResult(text=text))
    assert changes.ready == [6]
    assert state.join_result(6).text == "abc"


def test_rule_8_any_cancels_the_losers_with_all_they_forked() -> None:
    state = GraphState()
    ops: list[tuple[Op, int | None]] = [
        (Branch(0, 2, "f"), None),
        (Branch(1, 2, "f"), None),
        (Gen("a"), 0),
        (Branch(0, 1, "g"), 1),  # forked from the losing branch, and not on its own path
        (Gen("b"), 3),
        (Gen("c"), 1),
        (Join((2, 5), policy="any"), None),
    ]
    nodes = [GraphNode(i, str(i), op, parent) for i, (op, parent) in enumerate(ops)]
    state.add(RequestGraph(tuple(nodes)))
    for node in (0, 1, 3):
        state.finish(node, NodeResult())
    changes = state.finish(2, NodeResult(text="won"))
    assert changes.ready == [6]
    assert sorted(changes.cancelled) == [4, 5]
    assert all(isinstance(state.errors[node], CancelledError) for node in (4, 5))


def test_rule_3_a_poisoned_node_names_the_first_failure_and_its_cause() -> None:
    state = GraphState()
    chain: list[Op] = [Gen("a"), Text(("t",)), Gen("b")]
    nodes = [GraphNode(i, f"{i}", op, i - 1 if i else None) for i, op in enumerate(chain)]
    state.add(RequestGraph(tuple(nodes)))
    cause = BackendError("down")
    changes = state.fail(0, cause)
    assert [node for node, _ in changes.failed] == [0, 1, 2]
    error = state.errors[2]
    assert isinstance(error, GenerationError)
    assert error.address == "0"
    assert error.__cause__ is cause
