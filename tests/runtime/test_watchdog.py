"""Steps that do not end: their runs do, with the reason; and steps that are merely long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from tests.support.engine_harness import GRAMMAR, TOKENIZER, Collector, make_runner
from tests.support.graphs import GraphBuilder

from umbel.lang.errors import EngineConfigError, EngineError, EngineStoppedError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen
from umbel.lang.results import Event, RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.watchdog import FIRST_GRACE, StepAbandonedError, StepWatch

LONG = SamplingParams(max_tokens=300, ignore_eos=True)
WAIT_S = 20.0


class Gate:
    """A poison for runners: once shut, a pass waits at it until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.is_reached = threading.Event()

    def __call__(self, prefix: Sequence[int]) -> bool:
        if not self.open.is_set():
            self.is_reached.set()
            assert self.open.wait(WAIT_S)
        return False


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def program() -> RequestGraph:
    builder = GraphBuilder()
    builder.add(Gen("x", LONG), builder.text("abc"))
    return builder.piece()


def new_engine(gate: Gate, timeout_s: float | None) -> Engine:
    config = EngineConfig(step_timeout_s=timeout_s, max_running=8, max_step_tokens=64)
    return Engine(make_runner(poison=gate), TOKENIZER, config, max_seq_len=512, grammar=GRAMMAR)


def start(engine: Engine) -> Collector:
    collector = Collector()
    session = engine.open(RunOptions(), collector)
    session.extend(program())
    session.close()
    return collector


def test_a_stuck_pass_fails_every_node_and_refuses_what_comes_after(gate: Gate) -> None:
    engine = new_engine(gate, 0.05)
    warm = start(engine)
    warm.wait(2, WAIT_S)
    gate.open.clear()
    stuck, waiting = start(engine), start(engine)
    for collector in (stuck, waiting):
        collector.wait(2, WAIT_S)
        assert collector.errors == {1: "EngineStoppedError"}
        assert list(collector.results) == [0]
    with pytest.raises(EngineStoppedError) as refused:
        start(engine)
    assert "a forward pass has taken more than" in str(refused.value.__cause__)
    with pytest.raises(EngineStoppedError):
        engine.reset_cache()
    engine.close()  # returns although the thread hangs


def test_a_thread_that_comes_back_finds_that_it_owns_nothing(gate: Gate) -> None:
    engine = new_engine(gate, 0.05)
    start(engine).wait(2, WAIT_S)
    gate.open.clear()
    collector = start(engine)
    collector.wait(2, WAIT_S)
    outcome = collector.outcome()
    gate.open.set()
    assert engine._thread is not None
    engine._thread.join(WAIT_S)
    assert not engine._thread.is_alive()
    assert collector.outcome() == outcome, "nothing came after the end"
    engine.close()


def test_a_sink_may_close_an_engine_that_was_given_up(gate: Gate) -> None:
    engine = new_engine(gate, 0.05)
    start(engine).wait(2, WAIT_S)
    gate.open.clear()
    closed = threading.Event()

    def sink(events: Sequence[Event]) -> None:
        if gate.is_reached.is_set():
            engine.close()
            closed.set()

    session = engine.open(RunOptions(), sink)
    session.extend(program())
    assert closed.wait(WAIT_S)


def test_the_first_pass_of_a_kind_may_take_longer(gate: Gate) -> None:
    engine = new_engine(gate, 0.1)
    gate.open.clear()
    collector = start(engine)
    assert gate.is_reached.wait(WAIT_S)
    time.sleep(0.4)  # as if kernels were compiled
    gate.open.set()
    collector.wait(2, WAIT_S)
    assert list(collector.results) == [0, 1]
    engine.close()


@pytest.mark.parametrize("timeout_s", [None, 0.0])
def test_without_a_limit_a_pass_may_take_as_long_as_it_likes(
    timeout_s: float | None, gate: Gate
) -> None:
    engine = new_engine(gate, timeout_s)
    start(engine).wait(2, WAIT_S)
    gate.open.clear()
    collector = start(engine)
    assert gate.is_reached.wait(WAIT_S)
    time.sleep(0.2)
    assert not collector.errors
    gate.open.set()
    collector.wait(2, WAIT_S)
    assert list(collector.results) == [0, 1]
    engine.close()


def test_phases_that_end_in_time_are_let_pass_and_errors_leave_them() -> None:
    given_up: list[EngineError] = []
    watch = StepWatch(0.2, given_up.append)
    watch.start()
    for _ in range(20):
        with watch.phase("a pass"):
            time.sleep(0.02)
        with pytest.raises(ZeroDivisionError), watch.phase("a pass"):
            raise ZeroDivisionError
    time.sleep(0.5)  # between phases nothing is watched
    watch.close()
    assert given_up == []
    assert not watch.is_abandoned


def test_the_watched_thread_is_told_that_it_was_given_up() -> None:
    told = threading.Event()
    watch = StepWatch(0.05, lambda error: told.set())
    watch.start()
    with watch.phase("a pass", "known"):
        pass
    with pytest.raises(StepAbandonedError), watch.phase("a pass", "known"):
        assert told.wait(WAIT_S)
    assert watch.is_abandoned
    assert FIRST_GRACE > 1


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="step_timeout_s"):
        EngineConfig(step_timeout_s=-1.0)
