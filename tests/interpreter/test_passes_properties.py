"""A pass changes no output: with it, runs give the same texts, values, errors, ids and events."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.interpreter.conftest import MakeBackend
from tests.support.engine_harness import GRAMMAR, TOKENIZER, drive, make_engine, make_runner
from tests.support.engine_harness import graphs as engine_graphs
from tests.support.graphs import GraphBuilder

import umbel as ub
from umbel.interpreter import graph_run
from umbel.interpreter.backends.base import Session
from umbel.interpreter.backends.local import LocalBackend
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply
from umbel.interpreter.graph_run import GraphRun
from umbel.interpreter.passes import (
    PASSES,
    BatchTrunk,
    Pass,
    Rewritten,
    common_trunk,
    fold_one_choice_selects,
    gang_siblings,
    merge_literals,
    open_session,
    rewrite,
)
from umbel.interpreter.passes.common_trunk import MIN_TRUNK, has_trunk
from umbel.lang.ended_run import EndedRun
from umbel.lang.errors import ProgramError, WireError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Join, JoinPolicy, Op, Ref, RoleStart, Select, Text
from umbel.lang.results import (
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    NodeStarted,
    RunOptions,
    TextDelta,
    Timings,
    Usage,
)
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine

from .random_programs import Outcome, Step, Writer, answer, outcome_of, programs

# in small pieces merging does not pay: here it is always done
merge_always = partial(merge_literals, min_merged=1)
ALL: tuple[Pass, ...] = (fold_one_choice_selects, gang_siblings, merge_always)
EACH: list[tuple[Pass, ...]] = [*((one,) for one in ALL), ALL, PASSES]
NAMES = ["fold", "gang", "merge", "all", "as they run"]


class Told:
    """What a run's owner is told, without times and cache counts."""

    def __init__(self) -> None:
        self.outcomes: dict[int, object] = {}
        self.deltas: dict[int, str] = {}
        self.started: list[int] = []

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case NodeStarted(node):
                    self.started.append(node)
                case TextDelta(node, text):
                    assert node not in self.outcomes
                    self.deltas[node] = self.deltas.get(node, "") + text
                case NodeFinished(node, result):
                    assert node not in self.outcomes, "a second end"
                    self.outcomes[node] = plain(result)
                case NodeFailed(node, error):
                    assert node not in self.outcomes, "a second end"
                    self.outcomes[node] = error

    def as_tuple(self) -> tuple[object, ...]:
        return self.outcomes, self.deltas, sorted(self.started)


def plain(result: NodeResult) -> NodeResult:
    usage = Usage(
        prompt_tokens=result.usage.prompt_tokens,
        completion_tokens=result.usage.completion_tokens,
        forced_tokens=result.usage.forced_tokens,
        tree_tokens=result.usage.tree_tokens,
    )
    return msgspec.structs.replace(result, usage=usage, timings=Timings())


@st.composite
def fragmented(draw: st.DrawFn) -> RequestGraph:
    """A random graph in which texts come in pieces, some of them as selects of one choice."""
    graph = draw(engine_graphs())
    nodes: list[GraphNode] = []
    ids: dict[int, int] = {}

    def add(op: Op, parent: int | None) -> int:
        nodes.append(GraphNode(len(nodes), f"at{len(nodes)}", op, parent))
        return len(nodes) - 1

    for node in graph.nodes:
        op, parent = node.op, None if node.parent is None else ids[node.parent]
        if isinstance(op, Text):
            op = Text(tuple(Ref(ids[p.node]) if isinstance(p, Ref) else p for p in op.parts))
        elif isinstance(op, Join):
            op = msgspec.structs.replace(op, branches=tuple(ids[b] for b in op.branches))
        if isinstance(op, Text) and op.parts and isinstance(op.parts[0], str):
            for piece in draw(st.lists(st.sampled_from(["", "a", "b c", "ab"]), max_size=3)):
                one = Select("only", (piece,)) if draw(st.booleans()) else Text((piece,))
                parent = add(one, parent)
                if draw(st.integers(0, 9)) == 0:  # something else looks at it
                    add(Text(("<", Ref(parent))), None)
        ids[node.id] = add(op, parent)
    made = RequestGraph(tuple(nodes))
    made.check()
    return made


def pieces_of(graph: RequestGraph, cuts: Sequence[int]) -> list[RequestGraph]:
    at = sorted({0, len(graph.nodes), *(cut % (len(graph.nodes) + 1) for cut in cuts)})
    return [RequestGraph(graph.nodes[start:end], start) for start, end in pairwise(at)]


def on_engine(
    graph: RequestGraph,
    passes: tuple[Pass, ...] | None,
    cuts: Sequence[int] = (),
    *,
    cancel: Sequence[int] | None = None,
    trunk: RequestGraph | None = None,
) -> Told:
    told = Told()
    engine = make_engine()
    options = RunOptions(seed=7, row=1, trunk=trunk)
    backend = LocalBackend(engine)
    session: Session
    if passes is None:
        session = backend.open(options, told)
    else:
        session = open_session(backend, options, told, passes=passes)
    for piece in pieces_of(graph, cuts):
        session.extend(piece)
        drive(engine)
    if cancel is not None:
        session.cancel(cancel)
    session.close()
    drive(engine)
    assert not engine.core.executor.runs
    return told


# --- on an engine whose logits are a hash of the tokens before --------------------------------


@pytest.mark.parametrize("passes", EACH, ids=NAMES)
@given(graph=fragmented(), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_passes_change_nothing_on_a_model(
    passes: tuple[Pass, ...], graph: RequestGraph, cuts: list[int]
) -> None:
    plain = on_engine(graph, None, cuts)
    assert plain.outcomes.keys() == set(range(len(graph.nodes)))
    assert on_engine(graph, passes, cuts).as_tuple() == plain.as_tuple()


@given(graph=fragmented())
def test_every_rewrite_is_legal_and_keeps_what_seeds_go_by(graph: RequestGraph) -> None:
    for passes in EACH:
        done = rewrite(graph, passes)  # which checks after each pass
        told = [(n.address, n.op) for n in done.graph.nodes if isinstance(n.op, Gen)]
        assert told == [(n.address, n.op) for n in graph.nodes if isinstance(n.op, Gen)]
        assert rewrite(graph, passes) == done, "pure"


def test_a_run_that_is_told_its_trunk_gives_the_same() -> None:
    builder = GraphBuilder()
    builder.add(Gen("x"), builder.text("abc " * 30))
    graph = builder.piece()
    trunk = common_trunk([graph])
    assert trunk.nodes == graph.nodes[:1]
    assert on_engine(graph, PASSES, trunk=trunk).as_tuple() == on_engine(graph, None).as_tuple()


# --- on a script, with failures, timeouts and cancellations -----------------------------------


def perform(steps: Sequence[Step], passes: Sequence[Pass] | None, *, stepwise: bool) -> Outcome:
    """Run a program; `passes=None` hands over what it wrote without any of them in between."""
    writer = Writer(stepwise=stepwise)
    states: list[ub.State] = []
    runs: list[Any] = []  # a state lets go of its run when that has ended

    @ub.function
    def program(s: ub.State) -> None:
        states.append(s)
        runs.append(s._run)
        writer.write(s, steps)

    with pytest.MonkeyPatch.context() as patch, ScriptedBackend(answer) as backend:

        def opened(backend: Any, options: RunOptions, sink: Any, batch: Any = None) -> Any:
            if passes is None:
                return backend.open(options, sink)
            return open_session(backend, options, sink, batch=batch, passes=passes)

        patch.setattr(graph_run, "open_session", opened)
        with suppress(ub.GenerationError):
            program.options(backend=backend).run()
        run = runs[0]
        assert isinstance(run, GraphRun)
        assert run._outcomes.keys() == set(range(len(run.nodes)))
        outcome = outcome_of(states[0], writer)
        if "times out" not in repr(steps) and "Side" not in repr(steps):  # nor any other chance
            ends = {i: _without_times(end) for i, end in run._outcomes.items()}
            outcome.values["every node"] = ends
        return outcome


def _without_times(end: NodeResult | WireError) -> object:
    return plain(end) if isinstance(end, NodeResult) else end


def is_same(one: Any, other: Any) -> bool:
    """Whether two outcomes agree; which of several failures fails a join is a matter of time."""
    if one == other:
        return True
    is_failure = one[0] == other[0] == "failed"
    return is_failure and "[" in one[1] and "[" in other[1]


@pytest.mark.parametrize("passes", [ALL, PASSES], ids=["all", "as they run"])
@pytest.mark.parametrize("stepwise", [False, True])
@given(steps=programs())
def test_passes_change_nothing_of_programs_that_fail_or_are_cut(
    stepwise: bool, passes: tuple[Pass, ...], steps: tuple[Step, ...]
) -> None:
    without = perform(steps, None, stepwise=stepwise)
    found = perform(steps, passes, stepwise=stepwise)
    assert is_same(found.text, without.text)
    assert found.values.keys() == without.values.keys()
    assert [n for n, v in found.values.items() if not is_same(v, without.values[n])] == []


def test_a_merged_text_that_a_later_piece_refers_to_is_still_there() -> None:
    def run(passes: Sequence[Pass], script: dict[str, Any]) -> tuple[object, ...]:
        @ub.function
        def program(s: ub.State) -> None:
            s += ub.gen("first")
            with s.capture("one"):
                s += "a"
                s += "b"
            s += "c"
            side = s.copy()
            s += ub.gen("second")
            try:
                s["second"]
            except ub.GenerationError:
                s = side
            s += "|" + s.var("one") + "|"
            s += ub.gen("third")

        with ScriptedBackend(script) as backend, pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph_run, "open_session", partial(open_session, passes=passes))
            (result,) = program.options(backend=backend).run_batch([()], on_error="collect")
        assert result.state is not None
        run = result.state._run
        assert isinstance(run, EndedRun)
        ends = tuple(map(_without_times, run.outcomes))
        return ends, type(result.error), str(result.error)

    bad = Reply(error=ub.BackendError("down", backend="scripted"))
    for script in ({"first": "1", "second": "2", "third": "3"}, {"first": bad}, {"second": bad}):
        whole = {"first": "1", "second": "2", "third": "3", **script}
        assert run(ALL, whole) == run((), whole)
    ends, _, _ = run(ALL, {"first": "1", "second": "2", "third": "3"})
    assert isinstance(ends, tuple)
    texts = [end.text for end in ends if isinstance(end, NodeResult)]
    assert "|ab|" in texts


@given(graph=fragmented(), of=st.integers(0, 60))
def test_a_text_stops_only_when_all_of_it_is_meant(graph: RequestGraph, of: int) -> None:
    told: dict[tuple[Pass, ...], Told] = {}
    for passes in ((), ALL):
        told[passes] = Told()
        engine = make_engine()
        session = open_session(
            LocalBackend(engine), RunOptions(seed=7), told[passes], passes=passes
        )
        session.extend(graph)
        session.cancel([of % len(graph.nodes)])
        session.close()
        drive(engine)
    node = graph.nodes[of % len(graph.nodes)]
    assert told[ALL].outcomes.keys() == told[()].outcomes.keys()
    if isinstance(node.op, Gen | RoleStart):
        assert told[ALL].outcomes == told[()].outcomes


# --- each pass by itself ----------------------------------------------------------------------


def test_texts_in_a_row_become_one_and_what_is_looked_at_stays() -> None:
    builder = GraphBuilder()
    at = builder.text("c", builder.text("b", builder.text("a")))
    gen = builder.gen("x", at)
    seen = builder.text("d", gen)
    last = builder.text("f", builder.text("e", seen))
    builder.add(Text(("see ", Ref(seen))), last)
    done = rewrite(builder.piece(), (merge_always,))
    assert [node.op for node in done.graph.nodes] == [
        Text(("abc",)),
        Gen("x"),
        Text(("d",)),
        Text(("ef",)),
        Text(("see ", Ref(2))),
    ]
    assert [node.parent for node in done.graph.nodes] == [None, 0, 1, 2, 3]
    assert [node.address for node in done.graph.nodes] == ["0", "3", "4", "5", "7"]
    assert [[o.id for o in own] for own in done.origins] == [[0, 1, 2], [3], [4], [5, 6], [7]]


def test_a_piece_of_which_little_would_go_is_left_alone() -> None:
    for num_texts, num_gens, is_merged in ((6, 1, False), (7, 1, True), (7, 7, False)):
        builder = GraphBuilder()
        at: int | None = None
        for _ in range(num_texts):
            at = builder.text("a", at)
        for _ in range(num_gens):
            at = builder.gen("x", at)
        piece = Rewritten.unchanged(builder.piece())
        assert (merge_literals(piece) is not piece) == is_merged
        assert len(merge_always(piece).graph.nodes) == 1 + num_gens


def test_a_select_of_one_choice_becomes_text_and_still_has_its_table() -> None:
    builder = GraphBuilder()
    only = builder.add(Select("s", ("yes",)), builder.text("a"))
    builder.gen("x", only)
    graph = builder.piece()
    folded = rewrite(graph, (fold_one_choice_selects,)).graph
    assert [type(node.op) for node in folded.nodes] == [Text, Text, Gen]
    for passes in EACH:
        told = on_engine(graph, passes)
        result = told.outcomes[only]
        assert isinstance(result, NodeResult)
        assert result.text == "yes"
        assert [score.choice for score in result.scores] == ["yes"]


@pytest.mark.parametrize(
    ("policy", "width", "marked"), [("all", 3, 3), ("collect", 2, 2), ("any", 3, 0), ("all", 1, 0)]
)
def test_branches_are_told_when_a_join_waits_for_all_of_them(
    policy: JoinPolicy, width: int, marked: int
) -> None:
    builder = GraphBuilder()
    stem = builder.text("s")
    inner = builder.fork(stem, width)
    ends = [builder.gen("x", branch) for branch in inner]
    loose = builder.fork(stem, 2)
    builder.join(ends, stem, policy)
    graph = rewrite(builder.piece(), (gang_siblings,)).graph
    meets = [n.id for n in graph.nodes if isinstance(n.op, Branch) and n.op.meets]
    assert meets == inner[:marked]
    assert not set(meets) & set(loose)


def test_illegal_rewrites_are_found() -> None:
    builder = GraphBuilder()
    a = builder.text("a")
    b = builder.text("b", a)
    builder.gen("x", b)
    builder.add(Text(("see ", Ref(a))), None)
    graph = builder.piece()
    nodes = graph.nodes
    ab = GraphNode(0, "0", Text(("ab",)))
    gen, ref = nodes[2], nodes[3]
    late = (GraphNode(1, "2", gen.op, 0), GraphNode(2, "3", Text(("see ", Ref(0)))))
    own = ((nodes[0], nodes[1]), (gen,), (ref,))
    single = tuple((node,) for node in nodes)
    wrong = {
        "is read, but": Rewritten(RequestGraph((ab, *late)), own),
        "built on": Rewritten(
            RequestGraph((ab, GraphNode(1, "2", gen.op, 0))),
            ((nodes[0], nodes[1]), (GraphNode(2, "2", gen.op, 0),)),
        ),
        "is lost": Rewritten(
            RequestGraph((nodes[0], GraphNode(1, "2", gen.op, 0))), (single[0], (gen,))
        ),
        "two places": Rewritten(graph, (*single[:3], (nodes[0],))),
        "more than literal": Rewritten(
            RequestGraph((nodes[0], nodes[1], GraphNode(2, "3", ref.op))),
            (single[0], (nodes[1], gen), (ref,)),
        ),
        "not what the program wrote": Rewritten(
            RequestGraph((*nodes[:2], GraphNode(2, "moved", gen.op, 1), ref)), single
        ),
        "program wrote there": Rewritten(
            RequestGraph((GraphNode(0, "0", Text(("A",))), *nodes[1:])), single
        ),
        "what the program": Rewritten(
            RequestGraph((*nodes[:2], GraphNode(2, "2", gen.op, 0), ref)), single
        ),
    }
    for said, rewritten in wrong.items():
        with pytest.raises(ProgramError, match=said):
            rewritten.check()
    Rewritten.unchanged(graph).check()


# --- the trunk of a batch -----------------------------------------------------------------------

LITERALS = st.lists(st.text("ab", max_size=4), min_size=1, max_size=4)


def chain(texts: Sequence[str]) -> RequestGraph:
    builder = GraphBuilder()
    at: int | None = None
    for text in texts:
        at = builder.text(text, at)
    builder.gen("x", at)
    return builder.piece()


@given(rows=st.lists(LITERALS, min_size=1, max_size=4))
@example(rows=[["ab", "a"], ["ab", "ab"]])
def test_a_trunk_is_the_longest_beginning_of_all_rows(rows: list[list[str]]) -> None:
    graphs = [chain(row) for row in rows]
    trunk = common_trunk(graphs)
    assert all(has_trunk(graph, trunk) for graph in graphs)
    text = "".join(
        part
        for node in trunk.nodes
        if isinstance(node.op, Text)
        for part in node.op.parts
        if isinstance(part, str)
    )
    if len({tuple(map(len, row)) for row in rows}) == 1:  # cut alike: as long as can be
        columns = zip(*("".join(row) for row in rows), strict=True)
        assert len(text) == len([*takewhile(lambda column: len({*column}) == 1, columns)])
    assert all("".join(row).startswith(text) for row in rows)


@given(rows=st.lists(LITERALS, min_size=1, max_size=6))
def test_a_batch_is_told_a_beginning_of_each_row(rows: list[list[str]]) -> None:
    batch = BatchTrunk()
    graphs = [chain(["s" * MIN_TRUNK, *row]) for row in rows]
    for i, graph in enumerate(graphs):
        trunk = batch.narrow(graph)
        assert (trunk is None) == (i == 0)
        if trunk is not None:
            assert trunk == common_trunk(graphs[: i + 1])
            assert has_trunk(graph, trunk)


def test_rows_that_share_little_have_no_trunk() -> None:
    batch = BatchTrunk()
    assert batch.narrow(chain(["a" * 100])) is None
    assert batch.narrow(chain(["b" * 100])) is None
    assert batch.narrow(chain(["a" * 100])) is None
    with pytest.raises(AssertionError):
        assert batch.narrow(chain(["a" * 100])) is not None


STEM = "You sort mails. " * 8


@ub.function
def sort_mail(s: ub.State, mail: str) -> None:
    s += ub.system(STEM)
    s += ub.user("Mail: " + mail) + ub.assistant(ub.gen("team", max_tokens=3))


def trunks_of(backend: Any, *, is_async: bool) -> list[RequestGraph | None]:
    """Run a batch and return what its rows were told, in their order."""
    told: dict[int, RequestGraph | None] = {}
    opened = backend.open

    def note(options: RunOptions, sink: Any) -> Any:
        told.setdefault(options.row, options.trunk)  # later the batch itself keeps a run open
        return opened(options, sink)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "open", note)
        program = sort_mail.options(backend=backend, seed=1)
        rows = [{"mail": f"no. {i}"} for i in range(4)]
        if is_async:
            import asyncio

            results = asyncio.run(program.arun_batch(rows, max_in_flight=1))
        else:
            results = program.run_batch(rows, max_in_flight=1)
    assert len(results) == 4
    return [told[row] for row in range(4)]


def wait_for_runs(engine: Engine) -> int:
    """Return how many runs an engine has once it has done all that it was told."""
    done = threading.Event()
    engine.post(done.set)
    assert done.wait(60)
    engine.reset_cache()  # answered after the step that the commands before came in
    return len(engine.core.executor.runs)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_tells_the_engine_its_trunk_once_two_rows_are_known(is_async: bool) -> None:
    config = EngineConfig(check_accounting=True)
    engine = Engine(make_runner(), TOKENIZER, config, max_seq_len=512, grammar=GRAMMAR)
    with LocalBackend(engine) as backend:
        first, *rest = trunks_of(backend, is_async=is_async)
        assert not wait_for_runs(engine), "nothing is kept for a batch that is over"
        assert not engine.core.holds._promises
    assert first is None
    assert rest[0] is not None
    assert rest[1] is rest[0] is rest[2], "one object for all rows that share it"
    ops = [node.op for node in rest[0].nodes]
    assert ops[1] == Text((STEM,))
    assert ops[-1] == Text(("Mail: no. ",))


def test_backends_that_did_not_ask_are_told_nothing(scripted: MakeBackend) -> None:
    assert trunks_of(scripted(), is_async=False) == [None] * 4


# --- who gets the graph as it was written ------------------------------------------------------


@ub.function
def in_pieces(s: ub.State) -> None:
    for text in "abcdefgh":
        s += text
    s += ub.gen("x") + ub.select("only", ["y"])


class Watching(ScriptedBackend):
    """Keeps the pieces that it is handed."""

    def open(self, options: RunOptions, sink: Any) -> Any:
        session = super().open(options, sink)
        extend = session.extend
        self.pieces: list[RequestGraph] = []

        def watch(piece: RequestGraph) -> None:
            self.pieces.append(piece)
            extend(piece)

        session.extend = watch  # type: ignore[method-assign]
        return session


def test_a_backend_gets_the_rewritten_graph_and_a_recorder_the_written_one(tmp_path: Any) -> None:
    backend = Watching()
    with backend:
        plain = in_pieces.options(backend=backend).run()
        assert [node.op for node in backend.pieces[0].nodes] == [
            Text(("abcdefgh",)),
            Gen("x"),
            Text(("y",)),
        ]
        recorder = ub.record(backend, tmp_path / "run.jsonl")
        recorded = in_pieces.options(backend=recorder).run()
        assert len(backend.pieces[0].nodes) == 3, "behind the recorder the passes run again"
        recorder.close()
    played = ub.replay(tmp_path / "run.jsonl")
    again = in_pieces.options(backend=played).run()
    played.close()
    assert plain.text() == recorded.text() == again.text() == "abcdefghxy"
    assert len((tmp_path / "run.jsonl").read_text().split('"address"')) == 11
    assert plain.meta("only").scores == again.meta("only").scores
    assert plain.meta("only").address == "2"
