"""A program on a server, in whatever pieces its reads cut it, gives the ids of a local run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import TOKENIZER, graphs, make_engine, make_runner, run_graphs
from tests.support.recorder import Recorder

from umbel.interpreter.backends.remote import RemoteBackend
from umbel.lang.graph import RequestGraph
from umbel.lang.results import RunOptions
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.server import BackgroundServer, create_app


@pytest.fixture(scope="module")
def backend() -> Iterator[RemoteBackend]:
    config = EngineConfig(check_accounting=True, max_running=8, max_step_tokens=64)
    engine = Engine(make_runner(), TOKENIZER, config, max_seq_len=512)
    app = create_app(engine, model_name="hash", capabilities={"token_native": True})
    with BackgroundServer(app) as server, RemoteBackend(server.url) as backend:
        yield backend
    engine.close()


@settings(deadline=None, max_examples=50)
@given(graphs(), st.data())
def test_rule_16_remote_equals_local(
    backend: RemoteBackend, graph: RequestGraph, data: st.DataObject
) -> None:
    engine = make_engine()
    (local,) = run_graphs(engine, [graph])
    engine.close()
    remote = Recorder()
    session = backend.open(RunOptions(seed=7, row=0), remote)
    start, num_nodes = 0, len(graph.nodes)
    while start < num_nodes:
        end = data.draw(st.integers(start + 1, num_nodes))
        session.extend(RequestGraph(graph.nodes[start:end], start))
        if data.draw(st.booleans()):  # a read
            remote.wait(data.draw(st.integers(0, end - 1)))
        start = end
    session.close()
    remote.wait(*range(num_nodes))
    seen: dict[int, object] = {n: ("failed", type(e).__name__) for n, e in remote.errors.items()}
    for node, result in remote.results.items():
        seen[node] = (result.text, result.samples, result.scores)
    assert seen == local.outcome()
    for node, text in local.deltas.items():
        assert remote.text(node) == text
