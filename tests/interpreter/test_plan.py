"""What a graph will cost: bounds against plain counting, and against runs that took place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreter.conftest import MakeBackend
from tests.support.engine_harness import GRAMMAR, TOKENIZER, make_engine, make_runner, run_graphs
from tests.support.engine_harness import graphs as engine_graphs
from tests.support.graphs import GraphBuilder, graphs

import umbel as ub
from umbel.interpreter.backends.local import LocalBackend
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply
from umbel.interpreter.constraint_size import constraint_size
from umbel.interpreter.plan import make_plan, plan_result
from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Join, Pick, Ref, RoleStart, Select, Text
from umbel.lang.plan import Bounds, Plan
from umbel.lang.results import NodeResult, Timings, Usage
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine


def _gen(name: str = "g", max_tokens: int = 10, n: int = 1) -> Gen:
    return Gen(name, SamplingParams(max_tokens=max_tokens), n=n)


def _plan(builder: GraphBuilder) -> Plan:
    """Count a character as a token."""
    return make_plan(builder.piece(), count_tokens=len)


def _sequences(nodes: Sequence[GraphNode]) -> list[list[int]]:
    """Return the rows that end in a gen or select, each as its path from the root."""
    paths: list[list[int]] = [
        [] if node.parent is None else [node.parent] for node in nodes
    ]  # first the parents, then all that is before them
    for i, path in enumerate(paths):
        paths[i] = [*paths[path[0]], i] if path else [i]
    ends = [path for path in paths if isinstance(nodes[path[-1]].op, Gen | Select)]
    return [
        path
        for path in ends
        if not any(path == other[: len(path)] for other in ends if other is not path)
    ]


# --- graphs by hand ------------------------------------------------------------------------


def test_a_chain_is_its_text_and_its_gens() -> None:
    builder = GraphBuilder()
    end = builder.add(_gen(max_tokens=7), builder.text("hello "))
    builder.add(_gen("h", max_tokens=5), builder.text(" and", end))
    plan = _plan(builder)
    assert [node.prompt for node in plan.nodes] == [
        Bounds(0, 0),
        Bounds(6, 6),
        Bounds(6, 13),
        Bounds(10, 17),
    ]
    assert plan.prefill == Bounds(10, 10)
    assert plan.decode == Bounds(2, 12)
    assert plan.saved == Bounds(0, 0)
    assert plan.num_paths == 1
    assert plan.critical_path == (0, 1, 2, 3)
    assert plan.critical_steps == Bounds(2, 12)


def test_a_fork_computes_its_stem_once() -> None:
    builder = GraphBuilder()
    stem = builder.text("s" * 100)
    for branch in builder.fork(stem, 8):
        builder.add(_gen(max_tokens=4), builder.text("tail", branch))
    plan = _plan(builder)
    assert plan.prefill == Bounds(100 + 8 * 4, 100 + 8 * 4)
    assert plan.saved == Bounds(700, 700)
    assert plan.num_paths == 8
    assert plan.nodes[stem].num_paths == 8
    assert plan.critical_steps == Bounds(1, 4)


def test_text_that_no_model_reads_costs_nothing() -> None:
    builder = GraphBuilder()
    builder.text("x" * 50, builder.add(_gen(max_tokens=3), builder.text("ab")))
    assert _plan(builder).prefill == Bounds(2, 2)


def test_samples_share_their_prompt_and_one_that_is_picked_goes_on() -> None:
    builder = GraphBuilder()
    many = builder.add(_gen(max_tokens=6, n=4), builder.text("prompt"))
    picked = builder.add(Pick(2), many)
    builder.add(_gen("more", max_tokens=5), builder.text("..", picked))
    plan = _plan(builder)
    assert plan.nodes[many].decode == Bounds(4, 24)
    assert plan.nodes[picked].appended == Bounds(0, 6)
    assert plan.decode == Bounds(5, 29)
    assert plan.num_paths == 4
    assert plan.saved == Bounds(18, 18)
    assert plan.critical_steps == Bounds(2, 11)


def test_a_select_costs_its_token_tree_and_appends_one_choice() -> None:
    builder = GraphBuilder()
    chosen = builder.add(Select("c", ("yes", "no", "maybe")), builder.text("ask "))
    builder.add(_gen(), chosen)
    plan = _plan(builder)
    assert plan.nodes[chosen].prefill == Bounds(5, 10)
    assert plan.nodes[chosen].appended == Bounds(2, 5)
    assert plan.nodes[2].prompt == Bounds(6, 9)
    twice = make_plan(
        RequestGraph(
            (
                GraphNode(
                    0, "0", Select("c", ("a", "b"), method="unconditional_likelihood_normalized")
                ),
            )
        ),
        count_tokens=len,
    )
    assert twice.prefill == Bounds(2, 4)


def test_a_select_of_one_choice_is_text() -> None:
    builder = GraphBuilder()
    builder.add(_gen(), builder.add(Select("c", ("only",))))
    plan = _plan(builder)
    assert not plan.nodes[0].needs_model
    assert plan.prefill == Bounds(4, 4)
    assert plan.critical_steps == Bounds(1, 10)


@pytest.mark.parametrize(("policy", "least"), [("all", 2 * 3 + 2), ("collect", 0)])
def test_an_appending_join_adds_what_its_branches_wrote(policy: str, least: int) -> None:
    builder = GraphBuilder()
    stem = builder.text("stem")
    lasts = [
        builder.text("z", builder.add(_gen(max_tokens=5), builder.text("abc", branch)))
        for branch in builder.fork(stem, 2)
    ]
    join = builder.add(Join(tuple(lasts), "all" if policy == "all" else "collect", "append"), stem)
    builder.add(_gen("end", max_tokens=2), join)
    plan = _plan(builder)
    assert plan.nodes[join].appended == Bounds(least, 2 * (3 + 5 + 1))
    assert plan.nodes[-1].prompt == Bounds(4 + least, 4 + 18)
    assert plan.num_paths == 3
    assert plan.critical_steps == Bounds(2, 7)


@pytest.mark.parametrize(("k", "least"), [(1, 0), (2, 0), (3, 3)])
def test_a_join_that_does_not_wait_may_cancel_what_the_rest_would_take(k: int, least: int) -> None:
    builder = GraphBuilder()
    stem = builder.text("stem")
    lasts = [
        builder.add(_gen(max_tokens=5), builder.text("abc", branch))
        for branch in builder.fork(stem, 3)
    ]
    builder.add(_gen("end", max_tokens=2), builder.join(lasts, stem, "any", k=k))
    plan = _plan(builder)
    assert plan.decode == Bounds(least + 1, 3 * 5 + 2)
    assert plan.prefill == Bounds(4 + least * 3, 4 + 3 * 3)


def test_a_reference_is_as_long_as_the_value_it_stands_for() -> None:
    builder = GraphBuilder()
    value = builder.add(_gen(max_tokens=9))
    told = builder.add(Text(("so: ", Ref(value))))
    builder.add(_gen("h", max_tokens=2), told)
    plan = _plan(builder)
    assert plan.nodes[told].appended == Bounds(4, 13)
    assert plan.critical_path == (value, told, told + 1)


def test_what_ends_a_gen_bounds_it() -> None:
    def decode(op: Gen) -> Bounds:
        return make_plan(RequestGraph((GraphNode(0, "0", op),)), count_tokens=len).decode

    def regex(pattern: str, heal: bool = False) -> Gen:
        return Gen("g", SamplingParams(max_tokens=50), Regex(pattern), heal=heal)

    assert decode(Gen("g", SamplingParams(max_tokens=9, ignore_eos=True))) == Bounds(9, 9)
    assert decode(Gen("g", SamplingParams(ignore_eos=True, stop=(".",)))) == Bounds(1, 128)
    assert decode(Gen("g", SamplingParams(max_tokens=9, min_tokens=4))) == Bounds(4, 9)
    assert decode(regex("[0-9]{3}")) == Bounds(1, 4)
    assert decode(regex("[0-9]*")) == Bounds(1, 50)
    assert decode(regex("")) == Bounds(0, 1)
    assert decode(regex("[0-9]{3}", heal=True)) == Bounds(1, 4)
    assert decode(Gen("g", SamplingParams(), Choices(("no", "maybe")))) == Bounds(1, 6)
    thinks = Gen("g", SamplingParams(max_tokens=9), thinking=True, max_thinking_tokens=50)
    assert decode(thinks) == Bounds(2, 59)
    assert decode(msgspec.structs.replace(thinks, n=2)) == Bounds(4, 118)


def test_a_plan_without_a_tokenizer_says_that_it_is_an_estimate() -> None:
    builder = GraphBuilder()
    builder.add(_gen("value"), builder.text("x" * 41))
    plan = make_plan(builder.piece())
    assert plan.is_estimate
    assert plan.nodes[0].appended == Bounds(11, 11)
    assert str(plan).splitlines() == [
        "2 nodes, 1 path; prefill about 11, decode 1–10, "  # noqa: RUF001
        "saved by sharing about 0 tokens; longest chain 1–10 steps",  # noqa: RUF001
        "  1  gen value: prompt about 11, decode 1–10",  # noqa: RUF001
    ]


def test_a_later_piece_is_refused_and_nothing_costs_nothing() -> None:
    builder = GraphBuilder()
    builder.text("a")
    builder.piece()
    builder.text("b")
    with pytest.raises(ub.ProgramError, match="starts at node 1"):
        make_plan(builder.piece())
    empty = make_plan(RequestGraph(()))
    assert (empty.prefill, empty.decode, empty.critical_path) == (Bounds(), Bounds(), ())


# --- constraints ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "longest"),
    [
        ("abc", 3),
        ("a|bcd|", 3),
        ("(ab){2,5}c?", 11),
        ("é", 2),
        (".", 4),
        ("[^a]", 4),
        (r"\d\w", 2),
        (r"\D", 4),
        ("[a-ÿ]{3}", 6),
        ("(?i:k)", 4),
        ("a+", None),
        ("(a*){0}", 0),
        ("(){3,}^$", 0),
        (r"(a{9})\1", None),
        ("[", None),
        ("[[a]", 1),
    ],
)
def test_a_pattern_bounds_the_bytes_of_its_matches(pattern: str, longest: int | None) -> None:
    size = constraint_size(Regex(pattern))
    assert (size.kind, size.num_chars, size.max_bytes) == ("regex", len(pattern), longest)


PATTERNS = st.recursive(
    st.sampled_from(["a", "é", "[a-c€]", r"\d", ".", r"\W", "", "(?i:k)"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{0,2}", "{2}"])).map(lambda x: f"(?:{x[0]}){x[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_match_is_longer_than_its_bound(data: st.DataObject) -> None:
    pattern = data.draw(PATTERNS)
    found = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    longest = constraint_size(Regex(pattern)).max_bytes
    assert longest is not None
    assert len(found.encode("utf-8", "surrogatepass")) <= longest


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Choices(("a", "bcd")), "2 choices"),
        (JsonSchema("{}"), "schema of 2 characters"),
        (Grammar('start: "a"'), "grammar of 10 characters"),
        (Regex("a{2000}"), "regex of 7 characters, values up to 2,000 bytes"),
    ],
)
def test_a_constraint_tells_its_size(constraint: Constraint, said: str) -> None:
    assert str(constraint_size(constraint)) == said


# --- any graph -----------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_sharing_saves_what_single_rows_would_compute_again(nodes: list[GraphNode]) -> None:
    plan = make_plan(RequestGraph(tuple(nodes)), count_tokens=len)
    rows = _sequences(nodes)
    assert plan.num_paths == len(rows)
    assert [node.num_paths for node in plan.nodes] == [
        sum(i in row for row in rows) for i in range(len(nodes))
    ]
    apart = sum((plan.nodes[i].appended for row in rows for i in row), Bounds())
    read = {i for row in rows for i in row}
    assert sum((plan.nodes[i].appended for i in read), Bounds()) + plan.saved == apart
    for node in plan.nodes:
        for bounds in (node.prompt, node.appended, node.prefill, node.decode, node.saved):
            assert 0 <= bounds.low <= bounds.high


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_the_longest_chain_follows_edges_and_none_is_longer(nodes: list[GraphNode]) -> None:
    plan = make_plan(RequestGraph(tuple(nodes)), count_tokens=len)
    chain = plan.critical_path
    for before, after in itertools.pairwise(chain):
        assert before in {*nodes[after].deps, nodes[after].parent}
    steps = [
        node.decode.high if isinstance(node.node.op, Gen) else int(node.needs_model)
        for node in plan.nodes
    ]
    longest = [0] * len(nodes)
    for node in nodes:
        edges = {*node.deps, *(() if node.parent is None else (node.parent,))}
        longest[node.id] = steps[node.id] + max((longest[edge] for edge in edges), default=0)
    assert plan.critical_steps.high == max(longest)


@settings(max_examples=40, deadline=None)
@given(engine_graphs())
def test_what_an_engine_does_is_within_the_bounds(graph: RequestGraph) -> None:
    engine = make_engine()
    (collector,) = run_graphs(engine, [graph])
    # a select with nothing before it can't be scored
    assert set(collector.errors.values()) <= {"ProgramError", "GenerationError"}
    plan = make_plan(
        graph, count_tokens=lambda text: len(TOKENIZER.encode_text(text)), results=collector.results
    )
    has_turns = any(isinstance(node.op, RoleStart) for node in graph.nodes)
    # generated text that is encoded anew (a residue, a reference, a join's branches) may take more
    # tokens than it was sampled in, and healed text more than it was encoded in
    is_encoded_anew = any(node.deps for node in graph.nodes) or any(
        s.residue or s.num_replaced for r in collector.results.values() for s in r.samples
    )
    for node in plan.nodes:
        if node.actual is None:
            continue
        usage = node.actual.usage
        assert node.decode.low <= usage.completion_tokens <= node.decode.high
        if isinstance(node.node.op, Select):
            # each choice may take a token of the text before it along
            assert usage.tree_tokens <= node.prefill.high + len(node.node.op.choices)
        if node.needs_model and not has_turns and not is_encoded_anew:
            assert usage.prompt_tokens <= node.prompt.high + 1  # BOS
    ran = [node.node.id for node in plan.nodes if node.needs_model and node.actual is not None]
    assert (plan.seconds > 0) == bool(ran)


# --- programs and runs ---------------------------------------------------------------------


@ub.function
def advise(s: ub.State, topic: str) -> None:
    s += f"About {topic}: " + ub.gen("idea", max_tokens=8)
    forks = s.fork(3)
    forks += "\nand so " + ub.gen("step", max_tokens=4)
    forks.join()
    s += "\nall: " + ub.select("verdict", ["good", "bad"])


def test_a_program_is_planned_without_a_backend() -> None:
    plan = advise.plan("tea")
    assert plan.graph == advise.compile("tea")
    assert plan.decode == Bounds(4, 8 + 3 * 4)
    assert plan.num_paths == 4
    assert not plan.has_run
    assert plan.seconds == 0
    assert plan.is_estimate
    assert str(advise.plan(topic="tea")) == str(plan)


def test_a_tokenizer_in_this_process_counts_the_text_before_and_after_the_run() -> None:
    config = EngineConfig(check_accounting=True)
    engine = Engine(make_runner(), TOKENIZER, config, max_seq_len=512, grammar=GRAMMAR)
    with LocalBackend(engine) as backend:
        program = advise.options(backend=backend)
        before = program.plan("tea")
        after = program.run("tea").plan()
    assert not before.is_estimate
    assert before.nodes[0].appended.low == len(TOKENIZER.encode_text("About tea: ")) == 11
    assert after.has_run
    assert [node.appended for node in after.nodes] == [node.appended for node in before.nodes]
    first = after.nodes[1].actual
    assert first is not None
    assert first.usage.prompt_tokens == before.nodes[1].prompt.high == 11


def test_a_run_tells_what_it_took(scripted: MakeBackend) -> None:
    scripted({"idea": "one two", "step": "x", "verdict": "bad"}, latency=0.01)
    result = advise.run("tea")
    plan = plan_result(result, count_tokens=len)
    actuals = [node.actual for node in plan.nodes]
    assert None not in actuals
    assert plan.num_failed == 0
    assert [n.actual and n.actual.text for n in plan.nodes if n.name] == [
        "one two",
        *["x"] * 3,
        "bad",
    ]
    assert plan.usage.completion_tokens == sum(
        node.actual.usage.completion_tokens for node in plan.nodes if node.actual is not None
    )
    assert plan.decode.low <= plan.usage.completion_tokens <= plan.decode.high
    on_chain = sum(a.seconds for i in plan.critical_path if (a := actuals[i]) is not None)
    # the branches ran side by side, so that no chain takes longer than the run
    assert 0.02 <= on_chain <= plan.seconds + 1e-6


def test_a_failure_is_in_the_plan_with_its_cause() -> None:
    reply = Reply(error=ub.BackendError("out of tea", backend="scripted"))
    backend = ScriptedBackend({"idea": reply, "step": "x", "verdict": "bad"})
    try:
        (result,) = advise.options(backend=backend).run_batch(["tea"], on_error="collect")
    finally:
        backend.close()
    plan = plan_result(result)
    assert plan.num_failed > 1
    errors = {node.name: node.actual.error for node in plan.nodes if node.actual and node.name}
    assert errors["idea"] == errors["verdict"] == "BackendError: out of tea"


def test_times_count_from_the_first_node() -> None:
    builder = GraphBuilder()
    builder.add(_gen(), builder.text("a"))
    plan = make_plan(
        builder.piece(),
        results={
            1: NodeResult(
                text="b",
                usage=Usage(prompt_tokens=8, cached_tokens=6, completion_tokens=1),
                timings=Timings(ready=50.0, scheduled=50.5, first_token=51.0, finished=52.0),
            )
        },
    )
    actual = plan.nodes[1].actual
    assert actual is not None
    assert (actual.start, actual.queued, actual.seconds) == (0.0, 0.5, 2.0)
    assert plan.seconds == 2.0
    assert plan.usage == Usage(prompt_tokens=8, cached_tokens=6, completion_tokens=1)
    assert plan.nodes[0].actual is None


def test_a_plan_of_a_run_prints_what_the_run_did() -> None:
    @ub.function
    def two(s: ub.State) -> None:
        s += "a" + ub.gen("first", max_tokens=4)
        branch = s.copy()
        branch += ub.gen("second", max_tokens=4)

    script: dict[str, str | Reply | Sequence[str | Reply]] = {
        "first": "one",
        "second": Reply(error=ub.BackendError("down")),
    }
    with ScriptedBackend(script) as backend:
        done = two.options(backend=backend).run().plan()
    line = str(done).splitlines()[1]
    sampled = done.usage.completion_tokens
    assert re.match(rf"  it ran \d+\.\d\d s, sampled {sampled} tokens? and found 0 of ", line)
    assert line.endswith("; 1 node failed")
    assert "it ran" not in str(two.plan())
