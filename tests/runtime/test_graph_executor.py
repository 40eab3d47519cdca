"""The walk inside the engine: what a node may ask for, what fails alone, what is replayed."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    TOKENIZER,
    Collector,
    check_idle,
    drive,
    make_engine,
    make_runner,
    open_run,
)
from tests.support.graphs import GraphBuilder, chain

from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.lang.errors import EngineError, UmbelError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import (
    Branch,
    Gen,
    Image,
    Join,
    JoinMode,
    Op,
    Pick,
    RoleEnd,
    RoleStart,
    Select,
    SelectMethod,
    Text,
)
from umbel.lang.results import NodeResult, RunOptions, Sample
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine

SHORT = SamplingParams(max_tokens=4)


def run(graph: RequestGraph, engine: Engine | None = None, **options: Any) -> Collector:
    """Run a graph beside a plain one, which nothing that happens to it may touch."""
    engine = engine or make_engine()
    _, bystander = open_run(engine, chain(Text(("xyxy",)), Gen("b", SHORT)), seed=3)
    _, collector = open_run(engine, graph, **options)
    drive(engine)
    assert list(bystander.results) == [0, 1], bystander.errors
    assert collector.num_ended == len(graph.nodes)
    check_idle(engine)
    return collector


def row_after(prompt: str, sample: Sample, then: str) -> list[int]:
    """Return the row that rule 9 asks for: the prompt, the ids that were kept, the literal rest."""
    kept = list(sample.token_ids[: sample.num_kept])
    if not kept:
        return TOKENIZER.encode_text(prompt + sample.residue + then)
    return TOKENIZER.encode_text(prompt) + kept + TOKENIZER.encode_text(sample.residue + then)


@pytest.mark.parametrize(
    ("op", "error"),
    [
        (Gen("x", SamplingParams(logit_bias=((10**6, 1.0),))), "ProgramError"),
        (Gen("x", SamplingParams(stop_token_ids=(10**6,), min_tokens=2)), "ProgramError"),
        (Gen("x", SamplingParams(stop_regex=("(",))), "ConstraintError"),
        (Gen("x", SHORT, heal=True), None),
        (Gen("x", SamplingParams(max_tokens=10_000)), None),  # ends where the context ends
        (Gen("x", timeout=0.0), "NodeTimeoutError"),
        (Gen("x", SHORT, timeout=float("inf")), None),
        (Gen("x", SHORT, timeout=float("nan")), None),
        (Select("x", ()), "ProgramError"),
        (Select("x", ("a", "a")), "ProgramError"),
        (Select("x", ("", "a")), "ProgramError"),
        (Select("x", ("a", "ab")), "ProgramError"),
        (Select("x", ("a\ud800", "b")), "ProgramError"),
        (Select("x", ("a", "q" * 600)), "RequestRejectedError"),
        (Select("x", ("a", "b"), method="nonsense"), "EngineError"),  # type: ignore[arg-type]
        (Pick(0), "ProgramError"),
        (RoleEnd("user"), "ProgramError"),
        (Image("x.png"), "UnsupportedFeatureError"),
        (Text(("\ud800",)), None),  # what follows it fails
    ],
)
def test_what_can_not_be_done_fails_its_node_alone(op: Op, error: str | None) -> None:
    collector = run(chain(Text(("abc",)), op))
    assert collector.errors.get(1) == error


@pytest.mark.parametrize(
    ("constraint", "error"),
    [
        (Regex("("), "ConstraintError"),
        (Regex("(?=a)b"), "ConstraintError"),
        (JsonSchema("{"), "ConstraintError"),
        (JsonSchema("false"), "ConstraintError"),
        (Choices(()), "ConstraintError"),
        (Grammar("start: (", "lark"), "ConstraintError"),
    ],
)
def test_rule_15_a_bad_constraint_fails_its_own_node(constraint: Constraint, error: str) -> None:
    collector = run(chain(Text(("abc",)), Gen("x", SHORT, constraint)))
    assert collector.errors == {1: error}


def test_a_prompt_longer_than_the_context_is_rejected_with_its_length() -> None:
    engine = make_engine(max_seq_len=50)
    collector = run(chain(Text(("q" * 50,)), Gen("x", SHORT)), engine)
    assert collector.errors == {1: "RequestRejectedError"}
    fits = run(chain(Text(("q" * 49,)), Gen("x", SHORT)), engine)
    assert len(fits.results[1].samples[0].token_ids) == 1, "one more token fits"


@pytest.mark.parametrize(
    "op", [Gen("x", SamplingParams(max_tokens=128)), Select("x", ("a" * 40, "b" * 40))]
)
def test_what_the_pool_can_never_hold_is_rejected(op: Op) -> None:
    collector = run(chain(Text(("q" * 30,)), op), make_engine(make_runner(num_slots=64)))
    assert collector.errors == {1: "RequestRejectedError"}


@pytest.mark.parametrize("mode", ["gather", "append"])
def test_a_graph_that_can_not_be_followed_ends_its_run_alone(mode: JoinMode) -> None:
    builder = GraphBuilder()
    first, second = builder.text("a"), builder.gen("g")  # no branches of any fork
    join = builder.join([first, second], None, "any", mode)
    builder.gen("after", join)
    collector = run(builder.piece())
    assert set(collector.errors) >= {second, join}
    assert set(collector.errors.values()) == {"EngineError"}


def test_rule_8_any_finishes_with_the_first_branch_and_cancels_the_rest() -> None:
    builder = GraphBuilder()
    stem = builder.text("a")
    lasts = [builder.text(f"branch {i}", head) for i, head in enumerate(builder.fork(stem, 3))]
    join = builder.join(lasts, stem, "any", "append")
    collector = run(builder.piece())
    told = {last: collector.errors.get(last, "") for last in lasts}
    assert sorted(told.values()) == ["", "CancelledError", "CancelledError"]
    errors = collector.results[join].branch_errors
    assert [error.type if error else "" for error in errors] == list(told.values())
    (winner,) = (i for i, last in enumerate(lasts) if not told[last])
    assert collector.results[join].text == f"branch {winner}"


def test_rule_16_another_attempt_draws_anew_and_repeats_itself() -> None:
    drawn = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    graph = chain(Text(("a",)), Gen("x", drawn), Gen("y", msgspec.structs.replace(drawn, seed=5)))
    ids = [
        [run(graph, seed=1, attempt=attempt).results[n].samples[0].token_ids for n in (1, 2)]
        for attempt in (0, 1, 1)
    ]
    assert ids[0][0] != ids[1][0]
    assert ids[0][1] != ids[1][1]
    assert ids[1] == ids[2]


def test_rule_14_what_a_lenient_schema_could_not_enforce_is_checked_at_the_end() -> None:
    # no engine enforces `not`: the grammar is any of the two, and one of them is not valid
    schema = '{"enum": [1, 2], "not": {"const": %d}}'
    gen = Gen("x", SamplingParams(max_tokens=8))
    lenient = [
        run(chain(msgspec.structs.replace(gen, constraint=JsonSchema(schema % bad, strict=False))))
        for bad in (1, 2)
    ]
    failed = [collector for collector in lenient if collector.errors]
    assert len(failed) == 1, "the same greedy value is fine under one schema only"
    assert failed[0].errors == {0: "InvalidValueError"}
    strict = run(chain(msgspec.structs.replace(gen, constraint=JsonSchema(schema % 1))))
    assert strict.errors == {0: "ConstraintError"}


def test_turn_borders_are_no_text_of_the_program() -> None:
    collector = run(chain(RoleStart("user"), Text(("a",)), RoleEnd("user")))
    assert [collector.results[n].text for n in range(3)] == ["", "a", ""]


def test_pieces_that_come_after_a_run_s_defect_fail_at_once() -> None:
    engine = make_engine()
    builder = GraphBuilder()
    builder.join([builder.text("a"), builder.gen("g")], None, "any")
    collector = Collector()
    session = engine.open(RunOptions(), collector)
    session.extend(builder.piece())
    drive(engine)
    later = builder.text("more")
    session.extend(builder.piece())
    session.close()
    drive(engine)
    assert collector.errors[later] == "EngineError"
    check_idle(engine)


def test_cancelling_what_no_piece_has_brought_does_nothing() -> None:
    engine = make_engine()
    session, collector = open_run(engine, chain(Text(("abc",)), Gen("x", SHORT)))
    session.cancel([-1, 2, 99])
    drive(engine)
    assert list(collector.results) == [0, 1]


def test_rule_10a_after_n_samples_one_must_be_picked() -> None:
    sampling = SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True)
    builder = GraphBuilder()
    prompt = builder.text("abc")
    gen = builder.add(Gen("x", sampling, n=3), prompt)
    unpicked = builder.text("q", gen)
    picks = [builder.add(Pick(i), gen) for i in range(3)]
    wrong = builder.add(Pick(3), gen)
    ends = [builder.add(Gen("y", SHORT), builder.text("!", pick)) for pick in picks]
    collector = run(builder.piece())
    assert collector.errors == {unpicked: "ProgramError", wrong: "ProgramError"}
    samples = collector.results[gen].samples
    assert len({s.token_ids for s in samples}) == 3
    runner = make_runner()
    for pick, end, sample in zip(picks, ends, samples, strict=True):
        assert collector.results[pick].text == sample.text
        first = collector.results[end].samples[0].token_ids[0]
        row = row_after("abc", sample, "!")
        assert first == int(runner.logits_of(row).argmax()), "it goes on from the picked ids"


def test_what_ended_in_an_earlier_run_is_taken_as_done_without_an_event() -> None:
    graph = chain(
        Text(("abc",)),
        Gen("x", SamplingParams(max_tokens=6, stop=("a",))),
        Text((" and ",)),
        Select("s", ("yes", "no")),
        Gen("y", SHORT),
    )
    whole = run(graph, seed=5)
    for num_done in range(len(graph.nodes)):
        engine, collector = make_engine(), Collector()
        done = {i: whole.results[i] for i in range(num_done)}
        session = engine.open(RunOptions(seed=5), collector, resolved=done)
        session.extend(graph)
        session.close()
        drive(engine)
        assert collector.outcome() == {
            node: outcome for node, outcome in whole.outcome().items() if node >= num_done
        }
        check_idle(engine)


def test_what_failed_in_an_earlier_run_poisons_without_an_event() -> None:
    engine, collector = make_engine(), Collector()
    failed: dict[int, UmbelError] = {1: EngineError("then")}
    session = engine.open(RunOptions(), collector, {0: NodeResult("abc")}, failed)
    session.extend(chain(Text(("abc",)), Gen("x"), Gen("y")))
    session.close()
    drive(engine)
    assert collector.outcome() == {2: ("failed", "GenerationError")}
    check_idle(engine)


def test_rule_9_the_ids_of_a_stopped_gen_are_the_next_one_s_prompt() -> None:
    first = SamplingParams(max_tokens=30, temperature=2.0, stop=("a", "b", "c", "x"))
    runner = make_runner()
    num_residues = 0
    for seed in range(40):
        graph = chain(Text(("abc",)), Gen("x", first), Text(("!",)), Gen("y", SHORT))
        collector = run(graph, seed=seed)
        sample = collector.results[1].samples[0]
        num_residues += bool(sample.residue)
        row = row_after("abc", sample, "!")
        after = collector.results[3].samples[0].token_ids
        assert after[0] == int(runner.logits_of(row).argmax())
    assert num_residues, "no stop was inside a token"


@pytest.mark.parametrize("prefix", ["", "abc"])
@pytest.mark.parametrize("choices", [("a", "b"), ("ab", "abc"), ("", "xy")])
@pytest.mark.parametrize(
    "method", ["token_length_normalized", "unconditional_likelihood_normalized"]
)
def test_rule_11_a_select_in_a_role_scores_any_choices_as_a_cold_model_would(
    prefix: str, choices: tuple[str, ...], method: Any
) -> None:
    ops = (RoleStart("assistant"), Text((prefix,)), Select("s", choices, method), Gen("x", SHORT))
    runner = make_runner()
    collector = run(chain(*ops), make_engine(max_step_tokens=2))
    start = TOKENIZER.special_id("<|im_start|>")
    assert start is not None
    chosen = collector.results[2]
    row = [start, *TOKENIZER.encode_text("assistant\n" + prefix + chosen.text)]
    assert chosen.text in choices
    first = collector.results[3].samples[0].token_ids[0]
    assert first == int(runner.logits_of(row).argmax())


def test_an_empty_prompt_can_be_forked() -> None:
    builder = GraphBuilder()
    tips = builder.fork(None, 3)
    ends = [builder.add(Gen(f"g{i}", SHORT), tip) for i, tip in enumerate(tips)]
    join = builder.join(ends, None, mode="append")
    collector = run(builder.piece())
    assert not collector.errors
    assert collector.results[join].text == "".join(collector.results[e].text for e in ends)


def test_a_run_s_time_limit_ends_it_whole_and_starts_nothing() -> None:
    engine = make_engine()
    builder = GraphBuilder()
    tips = builder.fork(builder.text("abc"), 2)
    ends = [builder.add(Gen("g", SamplingParams(ignore_eos=True)), tip) for tip in tips]
    join = builder.add(Join(tuple(ends), "collect", "append"))
    builder.gen("after", builder.text("x", join))
    collector = Collector()
    session = engine.open(RunOptions(timeout=0.0), collector)
    session.extend(builder.piece())
    drive(engine)
    late = builder.gen("late")
    session.extend(builder.piece())
    session.close()
    drive(engine)
    assert set(collector.errors.values()) == {"NodeTimeoutError"}
    assert {*ends, join, late} <= set(collector.errors)
    assert not collector.started
    check_idle(engine)


@st.composite
def any_graphs(draw: st.DrawFn) -> RequestGraph:
    """Graphs that no program would write: every kind of node after any other."""
    builder = GraphBuilder()
    for i in range(draw(st.integers(1, 8))):
        known = list(range(i))
        joined = st.lists(st.sampled_from(known or [0]), unique=True, max_size=2 if known else 0)
        kinds: list[st.SearchStrategy[Op]] = [
            st.sampled_from([Text(("ab",)), Text(("q" * 40,)), RoleStart("user")]),
            st.sampled_from([RoleEnd("user"), Branch(0, 1, "f"), Pick(0), Pick(2)]),
            st.builds(
                Gen,
                st.just("g"),
                st.sampled_from([SHORT, SamplingParams(max_tokens=9, ignore_eos=True)]),
                st.sampled_from([None, Regex("[ab]{1,3}"), Regex("")]),
                st.sampled_from([1, 1, 2]),
            ),
            st.builds(
                Select,
                st.just("s"),
                st.sampled_from([("a", "b"), ("x",), (), ("a" * 20, "b" * 20)]),
                st.sampled_from(get_args(SelectMethod)),
                st.sampled_from([0.0, 1.0]),
            ),
            st.builds(
                Join,
                joined.map(tuple),
                st.sampled_from(["all", "any", "collect"]),
                st.sampled_from(["gather", "append"]),
                st.integers(0, 3),
            ),
        ]
        op = draw(st.one_of(kinds))
        deps = op.branches if isinstance(op, Join) else ()
        builder.add(op, draw(st.sampled_from([None, *(k for k in known if k not in deps)])))
    return builder.piece()


@settings(max_examples=100)
@given(
    st.lists(any_graphs(), min_size=1, max_size=4),
    st.sampled_from([40, 100, 300]),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([1, 3, 8]),
)
def test_any_graph_at_all_ends_and_leaves_nothing(
    programs: list[RequestGraph], num_slots: int, budget: int, max_running: int
) -> None:
    engine = make_engine(
        make_runner(num_slots=num_slots),
        max_step_tokens=budget,
        max_running=max_running,
        max_seq_len=100,
    )
    collectors = [open_run(engine, graph)[1] for graph in programs]
    drive(engine)
    for collector, graph in zip(collectors, programs, strict=True):
        assert collector.num_ended == len(graph.nodes)
    check_idle(engine)


def test_case_14_the_prefix_that_branches_share_is_computed_once() -> None:
    prefix, suffixes = "abc " * 8, ("xy a", "bca", "abca b")
    builder = GraphBuilder()
    tips = builder.fork(builder.text(prefix), 3)
    ends = [builder.text(suffix, tip) for suffix, tip in zip(suffixes, tips, strict=True)]
    gens = [builder.add(Gen("g", SamplingParams(max_tokens=1)), end) for end in ends]
    builder.join(gens, tips[0])
    engine = make_engine(max_step_tokens=512)
    _, collector = open_run(engine, builder.piece())
    drive(engine)
    assert not collector.errors
    rows = [TOKENIZER.encode_text(prefix + suffix) for suffix in suffixes]
    distinct = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(distinct) < sum(map(len, rows)) - 2 * len(TOKENIZER.encode_text(prefix)) + 4
    assert engine.stats()["tokens_prefilled"] == len(distinct)
    check_idle(engine)


def test_case_21_choices_are_scored_from_one_context_whatever_merges_with_the_prompt() -> None:
    """'ab' + 'c' is one token, 'ab' + 'x' is two: both are scored after what precedes the 'ab'."""
    prompt, choices = "xyab", ("c", "x")
    merged, apart = (TOKENIZER.encode_text(prompt + choice) for choice in choices)
    context = 0
    while merged[context] == apart[context]:
        context += 1
    assert context < len(TOKENIZER.encode_text(prompt)), "nothing merges across the border"
    runner = make_runner()
    collector = run(chain(Text((prompt,)), Select("s", choices)), make_engine(runner))
    for row, score in zip((merged, apart), collector.results[1].scores, strict=True):
        assert list(score.token_ids) == row[context:]
        expected = []
        for at in range(context, len(row)):
            logits = torch.from_numpy(runner.logits_of(row[:at]))
            expected.append(float(torch.log_softmax(logits.double(), -1)[row[at]]))
        assert score.token_logprobs == pytest.approx(expected, abs=1e-4)
