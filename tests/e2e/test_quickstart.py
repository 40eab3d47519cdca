"""The bars of the quickstart, on the real small model: valid, repeatable, and no prefill wasted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.engine_harness import Collector, run_graphs
from tests.support.token_trie import least_prefill

from umbel.interpreter.backends.local import LocalBackend
from umbel.lang.ir import Gen, Select
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.model_loading import load_parts

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.py"


@pytest.fixture(scope="module")
def quickstart() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["quickstart"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["quickstart"]


def make_engine(*, start: bool, **options: Any) -> Engine:
    config = EngineConfig(kv_tokens=8192, check_accounting=True, **options)
    parts = load_parts("smollm2", config)
    return Engine(parts.runner, parts.tokenizer, config, max_seq_len=parts.max_seq_len, start=start)


def values(collectors: list[Collector]) -> list[dict[int, str]]:
    return [{node: r.text for node, r in c.results.items()} for c in collectors]


@pytest.mark.usefixtures("smollm2_path")
def test_eight_tickets(quickstart: ModuleType) -> None:
    graphs = [quickstart.triage.compile(ticket) for ticket in quickstart.TICKETS]
    engine = make_engine(start=False, track_bound=True)
    cold = make_engine(start=False, prefix_cache=False)
    backend = LocalBackend(make_engine(start=True))
    try:
        first = run_graphs(engine, graphs)
        for graph, collector in zip(graphs, first, strict=True):
            assert not collector.errors
            for node in graph.nodes:
                text = collector.results[node.id].text
                if isinstance(node.op, Select):
                    assert text in node.op.choices
                if isinstance(node.op, Gen) and node.op.constraint is not None:
                    quickstart.Report.model_validate_json(text)

        least, _ = least_prefill(engine.tokenizer, graphs, first)
        prefilled = engine.stats()["tokens_prefilled"]
        assert least == engine.stats()["least_prefill"]
        assert least <= prefilled <= 1.02 * least

        assert values(run_graphs(engine, graphs)) == values(first), "the same seed, again"
        assert values(run_graphs(cold, graphs)) == values(first), "without the cache"

        program = quickstart.triage.options(backend=backend, seed=7)
        results = program.run_batch(quickstart.TICKETS, progress=False)
        for result in results:
            assert set(result.names()) == {"severity", "report"}
            assert result["severity"] in quickstart.SEVERITIES
            assert isinstance(result["report"], quickstart.Report)
            assert len([side["note"] for side in result.value]) == 3
    finally:
        engine.close()
        cold.close()
        backend.close()
