"""The engine's edges: what may be raised where, how it stops, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from tests.support.engine_harness import (
    GRAMMAR,
    TOKENIZER,
    Collector,
    check_idle,
    drive,
    make_engine,
    make_runner,
    open_run,
)
from tests.support.graphs import GraphBuilder, chain

from umbel.lang.constraints import Constraint, Regex
from umbel.lang.errors import EngineStoppedError, ProgramError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Op, Select, Text
from umbel.lang.results import Event, RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.engine_session import EngineSession
from umbel.runtime.grammar.matcher import CompiledGrammar
from umbel.runtime.model_runner.runner import Runner
from umbel.runtime.program_run import ProgramRun

WAIT_S = 20.0
SHORT = SamplingParams(max_tokens=4)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
# tens of thousands of states: more than a moment's work for whoever compiles it
SLOW = Regex("(a|b)*a(a|b){17}c")


PLAIN = chain(Text(("xyxy",)), Gen("b", SHORT))


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Start engines with a thread, which are closed in the end."""
    engines: list[Engine] = []

    def start(runner: Runner | None = None, grammar: Any = GRAMMAR) -> Engine:
        config = EngineConfig(check_accounting=True, max_running=8, max_step_tokens=64)
        engine = Engine(
            runner or make_runner(), TOKENIZER, config, max_seq_len=512, grammar=grammar
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        close_in_time(engine)


def close_in_time(engine: Engine) -> None:
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive(), "close hangs"


# --- one request, one pass, one run ---------------------------------------------------------


@pytest.mark.parametrize("op", [Gen("x", LONG), Select("x", ("a", "b"))])
def test_logits_that_are_no_distribution_fail_their_node_alone(op: Op) -> None:
    poisoned = TOKENIZER.encode_text("q")[0]
    engine = make_engine(make_runner(poison=lambda prefix: prefix[0] == poisoned))
    _, well = open_run(engine, PLAIN)
    _, ill = open_run(engine, chain(Text(("qq",)), op))
    drive(engine)
    assert ill.errors == {1: "EngineError"}
    assert list(well.results) == [0, 1]
    check_idle(engine)


class BrokenGrammar:
    """A compiler whose future fails, or whose matcher does, with what nobody raises on purpose."""

    class Panic(BaseException):
        """As native libraries raise: no Exception."""

    def __init__(self, at: str) -> None:
        self._at = at

    def submit(self, constraint: Constraint) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        if self._at == "compile":
            future.set_exception(self.Panic("unreachable code"))
        else:
            future.set_result(self)  # type: ignore[arg-type]
        return future

    engine = "broken"

    def matcher(self) -> BrokenGrammar:
        if self._at == "matcher":
            raise RuntimeError("no memory")
        return self

    def fill(self, row: Any) -> None:
        if self._at == "fill":
            raise self.Panic("index out of bounds")
        row[:] = -1

    def accept(self, token_id: int) -> bool:
        raise AssertionError(f"{token_id} was masked out")


@pytest.mark.parametrize("at", ["compile", "matcher", "fill", "accept"])
def test_rule_15_a_grammar_s_defect_fails_its_node_alone(at: str) -> None:
    engine = make_engine()
    tasks = engine.core.executor.tasks
    broken: Any = BrokenGrammar(at)
    tasks._parts = dataclasses.replace(tasks._parts, grammar=broken)
    _, well = open_run(engine, PLAIN)
    _, ill = open_run(engine, chain(Text(("ab",)), Gen("x", LONG, Regex("a")), Text(("!",))))
    drive(engine)
    assert ill.errors == {1: "EngineError", 2: "GenerationError"}
    assert list(well.results) == [0, 1]
    check_idle(engine)


def test_rule_14_without_eos_a_value_goes_on_while_something_can_follow() -> None:
    for seed in range(20):
        _, collector = open_run(
            engine := make_engine(),
            chain(
                Text(("abc",)),
                Gen("x", SamplingParams(max_tokens=60, ignore_eos=True), Regex("[ab]{2,7}")),
                Gen("y", SamplingParams(max_tokens=9, ignore_eos=True), Regex("x*")),
                Gen("z", SamplingParams(max_tokens=9, ignore_eos=True), Regex("")),
            ),
            seed=seed,
        )
        drive(engine)
        assert len(collector.results[1].text) == 7
        assert collector.results[2].text == "x" * 9
        assert collector.results[3].text == ""


def test_a_defect_of_the_scheduler_stops_the_engine_and_says_why(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, collector = start(), Collector()
    session = engine.open(RunOptions(), collector)

    def lost() -> None:
        raise AssertionError("slots were lost")

    monkeypatch.setattr(engine.core.scheduler, "check", lost)
    session.extend(chain(Text(("abc",)), Gen("x", LONG)))
    collector.wait(2, WAIT_S)
    assert collector.errors == {1: "EngineStoppedError"}
    with pytest.raises(EngineStoppedError) as stopped:
        session.extend(RequestGraph((), base=2))
    assert str(stopped.value.__cause__) == "slots were lost"


@pytest.mark.parametrize(
    "op",
    [
        Gen("x", SHORT, n=2),
        Select("x", ("a", "b"), method="unconditional_likelihood_normalized"),
    ],
)
def test_what_is_rejected_late_fails_its_node_and_what_it_frees_runs(op: Op) -> None:
    engine = make_engine(make_runner(num_slots=64), check_accounting=False)
    taken = engine.core._allocator.alloc(44)  # as if it were pinned by somebody
    builder = GraphBuilder()
    tip, other = builder.fork(None, 2)
    ill = builder.add(op, builder.text("q" * 30, tip))
    join = builder.join([ill, builder.text("b", other)], None, "collect", "append")
    builder.add(Gen("after", SHORT), builder.text("xyxy", join))
    _, collector = open_run(engine, builder.piece())
    while engine.step():
        pass  # as the engine's thread does before it waits for a command
    assert collector.errors == {ill: "RequestRejectedError"}
    assert len(collector.results) == len(builder.nodes) - 1
    assert taken is not None
    engine.core._allocator.free(taken)
    check_idle(engine)


# --- sessions -------------------------------------------------------------------------------


def test_a_session_takes_only_the_piece_that_is_due(start: Callable[..., Engine]) -> None:
    engine, collector = start(), Collector()
    session = engine.open(RunOptions(), collector)
    session.extend(PLAIN)
    for wrong in (PLAIN, RequestGraph((), base=3)):
        with pytest.raises(ProgramError, match="the run has 2 nodes"):
            session.extend(wrong)
    session.close()
    session.close()
    with pytest.raises(ProgramError, match="closed"):
        session.extend(RequestGraph((), base=2))
    collector.wait(2, WAIT_S)
    assert list(collector.results) == [0, 1]


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
)
def test_a_sink_that_raises_costs_its_own_run_only(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()

    def sink(events: Sequence[Event]) -> None:
        raise error("the reader is gone")

    session = engine.open(RunOptions(), sink)
    session.extend(chain(Text(("abc",)), Gen("x", LONG)))
    _, well = open_run(engine, PLAIN)
    drive(engine)
    assert list(well.results) == [0, 1]
    assert engine.stats()["tokens_decoded"] < 50, "the run went on for nobody"
    assert [r.exc_info[0] for r in caplog.records if r.exc_info] == [error]
    session.close()
    drive(engine)
    check_idle(engine)


def test_a_sink_may_cancel_and_extend_its_run() -> None:
    engine, collector = make_engine(), Collector()
    sessions: list[EngineSession] = []
    builder = GraphBuilder()
    builder.add(Gen("x", LONG), builder.text("abc"))
    first = builder.piece()
    builder.add(Gen("y", SHORT), builder.text("xy"))
    pieces = [builder.piece()]

    def sink(events: Sequence[Event]) -> None:
        collector(events)
        if pieces and 1 in collector.started:
            sessions[0].cancel([1])
            sessions[0].extend(pieces.pop())
            sessions[0].close()

    sessions.append(engine.open(RunOptions(), sink))
    sessions[0].extend(first)
    drive(engine)
    assert collector.errors == {1: "CancelledError"}
    assert set(collector.results) == {0, 2, 3}
    check_idle(engine)


def test_a_sink_may_close_the_engine(start: Callable[..., Engine]) -> None:
    engine, collector = start(), Collector()

    def sink(events: Sequence[Event]) -> None:
        collector(events)
        engine.close()

    engine.open(RunOptions(), sink).extend(chain(Text(("abc",)), Gen("x", LONG)))
    collector.wait(2, WAIT_S)
    assert collector.errors == {1: "EngineStoppedError"}


# --- stopping -------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.001)


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.05])
def test_close_while_a_constraint_compiles(pause_s: float, start: Callable[..., Engine]) -> None:
    engine, collector = start(grammar=None), Collector()
    engine.open(RunOptions(), collector).extend(chain(Text(("abc",)), Gen("x", LONG, SLOW)))
    time.sleep(pause_s)
    close_in_time(engine)
    assert collector.num_ended == 2
    assert collector.errors == {1: "EngineStoppedError"}


def test_close_while_a_pass_runs_waits_for_the_pass_only(start: Callable[..., Engine]) -> None:
    in_pass, may_end = threading.Event(), threading.Event()
    passes = []

    def slow(prefix: Sequence[int]) -> bool:
        passes.append(len(prefix))
        in_pass.set()
        assert may_end.wait(WAIT_S)
        return False

    engine, collector = start(make_runner(poison=slow)), Collector()
    engine.open(RunOptions(), collector).extend(chain(Text(("abc",)), Gen("x", LONG)))
    assert in_pass.wait(WAIT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_until(lambda: engine._stopping)
    assert not engine.stopped.is_set()
    may_end.set()
    closing.join(WAIT_S)
    assert not closing.is_alive(), "close hangs"
    assert len(passes) == 1
    assert collector.errors == {1: "EngineStoppedError"}


def test_close_ends_what_waits_in_the_queue_and_is_idempotent() -> None:
    engine = make_engine(max_running=1)
    collectors = [open_run(engine, chain(Text(("abc",)), Gen("x", LONG)))[1] for _ in range(3)]
    for _ in range(3):
        engine.step()
    unseen = open_run(engine, PLAIN)[1]  # still in the inbox
    engine.close()
    engine.close()
    for collector in [*collectors, unseen]:
        assert collector.errors[1] == "EngineStoppedError"
        assert collector.num_ended == 2
    with pytest.raises(EngineStoppedError):
        engine.open(RunOptions(), Collector())
    check_idle(engine)


# --- cancelling and time limits -------------------------------------------------------------


@pytest.mark.parametrize("state", ["compiling", "waiting", "running", "ended"])
def test_rule_3_a_node_can_be_cancelled_in_every_state(state: str) -> None:
    engine = make_engine(max_running=1)
    blocker, _ = open_run(engine, chain(Text(("x",)), Gen("b", LONG)))
    if state == "waiting":
        engine.step()
    op = Gen("x", SHORT if state == "ended" else LONG, SLOW if state == "compiling" else None)
    session, collector = open_run(engine, chain(Text(("abc",)), op))
    if state in ("running", "ended"):
        blocker.cancel()
        engine.step()
    if state == "ended":
        drive(engine)
    session.cancel([1])
    blocker.cancel()
    drive(engine)
    assert collector.errors == ({} if state == "ended" else {1: "CancelledError"})
    check_idle(engine)


def test_rule_3_a_node_s_limit_counts_in_the_queue_too(start: Callable[..., Engine]) -> None:
    def slow(prefix: Sequence[int]) -> bool:
        time.sleep(0.005)
        return False

    engine = start(make_runner(poison=slow))
    blockers = [engine.open(RunOptions(), Collector()) for _ in range(8)]
    for blocker in blockers:  # as many as may run at once
        blocker.extend(chain(Text(("abc",)), Gen("b", LONG)))
    collector = Collector()
    session = engine.open(RunOptions(), collector)
    session.extend(chain(Text(("abc",)), Gen("x", SHORT, timeout=0.05)))
    collector.wait(2, WAIT_S)
    assert collector.errors == {1: "NodeTimeoutError"}
    assert not collector.started


def test_rule_3_a_limit_passes_while_a_constraint_compiles(start: Callable[..., Engine]) -> None:
    engine = start(grammar=None)
    one, other = Collector(), Collector()
    engine.open(RunOptions(), one).extend(chain(Gen("x", SHORT, SLOW, timeout=0.05)))
    engine.open(RunOptions(timeout=0.05), other).extend(chain(Gen("x", SHORT, SLOW)))
    one.wait(1, WAIT_S)
    other.wait(1, WAIT_S)
    assert one.errors == other.errors == {0: "NodeTimeoutError"}


@pytest.mark.parametrize("timeout", [1e12, float("inf"), float("nan")])
def test_a_limit_of_centuries_is_none(timeout: float, start: Callable[..., Engine]) -> None:
    engine = start()
    idle, collector = Collector(), Collector()
    engine.open(RunOptions(timeout=timeout), idle)
    wait_until(lambda: bool(engine.core.executor.runs))
    engine.open(RunOptions(timeout=timeout), collector).extend(PLAIN)
    collector.wait(2, WAIT_S)
    assert list(collector.results) == [0, 1]


# --- many -----------------------------------------------------------------------------------


def test_500_programs_at_once_all_end() -> None:
    engine = make_engine(max_step_tokens=256)
    collectors = []
    for row in range(500):
        text = f"{row % 7} programs {row}"
        graph = chain(Text((text,)), Gen("x", SHORT), Select("s", ("yes", "no")))
        collectors.append(open_run(engine, graph, row=row)[1])
    drive(engine)
    assert all(list(c.results) == [0, 1, 2] for c in collectors)
    check_idle(engine)


@pytest.mark.parametrize("options", [{"max_running": 1}, {"max_step_tokens": 3}, {"policy": "lpm"}])
@pytest.mark.parametrize("num_slots", [60, 768])
def test_selects_of_two_trees_never_wait_for_each_other(
    options: dict[str, Any], num_slots: int
) -> None:
    engine = make_engine(make_runner(num_slots=num_slots), **options)
    select = Select("s", ("a" * 20, "b" * 20), method="unconditional_likelihood_normalized")
    graphs = [chain(Text((f"{i}",)), select, Gen("x", SHORT)) for i in range(10)]
    collectors = [open_run(engine, graph)[1] for graph in graphs]
    drive(engine)
    assert all(list(c.results) == [0, 1, 2] for c in collectors)
    check_idle(engine)


def test_runs_that_are_over_are_forgotten() -> None:
    engine = make_engine()
    graph = chain(Text(("abc",)), Gen("x", SHORT, timeout=1e6), Select("s", ("yes", "no")))
    for _ in range(100):
        open_run(engine, graph, timeout=1e6)
        drive(engine)
    gc.collect()
    kept = [o for o in gc.get_objects() if type(o) is ProgramRun and o.options.timeout == 1e6]
    assert kept == []
    check_idle(engine)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ends_early", [False, True])
def test_rule_3_nothing_hangs_whatever_many_threads_do(
    seed: int, ends_early: bool, start: Callable[..., Engine]
) -> None:
    chance = random.Random(seed)

    def poison(prefix: Sequence[int]) -> bool:
        if chance.random() < 0.002:
            raise RuntimeError("a bad pass")
        return chance.random() < 0.01

    engine = start(make_runner(num_slots=300, poison=poison))
    runs: list[tuple[Collector, int]] = []

    def client(number: int) -> None:
        chance = random.Random(10 * seed + number)
        for row in range(10):
            builder, collector, num_sent = GraphBuilder(), Collector(), 0
            tips = builder.fork(builder.text("abc"), 2)
            constraint = chance.choice([None, Regex("[ab]{2,5}"), Regex("("), SLOW])
            limit = chance.choice([None, 0.01])
            ends = [builder.add(Gen("g", LONG, constraint, timeout=limit), tips[0])]
            ends.append(builder.add(Select("s", ("yes", "no")), tips[1]))
            builder.join(ends, 0, chance.choice(["all", "any", "collect"]), "append")
            timeout = chance.choice([None, 0.05])
            try:
                session = engine.open(RunOptions(row=row, timeout=timeout), collector)
                for node in builder.nodes:
                    session.extend(RequestGraph((node,), node.id))
                    num_sent += 1
                    if chance.random() < 0.1:
                        session.cancel(chance.choice([None, [node.id], [0, 99]]))
                session.close()
            except EngineStoppedError:
                assert ends_early
            runs.append((collector, num_sent))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    if ends_early:
        wait_until(lambda: len(runs) > 10)
        close_in_time(engine)
    for thread in threads:
        thread.join(WAIT_S)
    for collector, num_sent in runs:
        collector.wait(num_sent, WAIT_S)
    assert len(runs) == 40
    if not ends_early:
        wait_until(lambda: not engine.core.executor.runs)
        close_in_time(engine)
        check_idle(engine)
