"""The engine on a random two-layer model in fp32: real attention over the real paged pool."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    check_idle,
    graphs,
    make_engine,
    run_graphs,
)
from tests.support.equality import assert_same_outcome
from tests.support.tiny_model import tiny_runner

from umbel.lang.graph import RequestGraph
from umbel.runtime.engine import Engine

batches = st.lists(graphs(greedy=True), min_size=1, max_size=3)
quick = settings(max_examples=25)  # about a hundred over the four equalities


def tiny_engine(num_slots: int = 768, **options: object) -> Engine:
    return make_engine(tiny_runner(num_slots), **options)


def assert_same(
    programs: list[RequestGraph],
    one: Engine,
    two: Engine,
    *,
    alone: bool = False,
    pieces: bool = False,
) -> None:
    left = run_graphs(one, programs)
    right = run_graphs(two, programs, alone=alone, pieces=pieces)
    for graph, a, b in zip(programs, left, right, strict=True):
        assert_same_outcome(graph, a, b)
    check_idle(one)
    check_idle(two)


@quick
@given(batches)
def test_rule_16_cached_equals_cold(programs: list[RequestGraph]) -> None:
    assert_same(programs, tiny_engine(), tiny_engine(prefix_cache=False))


@quick
@given(batches)
def test_rule_16_batched_equals_alone(programs: list[RequestGraph]) -> None:
    assert_same(programs, tiny_engine(), tiny_engine(prefix_cache=False), alone=True)


@quick
@given(batches, st.integers(1, 12))
def test_rule_16_chunked_equals_whole(programs: list[RequestGraph], budget: int) -> None:
    assert_same(programs, tiny_engine(max_step_tokens=4096), tiny_engine(max_step_tokens=budget))


@quick
@given(batches, st.integers(150, 300))
def test_rule_16_stepwise_in_a_tiny_pool_equals_compiled(
    programs: list[RequestGraph], num_slots: int
) -> None:
    small = tiny_engine(num_slots, max_seq_len=149, max_step_tokens=16)
    assert_same(programs, tiny_engine(max_seq_len=149), small, pieces=True)
