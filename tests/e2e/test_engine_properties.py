"""The whole engine on hash logits: equal outputs however it is set up, and nothing left behind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    Collector,
    GraphMaker,
    check_idle,
    drive,
    graphs,
    make_engine,
    make_runner,
    open_run,
    run_graphs,
)

from umbel.lang.constraints import Choices, Constraint, JsonSchema, Regex
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.kv_cache import EVICTION_POLICIES
from umbel.runtime.scheduler.policy import POLICIES

batches = st.lists(graphs(), min_size=1, max_size=4)
# hash logits are cheap: thousands of examples over the file, in every run of the tests
many = settings(max_examples=400)


def outcomes(collectors: list[Collector]) -> list[dict[int, object]]:
    return [c.outcome() for c in collectors]


@many
@given(batches)
def test_rule_16_cached_equals_cold(programs: list[RequestGraph]) -> None:
    warm = make_engine()
    cold = make_engine(prefix_cache=False)
    first = outcomes(run_graphs(warm, programs))
    assert first == outcomes(run_graphs(cold, programs))
    assert first == outcomes(run_graphs(warm, programs)), "a second run reads the first one's cache"
    check_idle(warm)
    check_idle(cold)


@many
@given(batches)
def test_rule_16_batched_equals_alone(programs: list[RequestGraph]) -> None:
    together = make_engine()
    alone = make_engine(prefix_cache=False)
    assert outcomes(run_graphs(together, programs)) == outcomes(
        run_graphs(alone, programs, alone=True)
    )
    check_idle(together)


@many
@given(batches, st.integers(1, 9))
def test_rule_16_chunked_equals_whole(programs: list[RequestGraph], budget: int) -> None:
    chunked = make_engine(max_step_tokens=budget)
    whole = make_engine(max_step_tokens=4096)
    assert outcomes(run_graphs(chunked, programs)) == outcomes(run_graphs(whole, programs))
    check_idle(chunked)


@many
@given(batches, st.sampled_from(sorted(POLICIES)), st.integers(150, 400), st.integers(3, 40))
def test_rule_16_overlap_changes_no_output(
    programs: list[RequestGraph], policy: str, num_slots: int, budget: int
) -> None:
    ahead = make_engine(
        make_runner(num_slots=num_slots),
        policy=policy,
        max_step_tokens=budget,
        max_seq_len=149,
        overlap=True,
    )
    after = make_engine(max_seq_len=149, overlap=False)
    first = outcomes(run_graphs(ahead, programs))
    assert first == outcomes(run_graphs(after, programs))
    assert first == outcomes(run_graphs(ahead, programs)), "a second run reads the first's cache"
    check_idle(ahead)


@many
@given(batches, st.booleans())
def test_rule_16_stepwise_equals_compiled(programs: list[RequestGraph], alone: bool) -> None:
    stepwise = make_engine()
    compiled = make_engine()
    assert outcomes(run_graphs(stepwise, programs, pieces=True, alone=alone)) == outcomes(
        run_graphs(compiled, programs)
    )
    check_idle(stepwise)


@many
@given(
    batches,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(EVICTION_POLICIES)),
    st.sampled_from([1, 16]),
    st.integers(160, 400),
    st.integers(3, 40),
)
def test_rule_16_a_tiny_pool_any_pages_and_any_policy_change_no_output(
    programs: list[RequestGraph],
    policy: str,
    eviction: str,
    page_size: int,
    num_slots: int,
    budget: int,
) -> None:
    small = make_engine(
        make_runner(num_slots=num_slots),
        policy=policy,
        eviction=eviction,
        page_size=page_size,
        max_step_tokens=budget,
        max_seq_len=149,
    )
    large = make_engine(max_seq_len=149)
    assert outcomes(run_graphs(small, programs)) == outcomes(run_graphs(large, programs))
    check_idle(small)


@many
@given(
    st.lists(graphs(), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(0, 20)), max_size=6),
    st.integers(2, 40),
    st.booleans(),
)
def test_rule_3_a_cancel_at_any_moment_ends_every_node_and_frees_every_page(
    programs: list[RequestGraph],
    cancels: list[tuple[int, int, int]],
    budget: int,
    overlap: bool,
) -> None:
    engine = make_engine(make_runner(num_slots=300), max_step_tokens=budget, overlap=overlap)
    runs = [open_run(engine, graph, seed=7, row=row) for row, graph in enumerate(programs)]
    untouched = set(range(len(programs)))
    for num_steps, row, node in cancels:
        for _ in range(num_steps):
            engine.step()
        row %= len(programs)
        untouched.discard(row)
        whole = node % 2 == 0
        runs[row][0].cancel(None if whole else [node % len(programs[row].nodes)])
    drive(engine)
    for (_, collector), graph in zip(runs, programs, strict=True):
        assert collector.num_ended == len(graph.nodes)
    check_idle(engine)
    calm = outcomes(run_graphs(make_engine(make_runner(num_slots=300)), programs))
    for row in untouched:
        assert runs[row][1].outcome() == calm[row], "another run's cancel changed this one"


FORCED_TEXTS: list[Constraint] = [
    Regex("abcabcabc(x|y)yyyy"),
    Regex("(ab|ba)cabcabc[0-9]xyxyxy"),
    Choices(("abcabcab", "abcabyes", "xyxyxyno")),
    JsonSchema(
        '{"type": "object", "properties": {"abcabc": {"enum": ["xyxy", "xyno"]},'
        ' "n": {"type": "integer", "minimum": 0, "maximum": 9}},'
        ' "required": ["abcabc", "n"], "additionalProperties": false}'
    ),
]


@st.composite
def forced_programs(draw: st.DrawFn) -> RequestGraph:
    maker = GraphMaker()
    at = maker.add(Text((draw(st.sampled_from(["a", "abc ", "xyxy"])),)), None)
    for i in range(draw(st.integers(1, 3))):
        sampling = SamplingParams(
            max_tokens=draw(st.sampled_from([2, 5, 40])),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            stop=draw(st.sampled_from([(), ("xyx",), ("bc", "q")])),
        )
        at = maker.add(Gen(f"g{i}", sampling, draw(st.sampled_from(FORCED_TEXTS))), at)
        at = maker.add(Text(("y",)), at)
    return maker.graph()


@settings(max_examples=100)
@given(st.lists(forced_programs(), min_size=1, max_size=3), st.integers(3, 64))
def test_rule_16_jumping_over_forced_text_equals_sampling_it(
    programs: list[RequestGraph], budget: int
) -> None:
    jumping = make_engine(max_step_tokens=budget)
    stepping = make_engine(jump_forward=False)
    found = run_graphs(jumping, programs)
    assert outcomes(found) == outcomes(run_graphs(stepping, programs))
    check_idle(jumping)


def test_forced_text_is_appended_without_a_step_for_each_token() -> None:
    maker = GraphMaker()
    constraint = Regex("(a|b)" + "xyq0" * 8)
    at = maker.add(Text(("abc",)), None)
    maker.add(Gen("x", SamplingParams(max_tokens=64), constraint), at)
    jumping, stepping = make_engine(), make_engine(jump_forward=False)
    (found,) = run_graphs(jumping, [maker.graph()])
    (sampled,) = run_graphs(stepping, [maker.graph()])
    assert found.outcome() == sampled.outcome()
    usage = found.results[1].usage
    assert usage.forced_tokens == usage.completion_tokens - 1 == 8 * 3
    assert stepping.stats()["steps"] == usage.completion_tokens
    assert jumping.stats()["steps"] == 1


@pytest.mark.parametrize(("overlap", "forced"), [(False, 1 + 1 + 2 + 3), (True, 3)])  # xy is one
def test_with_overlap_short_forced_text_is_sampled(overlap: bool, forced: int) -> None:
    maker = GraphMaker()
    constraint = Regex("[ab]x[ab]xy[ab]xyq[ab]xyq0[ab]")
    at = maker.add(Text(("abc",)), None)
    maker.add(Gen("x", SamplingParams(max_tokens=64), constraint), at)
    (found,) = run_graphs(make_engine(overlap=overlap), [maker.graph()])
    (sampled,) = run_graphs(make_engine(jump_forward=False), [maker.graph()])
    assert found.outcome() == sampled.outcome()
    assert found.results[1].usage.forced_tokens == forced


@many
@given(batches)
def test_rule_13_deltas_concatenate_to_the_value(programs: list[RequestGraph]) -> None:
    for collector in run_graphs(make_engine(), programs):
        for node, result in collector.results.items():
            if result.samples:
                assert collector.deltas.get(node, "") == result.text
