"""Rows of logits that can't be worked on together: nothing is lost but what can't be done alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine_harness import (
    TOKENIZER,
    check_idle,
    drive,
    graphs,
    make_engine,
    make_runner,
    open_run,
    run_graphs,
)
from tests.support.graphs import chain
from tests.support.short_memory import PLACES, Place, short_of_memory
from torch import Tensor

from umbel.lang.constraints import Regex
from umbel.lang.errors import EngineError, UmbelError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Select, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime import prompt_scorer
from umbel.runtime.row_pieces import RowPieces
from umbel.runtime.sampling import RowScores, score_rows
from umbel.runtime.watchdog import StepWatch

CHOICES = ("abd", "abc", "x01", "x02", "9")
SCORED = SamplingParams(max_tokens=3, prompt_logprobs=True, top_logprobs=2)
PENALISED = SamplingParams(
    max_tokens=9,
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    logit_bias=((5, 1.0),),
    top_logprobs=3,
)


def new_pieces() -> RowPieces:
    return RowPieces(StepWatch(None, lambda error: None))


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 9), st.sets(st.integers(0, 39)))
def test_every_row_is_worked_on_once_and_those_that_fail_alone_fail(
    num_rows: int, most: int, room: int, bad: set[int]
) -> None:
    worked: list[int] = []
    failed: dict[int, UmbelError] = {}

    def work(start: int, end: int) -> None:
        assert 0 < end - start <= most
        if end - start > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if bad.intersection(range(start, end)):
            raise ZeroDivisionError("bad")
        worked.extend(range(start, end))

    pieces = new_pieces()
    pieces.run("work", num_rows, most, work, failed.__setitem__)
    assert sorted(failed) == sorted(bad.intersection(range(num_rows)))
    assert worked == [row for row in range(num_rows) if row not in bad]
    assert (pieces.num_memory_shortages > 0) == (min(num_rows, most) > room)


def test_a_row_that_does_not_fit_alone_fails_with_the_way_out() -> None:
    def work(start: int, end: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    failed: dict[int, UmbelError] = {}
    new_pieces().run("sampling", 2, 2, work, failed.__setitem__)
    assert sorted(failed) == [0, 1]
    assert isinstance(failed[0], EngineError)
    assert "ran out of memory over a single row of logits" in str(failed[0])
    assert "lower kv_tokens" in str(failed[0])


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), torch.AcceleratorError("CUDA error: an illegal memory access")]
)
def test_what_is_no_row_s_failure_is_raised(error: BaseException) -> None:
    def work(start: int, end: int) -> None:
        raise error

    with pytest.raises(type(error)):
        new_pieces().run("sampling", 2, 2, work, lambda row, error: None)


# --- in an engine ---------------------------------------------------------------------------


def programs() -> list[RequestGraph]:
    """Selects of both kinds, scored prompts, samples with penalties, masks and alternatives."""
    both = Select("s", CHOICES, method="unconditional_likelihood_normalized")
    return [
        chain(Text(("0123456789",)), Select("s", CHOICES), Gen("x", PENALISED, n=3)),
        chain(Text(("9876543210",)), Gen("y", SCORED), both),
        chain(Text(("0123",)), Gen("z", SCORED, Regex("[ab]{2,9}")), Gen("w", PENALISED)),
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("room", [1, 2])
def test_memory_for_a_few_rows_of_logits_gives_what_memory_for_all_gives(
    room: int, place: Place, overlap: bool
) -> None:
    engine = make_engine(overlap=overlap)
    short_of_memory(engine, lambda where, logits: where == place and len(logits) > room)
    expected = run_graphs(make_engine(), programs())
    found = run_graphs(engine, programs())
    assert not any(c.errors for c in found)
    assert [c.outcome() for c in found] == [c.outcome() for c in expected]
    assert engine.stats()["memory_shortages"] > 0
    check_idle(engine)


def test_a_prompt_s_rows_that_can_t_be_ranked_together_are_ranked_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run_graphs(make_engine(), programs())

    def score_few(logits: Tensor, at: object, ids: object, num_top: int) -> RowScores:
        if len(logits) > 1:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return score_rows(logits, at, ids, num_top)  # type: ignore[arg-type]

    monkeypatch.setattr(prompt_scorer, "score_rows", score_few)
    engine = make_engine()
    found = run_graphs(engine, programs())
    assert [c.outcome() for c in found] == [c.outcome() for c in expected]
    assert engine.stats()["memory_shortages"] > 0


batches = st.lists(graphs(), min_size=1, max_size=4)


@given(batches, st.lists(st.booleans(), max_size=80), st.booleans(), st.integers(3, 40))
def test_shortages_now_and_then_change_no_output(
    programs: list[RequestGraph], shortages: list[bool], overlap: bool, budget: int
) -> None:
    left = list(shortages)
    engine = make_engine(overlap=overlap, max_step_tokens=budget)
    short_of_memory(engine, lambda _, logits: len(logits) > 1 and bool(left) and left.pop())
    expected = [c.outcome() for c in run_graphs(make_engine(), programs)]
    assert [c.outcome() for c in run_graphs(engine, programs)] == expected
    check_idle(engine)


# --- what can't be done alone ---------------------------------------------------------------


def bad_after(*prefixes: Sequence[int]) -> Callable[[Sequence[int]], bool]:
    return lambda prefix: list(prefix) in [list(bad) for bad in prefixes]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_does_not_fit_alone_fails_who_needs_it_and_nobody_else(overlap: bool) -> None:
    """Rows are marked by a NaN, which nobody gets to see: memory runs out before."""
    start = TOKENIZER.encode_text("0123")
    runner = make_runner(poison=bad_after(start, TOKENIZER.encode_text("5x")))
    engine = make_engine(runner, overlap=overlap, max_step_tokens=200)
    short_of_memory(engine, lambda _, logits: bool(logits.isnan().any()))
    healthy = [
        chain(Text(("9876",)), Gen("y", SCORED)),
        chain(Text(("9" * 80,)), Select("s", CHOICES)),
        chain(Text(("777",)), Gen("x", PENALISED, n=2)),
    ]
    ill = [
        chain(Text(("01234567",)), Gen("y", SCORED)),
        chain(Text(("0123888",)), Gen("y", SCORED)),
        chain(Text(("5",)), Select("s", CHOICES)),
    ]
    well = [open_run(engine, graph, row=row)[1] for row, graph in enumerate(healthy)]
    failed = [open_run(engine, graph)[1] for graph in ill]
    drive(engine)
    for collector in failed:
        assert collector.errors == {1: "EngineError"}
        assert "over a single row of logits" in collector.messages[1]
    alone = make_engine()
    for row, (graph, collector) in enumerate(zip(healthy, well, strict=True)):
        _, expected = open_run(alone, graph, row=row)
        drive(alone)
        assert collector.outcome() == expected.outcome()
    check_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cause", ["memory", "defect"])
def test_a_row_that_can_t_be_sampled_fails_alone(cause: str, overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    sampler = engine.core._passes._parts.sampler

    def sample(logits: Tensor, rows: Sequence[object], *others: object) -> object:
        if any(row.params.top_k == 7 for row in rows):  # type: ignore[attr-defined]
            raise MemoryError if cause == "memory" else ZeroDivisionError("bad")
        return original(logits, rows, *others)  # type: ignore[arg-type]

    original, sampler.sample = sampler.sample, sample  # type: ignore[assignment, method-assign]
    graph = chain(Text(("ab",)), Gen("y", PENALISED))
    well = [open_run(engine, graph, row=row)[1] for row in range(4)]
    _, ill = open_run(engine, chain(Text(("ab",)), Gen("y", SamplingParams(top_k=7))))
    drive(engine)
    assert ill.errors == {1: "EngineError"}
    assert ("single row of logits" in ill.messages[1]) == (cause == "memory")
    alone = make_engine()
    for row, collector in enumerate(well):
        _, expected = open_run(alone, graph, row=row)
        drive(alone)
        assert collector.outcome() == expected.outcome()
    check_idle(engine)
