"""A program on a server, in whatever pieces its reads cut it, gives the ids of a local run.

The pieces go over a socket, or as a request each; nodes fail where the model does, are cancelled,
and run out of time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    GRAMMAR,
    TOKENIZER,
    Collector,
    graphs,
    make_engine,
    make_runner,
    run_graphs,
)
from tests.support.recorder import Recorder

from umbel.interpreter.backends.base import Backend
from umbel.interpreter.backends.local import LocalBackend
from umbel.interpreter.backends.remote import RemoteBackend, SocketUse
from umbel.lang.errors import CancelledError, GenerationError, NodeTimeoutError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.model_runner.inputs import StepInputs
from umbel.runtime.model_runner.runner import Runner
from umbel.runtime.server import BackgroundServer, create_app


def poison(prefix: Sequence[int]) -> bool:
    """The model fails at one prefix in 40 or so, whoever runs it."""
    return sum((i + 1) * token for i, token in enumerate(prefix)) % 41 == 0


@dataclass(frozen=True)
class Ways:
    """One engine, and the ways to it."""

    engine: Engine
    backends: dict[str, Backend]  # the local one, and remote ones


@contextmanager
def ways_to(runner: Runner) -> Iterator[Ways]:
    config = EngineConfig(check_accounting=True, max_running=8, max_step_tokens=64)
    engine = Engine(runner, TOKENIZER, config, max_seq_len=512, grammar=GRAMMAR)
    app = create_app(engine, model_name="hash", capabilities={"token_native": True})
    uses: tuple[SocketUse, ...] = ("required", "never")
    with (
        LocalBackend(engine) as local,
        BackgroundServer(app) as server,
        RemoteBackend(server.url, socket=uses[0]) as socket,
        RemoteBackend(server.url, socket=uses[1]) as posts,
    ):
        yield Ways(engine, {"local": local, "socket": socket, "posts": posts})


@pytest.fixture(scope="module")
def ways() -> Iterator[Ways]:
    with ways_to(make_runner()) as ways:
        yield ways


@pytest.fixture(scope="module")
def failing_ways() -> Iterator[Ways]:
    with ways_to(make_runner(poison=poison)) as ways:
        yield ways


def pieces(graph: RequestGraph, data: st.DataObject) -> list[tuple[RequestGraph, int | None]]:
    """Cut a graph into pieces, with a node to read, or none, after each."""
    cut: list[tuple[RequestGraph, int | None]] = []
    start = 0
    while start < len(graph.nodes):
        end = data.draw(st.integers(start + 1, len(graph.nodes)))
        read = data.draw(st.integers(0, end - 1)) if data.draw(st.booleans()) else None
        cut.append((RequestGraph(graph.nodes[start:end], start), read))
        start = end
    return cut


def run(
    backend: Backend, cut: list[tuple[RequestGraph, int | None]], *, is_whole: bool = False
) -> Recorder:
    sink = Recorder()
    session = backend.open(RunOptions(seed=7, row=0, is_whole=is_whole), sink)
    for piece, read in cut:
        session.extend(piece)
        if read is not None:
            sink.wait(read)
    session.close()
    sink.wait(*range(sum(len(piece.nodes) for piece, _ in cut)))
    return sink


def assert_same(remote: Recorder, local: Collector) -> None:
    seen: dict[int, object] = {n: ("failed", type(e).__name__) for n, e in remote.errors.items()}
    for node, result in remote.results.items():
        seen[node] = (result.text, result.samples, result.scores)
    assert seen == local.outcome()
    for node, text in local.deltas.items():
        assert remote.text(node) == text


@settings(deadline=None, max_examples=40)
@given(graphs(), st.data())
def test_rule_16_remote_equals_local(ways: Ways, graph: RequestGraph, data: st.DataObject) -> None:
    engine = make_engine()
    (local,) = run_graphs(engine, [graph])
    engine.close()
    cut = pieces(graph, data)
    for backend in ways.backends.values():
        assert_same(run(backend, cut), local)
    assert_same(run(ways.backends["socket"], [(graph, None)], is_whole=True), local)


@settings(deadline=None, max_examples=40)
@given(graphs(), st.data())
def test_what_fails_fails_alike_locally_and_remotely(
    failing_ways: Ways, graph: RequestGraph, data: st.DataObject
) -> None:
    engine = make_engine(make_runner(poison=poison))
    (local,) = run_graphs(engine, [graph])
    engine.close()
    cut = pieces(graph, data)
    told = []
    for backend in failing_ways.backends.values():
        sink = run(backend, cut)
        assert {n: type(e).__name__ for n, e in sink.errors.items()} == local.errors
        assert {n: r.text for n, r in sink.results.items()} == {
            n: r.text for n, r in local.results.items()
        }
        told.append({n: without_place(sink.outcome(n)) for n in sink.errors})
    assert told[0] == told[1] == told[2]


def without_place(outcome: object) -> str:
    """Of several broken rows an error names the one met first: what is cached decides which."""
    return re.sub(r"after token \d+ ", "after a token ", repr(outcome))


@settings(deadline=None, max_examples=40)
@given(graphs(), st.data())
def test_a_cancel_touches_what_builds_on_the_node_and_nothing_else(
    ways: Ways, graph: RequestGraph, data: st.DataObject
) -> None:
    engine = make_engine()
    (local,) = run_graphs(engine, [graph])
    engine.close()
    everything = range(len(graph.nodes))
    victim = data.draw(st.sampled_from(everything))
    cone = {victim}
    for node in graph.nodes:
        if cone & {*node.deps, node.parent}:
            cone.add(node.id)
    expected = local.outcome()
    for backend in ways.backends.values():
        sink = Recorder()
        session = backend.open(RunOptions(seed=7, row=0), sink)
        session.extend(RequestGraph(graph.nodes[: victim + 1]))
        session.cancel([victim])
        session.extend(RequestGraph(graph.nodes[victim + 1 :], victim + 1))
        session.close()
        sink.wait(*everything)
        for n in everything:
            if n in sink.results:  # it may have ended before the cancel came
                result = sink.results[n]
                assert (result.text, result.samples, result.scores) == expected[n]
            elif n == victim and isinstance(sink.errors[n], CancelledError):
                pass
            elif n in cone and isinstance(sink.errors[n], GenerationError):
                assert victim in sink.errors or expected[n] == ("failed", "GenerationError")
            else:
                assert expected[n] == ("failed", type(sink.errors[n]).__name__)


class SlowRunner:
    """Takes its time over each pass."""

    def __init__(self, runner: Runner) -> None:
        self.num_slots = runner.num_slots
        self.vocab_size = runner.vocab_size
        self._runner = runner

    def forward(self, inputs: StepInputs) -> object:
        time.sleep(0.005)
        return self._runner.forward(inputs)


def test_time_limits_of_nodes_and_runs_hold_alike() -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    limited = GraphNode(0, "0", Gen("limited", params, timeout=0.1))
    free = GraphNode(1, "1", Gen("free", params))
    quick = GraphNode(2, "2", Gen("quick", SamplingParams(max_tokens=1)))
    with ways_to(SlowRunner(make_runner())) as ways:  # type: ignore[arg-type]
        told: list[list[str]] = []
        for backend in ways.backends.values():
            sink = Recorder()
            session = backend.open(RunOptions(seed=7, timeout=0.5), sink)
            session.extend(RequestGraph((limited, free)))
            session.extend(RequestGraph((quick,), 2))
            sink.wait(0, 1, 2)
            assert quick.id in sink.results
            for node in (0, 1):
                assert isinstance(sink.errors[node], NodeTimeoutError)
            late = GraphNode(3, "3", Gen("late", params))
            session.extend(RequestGraph((late,), 3))
            session.close()
            sink.wait(3)
            assert isinstance(sink.errors[3], NodeTimeoutError)
            told.append([str(sink.errors[0]), repr(sink.results[2].text)])
        assert told[0] == told[1] == told[2]
        assert told[0][0] == "'limited' (0) did not finish within 0.1 s"
