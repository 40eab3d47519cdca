"""The end of an engine: at once, or when what runs has ended; and nobody waits for good."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from tests.support.engine_harness import (
    GRAMMAR,
    TOKENIZER,
    Collector,
    check_idle,
    make_engine,
    make_runner,
)
from tests.support.graphs import GraphBuilder

from umbel.interpreter.backends.local import LocalBackend
from umbel.lang.errors import EngineStoppedError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen
from umbel.lang.results import Event, RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
WAIT_S = 20.0


def new_engine(pause_s: float = 0.0) -> Engine:
    def slow(prefix: Sequence[int]) -> bool:
        time.sleep(pause_s)
        return False

    config = EngineConfig(max_running=8, max_step_tokens=64)
    runner = make_runner(poison=slow if pause_s else None)
    return Engine(runner, TOKENIZER, config, max_seq_len=512, grammar=GRAMMAR)


def piece(builder: GraphBuilder, text: str = "abc") -> RequestGraph:
    builder.add(Gen("x", LONG), builder.text(text))
    return builder.piece()


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


def test_draining_lets_runs_end_those_that_grow_too_and_refuses_new_ones() -> None:
    engine = new_engine(0.001)
    builder, growing, whole = GraphBuilder(), Collector(), Collector()
    first = engine.open(RunOptions(), growing)
    first.extend(piece(builder))
    second = engine.open(RunOptions(), whole)
    second.extend(piece(GraphBuilder()))
    second.close()
    closing = in_thread(lambda: engine.close(drain=math.inf))
    wait_until(lambda: engine._drain_until is not None)
    with pytest.raises(EngineStoppedError, match="closing: it takes no new runs"):
        engine.open(RunOptions(), Collector())
    growing.wait(2, WAIT_S)
    whole.wait(2, WAIT_S)
    assert closing.is_alive(), "a run that may grow is not over"
    first.extend(piece(builder))
    growing.wait(4, WAIT_S)
    first.close()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert sorted(growing.results) == [0, 1, 2, 3]
    assert sorted(whole.results) == [0, 1]
    check_idle(engine)


@pytest.mark.parametrize("drain", [0.0, 0.05])
def test_what_has_not_ended_in_time_fails(drain: float) -> None:
    engine = new_engine(0.05)
    collector = Collector()
    session = engine.open(RunOptions(), collector)
    session.extend(piece(GraphBuilder()))
    session.close()
    LocalBackend(engine).close(drain=drain)
    assert collector.errors == {1: "EngineStoppedError"}
    with pytest.raises(EngineStoppedError, match="no longer running"):
        engine.open(RunOptions(), collector)


def test_a_second_close_may_cut_the_first_one_short() -> None:
    engine = new_engine(0.02)
    collector = Collector()
    engine.open(RunOptions(), collector).extend(piece(GraphBuilder()))
    closing = in_thread(lambda: engine.close(drain=math.inf))
    wait_until(lambda: engine._drain_until is not None)
    engine.close()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert collector.errors == {1: "EngineStoppedError"}


def test_an_idle_engine_is_drained_at_once() -> None:
    engine = new_engine()
    closing = in_thread(lambda: engine.close(drain=math.inf))
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_sink_may_ask_for_the_drain() -> None:
    engine = new_engine()
    collector = Collector()

    def sink(events: Sequence[Event]) -> None:
        collector(events)
        engine.close(drain=math.inf)

    session = engine.open(RunOptions(), sink)
    session.extend(piece(GraphBuilder()))
    session.close()
    assert engine.stopped.wait(WAIT_S)
    assert sorted(collector.results) == [0, 1]


def test_an_engine_without_a_thread_is_drained_by_its_caller() -> None:
    engine = make_engine()
    collector = Collector()
    session = engine.open(RunOptions(), collector)
    session.extend(piece(GraphBuilder()))
    session.close()
    engine.close(drain=math.inf)
    assert sorted(collector.results) == [0, 1]
