"""The engine on a GPU: captured or launched, either attention, overlapped or not: one output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engine_harness import Collector, GraphMaker

from umbel.lang.constraints import JsonSchema, Regex
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Select, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 4},
}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["ann", "bob"]}, "n": {"type": "integer", "maximum": 99}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)


@pytest.fixture(params=sorted(SHAPES))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shape = SHAPES[request.param] | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    return path


def programs() -> Iterator[RequestGraph]:
    """Prompts that share a long start: plain, sampled, constrained, scored, with a fork."""
    shared = "the same long beginning, " * 30
    for i in range(12):
        maker = GraphMaker()
        at: int | None = maker.add(Text((shared + f"row {i}: ",)), None)
        sampling = SamplingParams(max_tokens=12 + i, temperature=0.8 if i % 2 else 0.0, top_k=40)
        at = maker.add(Gen("a", sampling), at)
        at = maker.add(Select("b", ("yes", "no", "maybe so")), at)
        if i % 3 == 0:
            at = maker.add(Gen("c", SamplingParams(max_tokens=60), JsonSchema(SCHEMA)), at)
        if i % 3 == 1:
            penalised = SamplingParams(max_tokens=9, presence_penalty=0.5, logprobs=True)
            at = maker.add(Gen("d", penalised), at)
        if i % 3 == 2:
            at = maker.add(Gen("e", SamplingParams(max_tokens=20), Regex("[a-c]{3}-[0-9]{4}")), at)
        maker.add(Gen("f", SamplingParams(max_tokens=5, ignore_eos=True)), at)
        yield maker.graph()


def outcomes(config: Path, **options: Any) -> list[dict[int, Any]]:
    engine = Engine.from_model(
        f"dummy:{config}",
        dtype="float32",
        kv_tokens=40_000,
        max_running=32,
        check_accounting=True,
        **options,
    )
    try:
        graphs, collectors = list(programs()), []
        for row, graph in enumerate(graphs):
            collectors.append(Collector())
            session = engine.open(RunOptions(seed=7, row=row), collectors[-1])
            session.extend(graph)
            session.close()
        for graph, collector in zip(graphs, collectors, strict=True):
            collector.wait(len(graph.nodes), timeout=300)
    finally:
        engine.close()
    found = []
    for collector in collectors:
        assert not collector.errors
        found.append(
            {
                node: (result.text, [sample.token_ids for sample in result.samples])
                for node, result in collector.results.items()
            }
        )
    return found


_default: dict[str, list[dict[int, Any]]] = {}


def default_outcomes(config: Path) -> list[dict[int, Any]]:
    """Run once per shape: a start captures its steps."""
    shape = config.read_text()
    if shape not in _default:
        _default[shape] = outcomes(config)
    return _default[shape]


@pytest.mark.parametrize(
    "options",
    [
        {"capture": False},
        {"overlap": False},
        {"prefix_cache": False},
        {"attention": "torch"},
        {"jump_forward": False},
        {"max_step_tokens": 64},
    ],
    ids=str,
)
def test_no_setting_changes_an_output(config: Path, options: dict[str, Any]) -> None:
    assert outcomes(config, **options) == default_outcomes(config)


def test_the_cpu_gives_the_same(config: Path) -> None:
    """Greedy texts in float32; sampled ones may part where a sum falls on the random number."""
    there, here = default_outcomes(config), outcomes(config, device="cpu")
    for row in range(0, len(here), 2):
        assert there[row][1] == here[row][1]


def test_a_start_reports_its_captures(config: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        Engine.from_model(f"dummy:{config}", kv_tokens=4096, max_running=8).close()
    assert any("captured decode steps of" in record.message for record in caplog.records)
    assert torch.cuda.is_available()


def test_smollm2_is_on_a_gpu_what_it_is_on_a_cpu(smollm2_path: Path) -> None:
    """Greedy ids in float32, 20 prompts of 64 tokens."""
    prompts = [f"{start} {topic}" for start in STARTS for topic in TOPICS]
    assert len(prompts) == 20
    found = {}
    for device in ("cuda", "cpu"):
        engine = Engine.from_model(
            str(smollm2_path), device=device, dtype="float32", kv_tokens=8192, max_running=32
        )
        collectors = []
        for prompt in prompts:
            maker = GraphMaker()
            at = maker.add(Text((prompt,)), None)
            maker.add(Gen("a", SamplingParams(max_tokens=64, ignore_eos=True)), at)
            collectors.append(Collector())
            session = engine.open(RunOptions(seed=7), collectors[-1])
            session.extend(maker.graph())
            session.close()
        for collector in collectors:
            collector.wait(2, timeout=300)
        engine.close()
        found[device] = [c.results[1].samples[0].token_ids for c in collectors]
    assert found["cuda"] == found["cpu"]


STARTS = ("The history of", "Here is how to explain", "A short poem about", "Three facts about")
TOPICS = ("the sea", "railways", "bread", "the planet Mars", "chess")
