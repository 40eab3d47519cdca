"""An engine in a process of its own: the same results, and an end that everybody is told of."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import Collector, graphs, open_run
from tests.support.graphs import GraphBuilder
from tests.support.process_engines import BROKEN, CRASHING, HASH, hash_engine

from umbel.interpreter.backends.local import LocalBackend
from umbel.lang.errors import (
    EngineConfigError,
    EngineError,
    EngineStoppedError,
    ModelLoadError,
    ProgramError,
    RequestRejectedError,
)
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Text
from umbel.lang.results import Event, NodeResult, RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime import engine_worker
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.engine_process import EngineClient
from umbel.runtime.engine_session import EngineSession

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4)
WAIT_S = 30.0


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineClient]:
    """One client for the tests that leave it as it was."""
    client = EngineClient(HASH, {})
    yield client
    client.close()


@pytest.fixture
def start() -> Iterator[Callable[..., EngineClient]]:
    """Start clients, which are closed in the end."""
    clients: list[EngineClient] = []

    def start(step_timeout_s: float | None = None, **arguments: Any) -> EngineClient:
        client = EngineClient(HASH, arguments, config=EngineConfig(step_timeout_s=step_timeout_s))
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()


def program(params: SamplingParams = LONG, text: str = "abc") -> RequestGraph:
    builder = GraphBuilder()
    builder.add(Gen("x", params), builder.text(text))
    return builder.piece()


def run_all(engine: Engine | EngineClient, programs: Sequence[RequestGraph]) -> list[object]:
    runs = []
    for row, graph in enumerate(programs):
        collector = Collector()
        session = engine.open(RunOptions(seed=7, row=row), collector)
        session.extend(graph)
        session.close()
        runs.append(collector)
    for graph, collector in zip(programs, runs, strict=True):
        collector.wait(len(graph.nodes), WAIT_S)
    return [(run.outcome(), run.deltas, run.started) for run in runs]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Whether a process is no more; one that nobody has waited for is no more either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# --- equal to an engine in the thread ---------------------------------------------------------


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(graphs(), min_size=1, max_size=4))
def test_results_are_those_of_an_engine_in_this_process(
    shared: EngineClient, programs: list[RequestGraph]
) -> None:
    engine = hash_engine()
    try:
        assert run_all(shared, programs) == run_all(engine, programs)
    finally:
        engine.close()
    assert not shared._runs, "runs that are over are forgotten"


def test_a_graph_may_grow_and_knows_what_ended_before(shared: EngineClient) -> None:
    def grow(engine: Engine | EngineClient) -> object:
        builder, collector = GraphBuilder(), Collector()
        first = builder.text("abc")
        failed = builder.add(Gen("f", SHORT))
        session = engine.open(
            RunOptions(seed=3),
            collector,
            {first: NodeResult(text="abc")},
            {failed: RequestRejectedError("as before", reason="too_long")},
        )
        at = builder.add(Gen("x", SHORT), first)
        builder.text("behind what failed", failed)
        session.extend(builder.piece())
        collector.wait(2, WAIT_S)
        ill = builder.add(Text(("",)), at)
        builder.text("!", ill)
        builder.add(Gen("y", SHORT), at)
        session.extend(builder.piece(), {ill: ProgramError("elsewhere")})
        collector.wait(4, WAIT_S)
        session.close()
        return collector.outcome(), collector.causes

    engine = hash_engine()
    assert grow(shared) == grow(engine)
    engine.close()


def test_a_session_s_rules_are_the_same(shared: EngineClient) -> None:
    session = shared.open(RunOptions(), Collector())
    with pytest.raises(ProgramError, match="starts at node 3"):
        session.extend(RequestGraph((), base=3))
    session.close()
    with pytest.raises(ProgramError, match="closed"):
        session.extend(program())


def test_what_has_no_bytes_is_refused_and_the_run_goes_on(shared: EngineClient) -> None:
    collector = Collector()
    session = shared.open(RunOptions(), collector)
    with pytest.raises(ProgramError, match="not Unicode"):
        session.extend(program(text="\ud800"))
    session.extend(program(SHORT))
    session.close()
    collector.wait(2, WAIT_S)
    assert len(collector.results) == 2


def test_nodes_can_be_cancelled(start: Callable[..., EngineClient]) -> None:
    client = start(pause_s=0.01)
    session, collector = open_run(client, program())  # type: ignore[arg-type]
    wait_until(lambda: 1 in collector.started)
    session.cancel()
    collector.wait(2, WAIT_S)
    assert collector.errors == {1: "CancelledError"}
    wait_until(lambda: client.stats()["running"] == 0)


def test_counters_cache_and_tokens_are_asked_for(start: Callable[..., EngineClient]) -> None:
    client, engine = start(), hash_engine()
    backend = LocalBackend(client)
    run_all(client, [program(SHORT)])
    assert backend.stats()["steps"] > 0
    assert backend.stats().keys() == engine.stats().keys()
    assert backend.token_counter("abc") == engine.count_tokens("abc")
    assert backend.reset_cache() > 0
    assert client.model_name == "hash"
    assert tuple(client.token_bytes) == tuple(engine.token_bytes)
    engine.close()
    engine_slow = start(pause_s=0.01)
    _, collector = open_run(engine_slow, program())  # type: ignore[arg-type]
    wait_until(lambda: 1 in collector.started)
    with pytest.raises(EngineError, match="requests running"):
        engine_slow.reset_cache()


# --- sinks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_sink_that_raises_costs_its_own_run_only(
    start: Callable[..., EngineClient], error: type[BaseException]
) -> None:
    client = start()

    def sink(events: Sequence[Event]) -> None:
        raise error("the sink's own")

    client.open(RunOptions(), sink).extend(program())
    _, other = open_run(client, program(SHORT))  # type: ignore[arg-type]
    other.wait(2, WAIT_S)
    assert len(other.results) == 2
    wait_until(lambda: client.stats()["running"] == 0)


def test_a_sink_may_ask_extend_and_close(start: Callable[..., EngineClient]) -> None:
    client, collector, asked = start(), Collector(), []
    sessions: list[EngineSession] = []
    builder = GraphBuilder()

    def sink(events: Sequence[Event]) -> None:
        collector(events)
        asked.append(client.stats()["steps"])
        if 1 in collector.results and len(builder.nodes) == 2:
            builder.add(Gen("y", SHORT), 1)
            sessions[0].extend(builder.piece())
            sessions[0].close()
        if 2 in collector.results:
            client.close(drain=math.inf)

    sessions.append(client.open(RunOptions(), sink))
    builder.add(Gen("x", SHORT), builder.text("abc"))
    sessions[0].extend(builder.piece())
    collector.wait(3, WAIT_S)
    assert asked
    assert client._ended.wait(WAIT_S)
    assert client._process.returncode == 0


def test_a_slow_sink_loses_nothing_and_holds_the_engine_back(
    start: Callable[..., EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox_limit = engine_worker.MAX_PENDING_EVENTS
    client, collector = start(), Collector()
    may_go, num_programs = threading.Event(), 400

    def sink(events: Sequence[Event]) -> None:
        assert may_go.wait(WAIT_S)
        collector(events)

    fast = hash_engine()
    expected = run_all(fast, [wide(num_programs)])
    fast.close()
    session = client.open(RunOptions(seed=7), sink)
    session.extend(wide(num_programs))
    session.close()
    assert num_programs * 40 > 0.9 * outbox_limit
    time.sleep(0.5)
    may_go.set()
    collector.wait(2 * num_programs, WAIT_S)
    assert (collector.outcome(), collector.deltas, collector.started) == expected[0]


def wide(num: int) -> RequestGraph:
    """Many gens beside each other: many events."""
    builder = GraphBuilder()
    for i in range(num):
        builder.add(
            Gen(f"x{i}", SamplingParams(max_tokens=40, ignore_eos=True)), builder.text(f"a{i}")
        )
    return builder.piece()


# --- the end ------------------------------------------------------------------------------------


def test_a_killed_engine_fails_all_nodes_and_says_by_which_signal(
    start: Callable[..., EngineClient],
) -> None:
    client = start(pause_s=0.01)
    runs = [open_run(client, program())[1] for _ in range(3)]  # type: ignore[arg-type]
    growing = Collector()
    session = client.open(RunOptions(), growing)
    session.extend(program())
    wait_until(lambda: 1 in growing.started)
    os.kill(client.process_id, signal.SIGKILL)
    for collector in (*runs, growing):
        collector.wait(2, WAIT_S)
        assert collector.errors[1] == "EngineStoppedError"
        assert "killed by SIGKILL (9)" in collector.causes[1]
    with pytest.raises(EngineStoppedError) as stopped:
        session.extend(RequestGraph((), base=2))
    assert "killed by SIGKILL" in str(stopped.value.__cause__)
    session.cancel()
    session.close()
    for call in (client.reset_cache, lambda: client.open(RunOptions(), growing)):
        with pytest.raises(EngineStoppedError):
            call()
    assert isinstance(client.stats(), dict)
    client.close()


def test_many_threads_and_a_kill_in_the_middle_leave_nobody_waiting(
    start: Callable[..., EngineClient],
) -> None:
    client = start(pause_s=0.0005)
    ended: list[tuple[Collector, int]] = []

    def work() -> None:
        for _ in range(200):
            collector, sent = Collector(), 0
            try:
                session = client.open(RunOptions(), collector)
                for node in program(SHORT).nodes:
                    session.extend(RequestGraph((node,), node.id))
                    sent += 1
                session.close()
            except EngineStoppedError:
                pass
            ended.append((collector, sent))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(ended) > 20)
    os.kill(client.process_id, signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    for collector, sent in ended:
        collector.wait(sent, WAIT_S)
    assert len(ended) == 800


def test_an_engine_that_stops_by_itself_says_why(start: Callable[..., EngineClient]) -> None:
    client = start(stop_at_pass=5)
    _, collector = open_run(client, program())  # type: ignore[arg-type]
    collector.wait(2, WAIT_S)
    assert collector.errors == {1: "EngineStoppedError"}
    wait_until(lambda: client._ended.is_set())
    with pytest.raises(EngineStoppedError) as stopped:
        client.open(RunOptions(), collector)
    assert "as asked" in str(stopped.value.__cause__)
    assert client._process.returncode == engine_worker.EXIT_STOPPED


def test_a_step_that_hangs_ends_the_process(start: Callable[..., EngineClient]) -> None:
    client = start(hang_at_pass=8, step_timeout_s=None)
    client.close()
    arguments = {"hang_at_pass": 8, "step_timeout_s": 0.2}
    stuck = EngineClient(HASH, arguments, config=EngineConfig(step_timeout_s=20.0))
    _, collector = open_run(stuck, program())  # type: ignore[arg-type]
    collector.wait(2, WAIT_S)
    assert collector.errors == {1: "EngineStoppedError"}
    assert "has taken more than 0.2 s" in collector.causes[1]
    wait_until(lambda: is_gone(stuck.process_id))
    stuck.close()


def test_a_process_that_says_nothing_is_killed(start: Callable[..., EngineClient]) -> None:
    client = start(step_timeout_s=0.5, pause_s=0.01)
    _, collector = open_run(client, program())  # type: ignore[arg-type]
    wait_until(lambda: 1 in collector.started)
    os.kill(client.process_id, signal.SIGSTOP)
    collector.wait(2, WAIT_S)
    assert "said nothing for 0.5 s" in collector.causes[1]


def test_an_idle_process_is_not_taken_for_a_silent_one(start: Callable[..., EngineClient]) -> None:
    client = start(step_timeout_s=0.4)
    time.sleep(1.5)
    assert run_all(client, [program(SHORT)])


@pytest.mark.parametrize("known", [True, False])
def test_errors_of_loading_travel(known: bool) -> None:
    with pytest.raises(ModelLoadError) as raised:
        EngineClient(BROKEN, {"known": known})
    expected = "there are no weights" if known else "ZeroDivisionError: what is this"
    assert expected in str(raised.value)


def test_a_process_that_dies_while_it_loads_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match=r"killed by SIGKILL \(9\): out of memory"):
        EngineClient(CRASHING, {})


def test_settings_are_checked_before_a_process_is_started() -> None:
    with pytest.raises(EngineConfigError, match="max_running"):
        LocalBackend.from_model("smollm2", process=True, max_running=0)
    with pytest.raises(EngineConfigError, match="there is no setting color"):
        EngineClient.from_model("smollm2", color=1)
    with pytest.raises(ModelLoadError, match="no-such-model"):
        LocalBackend.from_model("/no-such-model.gguf", process=True)


@pytest.mark.parametrize("drain", [0.0, math.inf])
def test_close_drains_or_aborts(drain: float, start: Callable[..., EngineClient]) -> None:
    client = start(pause_s=0.002)
    _, collector = open_run(client, program())  # type: ignore[arg-type]
    wait_until(lambda: 1 in collector.started)
    client.close(drain)
    assert collector.num_ended == 2
    assert (1 in collector.results) == (drain > 0)
    assert client._process.returncode == 0
    with pytest.raises(EngineStoppedError) as stopped:
        client.open(RunOptions(), collector)
    assert stopped.value.__cause__ is None


def test_new_runs_are_refused_while_it_drains(start: Callable[..., EngineClient]) -> None:
    client = start(pause_s=0.01)
    session, collector = open_run(client, program())  # type: ignore[arg-type]
    closing = threading.Thread(target=client.close, args=[math.inf])
    closing.start()
    wait_until(lambda: client._is_closing)
    with pytest.raises(EngineStoppedError, match="closing"):
        client.open(RunOptions(), collector)
    session.cancel()
    closing.join(WAIT_S)
    assert not closing.is_alive()


PARENT = """
import os, sys, time
from tests.support.process_engines import HASH
from tests.support.engine_harness import open_run
from tests.runtime.test_engine_process import program
from umbel.runtime.engine_process import EngineClient

if __name__ == "__main__":
    client = EngineClient(HASH, {"pause_s": 0.01})
    open_run(client, program())
    if "fork" in sys.argv and os.fork() == 0:  # a child that holds the socket open
        time.sleep(60)
        os._exit(0)
    print(client.process_id, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_the_process_ends_when_its_parent_dies(how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    )
    assert parent.stdout is not None
    try:
        engine = int(parent.stdout.readline())
        assert not is_gone(engine)
        parent.kill()
        wait_until(lambda: is_gone(engine))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)  # the forked one too
        parent.wait()
        parent.stdout.close()


def test_what_the_process_logs_is_logged_here(
    start: Callable[..., EngineClient], caplog: pytest.LogCaptureFixture
) -> None:
    client = start(stop_at_pass=1)
    with caplog.at_level(logging.ERROR, "umbel"):
        open_run(client, program())  # type: ignore[arg-type]
        assert client._ended.wait(WAIT_S)
    records = [r for r in caplog.records if r.name == "umbel.runtime.engine"]
    assert any("the engine stopped" in r.getMessage() for r in records)


def test_nothing_of_a_run_is_kept(start: Callable[..., EngineClient]) -> None:
    client = start()
    for _ in range(50):
        run_all(client, [program(SHORT)])
    gc.collect()
    assert client._runs == {}
    assert client.stats()["active_programs"] == 0
