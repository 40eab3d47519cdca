"""Passes that raise: what is retried, what fails, and that the others never notice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    TOKENIZER,
    Collector,
    check_idle,
    drive,
    graphs,
    make_engine,
    make_runner,
    open_run,
    run_graphs,
)
from tests.support.graphs import GraphBuilder
from tests.support.hash_runner import HashLogits, HashRunner

from umbel.lang.errors import EngineStoppedError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Op, Select
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine
from umbel.runtime.model_runner.inputs import StepInputs
from umbel.runtime.pass_retry import RECOVERY_PASSES
from umbel.runtime.scheduler.policy import POLICIES

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
BAD = TOKENIZER.encode_text("qqq")  # a prompt that begins with it can't be computed


class FailingRunner(HashRunner):
    """Raises what `fault` says of a pass, after half of the pass has been written."""

    def __init__(self, fault: Callable[[StepInputs], BaseException | None], num_slots: int = 768):
        like = make_runner()
        super().__init__(num_slots, like.vocab_size, eos_id=min(TOKENIZER.eos_ids), eos_boost=2.0)
        self.fault = fault
        self.num_failed = 0

    def forward(self, inputs: StepInputs) -> HashLogits:
        error = self.fault(inputs)
        if error is not None:
            self.num_failed += 1
            half = len(inputs.slot_mapping) // 2
            self._token[inputs.slot_mapping[:half]] = 7  # the slots hold what nobody may read
            self._position[inputs.slot_mapping[:half]] = 10**6
            raise error
        return super().forward(inputs)


def prompt(*ops: Op, text: str = "xyxy") -> RequestGraph:
    builder = GraphBuilder()
    at: int | None = builder.text(text)
    for op in ops:
        at = builder.add(op, at)
    return builder.piece()


def rows_of(runner: HashRunner, inputs: StepInputs) -> list[list[int]]:
    """The tokens that each sequence of a pass has in its first rows."""
    tokens = runner._token.copy()
    tokens[inputs.slot_mapping] = inputs.known_token_ids()
    indices, ends = inputs.kv_indices, inputs.kv_indptr.tolist()
    return [tokens[indices[a:b]].tolist() for a, b in itertools.pairwise(ends)]


def poisoned(error: Exception, start: Sequence[int] = BAD) -> FailingRunner:
    """A runner that raises wherever a sequence begins with `start`."""

    def fault(inputs: StepInputs) -> BaseException | None:
        rows = rows_of(runner, inputs)
        return error if any(row[: len(start)] == list(start) for row in rows) else None

    runner = FailingRunner(fault)
    return runner


def short_of_memory(most: int) -> FailingRunner:
    """A runner whose passes have room for so many tokens."""

    def fault(inputs: StepInputs) -> BaseException | None:
        if len(inputs.token_ids) > most:
            return torch.OutOfMemoryError("CUDA out of memory")
        return None

    return FailingRunner(fault)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("op", [Gen("x", LONG, n=2), Select("x", ("a", "b"))])
def test_a_poisoned_request_fails_alone_and_the_others_end_as_without_it(
    op: Op, overlap: bool
) -> None:
    engine = make_engine(poisoned(ZeroDivisionError("bad")), overlap=overlap)
    healthy = [prompt(Gen("y", LONG), text=t) for t in ("ab", "abc", "xy", "ab ab", "q")]
    well = [open_run(engine, graph, row=row)[1] for row, graph in enumerate(healthy)]
    for _ in range(3):
        engine.step()
    _, ill = open_run(engine, prompt(op, text="qqq"))
    drive(engine)
    assert ill.errors == {1: "EngineError"}
    alone = make_engine()
    for row, (graph, collector) in enumerate(zip(healthy, well, strict=True)):
        _, expected = open_run(alone, graph, row=row)
        drive(alone)
        assert collector.outcome() == expected.outcome()
    _, later = open_run(engine, prompt(op, text="qq"))
    drive(engine)
    assert list(later.results) == [0, 1], "the engine runs on"
    check_idle(engine)


def test_the_search_takes_a_few_passes_for_each_halving() -> None:
    runner = poisoned(ZeroDivisionError("bad"))
    engine = make_engine(runner, max_running=64, max_step_tokens=512)
    runs = [open_run(engine, prompt(Gen("y", LONG), text=f"a{i}"), row=i)[1] for i in range(32)]
    _, ill = open_run(engine, prompt(Gen("x", LONG), text="qqq"))
    drive(engine)
    assert ill.errors == {1: "EngineError"}
    assert all(len(run.results) == 2 for run in runs)
    assert runner.num_failed <= 7, "33 requests are halved six times"


def test_several_poisoned_requests_fail_and_only_they() -> None:
    engine = make_engine(poisoned(ZeroDivisionError("bad")))
    texts = ["qqq", "ab", "qqqa", "abc", "qqqb", "xy"]
    runs = [open_run(engine, prompt(Gen("y", LONG), text=t), row=i)[1] for i, t in enumerate(texts)]
    drive(engine)
    for text, run in zip(texts, runs, strict=True):
        assert bool(run.errors) == text.startswith("qqq"), text
    check_idle(engine)


def test_an_error_that_comes_once_costs_nobody_anything() -> None:
    runner = FailingRunner(lambda inputs: None)
    engine = make_engine(runner)
    _, run = open_run(engine, prompt(Gen("y", LONG)))
    _, other = open_run(engine, prompt(Gen("y", LONG), text="abc"))
    for _ in range(3):
        engine.step()
    faults: list[BaseException] = [ZeroDivisionError("once")]
    runner.fault = lambda inputs: faults.pop() if faults else None
    drive(engine)
    assert runner.num_failed == 1
    assert list(run.results) == list(other.results) == [0, 1]
    assert engine.stats()["retried"] == 2
    check_idle(engine)


def test_a_pass_that_fails_as_a_whole_only_is_made_smaller() -> None:
    def fault(inputs: StepInputs) -> BaseException | None:
        return ZeroDivisionError("three's a crowd") if len(inputs.kv_indptr) > 3 else None

    runner = FailingRunner(fault)
    engine = make_engine(runner)
    runs = [open_run(engine, prompt(Gen("y", LONG), text=t))[1] for t in ("a", "b", "xy", "c")]
    drive(engine)
    assert all(len(run.results) == 2 for run in runs)
    assert runner.num_failed < 2 * sum(len(run.deltas.get(1, "")) for run in runs)
    check_idle(engine)


def test_a_device_that_computes_nothing_any_more_fails_everything_and_ends_nothing_in_a_loop() -> (
    None
):
    runner = FailingRunner(lambda inputs: ZeroDivisionError("gone"))
    engine = make_engine(runner)
    runs = [open_run(engine, prompt(Gen("y", LONG), text="a" * i))[1] for i in range(1, 30)]
    drive(engine)
    assert all(run.errors == {1: "EngineError"} for run in runs)
    assert runner.num_failed < 5 * len(runs)
    check_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_out_of_memory_makes_passes_smaller_until_they_fit_and_larger_again(overlap: bool) -> None:
    runner = short_of_memory(9)
    engine = make_engine(runner, overlap=overlap)
    texts = ["ab" * 30, "abc" * 20, "q" * 50]
    runs = [open_run(engine, prompt(Gen("y", LONG), text=t), row=i)[1] for i, t in enumerate(texts)]
    drive(engine)
    assert all(len(run.results) == 2 for run in runs)
    assert 1 <= engine.stats()["memory_shortages"] <= 12
    runner.fault = lambda inputs: None
    _, run = open_run(engine, prompt(*[Gen("z", LONG)] * 8, text="a"))
    limits = []
    while engine.step():
        limits.append(engine.stats()["step_limit"])
    assert limits[-1] == 64, "the budget has recovered"
    assert len(limits) >= RECOVERY_PASSES
    assert len(run.results) == 9
    check_idle(engine)


def test_what_does_not_fit_in_the_smallest_pass_fails_with_the_way_out() -> None:
    start = TOKENIZER.encode_text("qq")
    engine = make_engine(poisoned(torch.OutOfMemoryError("CUDA out of memory"), start))
    _, ill = open_run(engine, prompt(Gen("x", LONG), text="qq" * 9))
    _, well = open_run(engine, prompt(Gen("x", LONG), text="ab" * 9))
    drive(engine)
    assert ill.errors == {1: "EngineError"}
    assert "lower kv_tokens" in ill.messages[1]
    assert len(well.results) == 2
    check_idle(engine)


def test_a_device_fault_that_lasts_stops_the_engine_and_says_why() -> None:
    fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    runner = FailingRunner(lambda inputs: fault)
    like = make_engine()
    engine = Engine(runner, TOKENIZER, like.config, max_seq_len=512)
    collector = Collector()
    session = engine.open(RunOptions(), collector)
    session.extend(prompt(Gen("x", LONG)))
    collector.wait(2, 20)
    engine.close()
    assert collector.errors == {1: "EngineStoppedError"}
    with pytest.raises(EngineStoppedError) as stopped:
        engine.open(RunOptions(), collector)
    assert stopped.value.__cause__ is fault


batches = st.lists(graphs(), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    batches,
    st.lists(st.sampled_from(["memory", "error", "well", "well", "well"]), max_size=60),
    st.booleans(),
    st.sampled_from(sorted(POLICIES)),
    st.integers(160, 400),
    st.integers(3, 40),
    st.sampled_from([1, 16]),
)
def test_passes_that_fail_now_and_then_change_no_output(
    programs: list[RequestGraph],
    faults: list[str],
    overlap: bool,
    policy: str,
    num_slots: int,
    budget: int,
    page_size: int,
) -> None:
    left = list(faults)

    def fault(inputs: StepInputs) -> BaseException | None:
        what = left.pop() if left else "well"
        if what == "memory" and len(inputs.token_ids) > 1:
            return torch.OutOfMemoryError("CUDA out of memory")
        # a single request that fails is given up, which is another property
        if what == "error" and len(inputs.kv_indptr) > 2:
            return ZeroDivisionError("bad")
        return None

    runner = FailingRunner(fault, num_slots)
    shaken = make_engine(
        runner,
        overlap=overlap,
        policy=policy,
        max_step_tokens=budget,
        max_seq_len=140,
        page_size=page_size,
    )
    calm = make_engine(max_seq_len=140)
    expected = [c.outcome() for c in run_graphs(calm, programs)]
    assert [c.outcome() for c in run_graphs(shaken, programs)] == expected
    left[:] = faults
    assert [c.outcome() for c in run_graphs(shaken, programs)] == expected
    check_idle(shaken)
    stats = shaken.stats()
    assert stats["failed_steps"] == runner.num_failed
    assert stats["useful_tokens"] <= stats["step_tokens"] <= stats["budget_tokens"]
