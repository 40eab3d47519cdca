"""A model's shapes, and programs of every kind, for engines on any device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.engine_harness import Collector, GraphMaker

from umbel.lang.constraints import JsonSchema, Regex
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Select, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine
from umbel.runtime.engine_process import EngineClient

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
PATTERN = "[a-c]{3}-[0-9]{4}"
CHOICES = ("yes", "no", "maybe so")
SCORED = (0, 4, 8)  # greedy rows whose first gen tells its logprobs
OPTIONS = {"dtype": "float32", "kv_tokens": 40_000, "max_running": 32, "check_accounting": True}


def write_config(shape: str, folder: Path) -> Path:
    """Write the configuration of a small model and return its place."""
    config = SHAPES[shape] | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": 128,  # FlashInfer brings kernels for it
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def programs() -> Iterator[RequestGraph]:
    """Prompts that share a long start: plain, sampled, constrained, scored."""
    shared = "the same long beginning, " * 30
    for i in range(12):
        maker = GraphMaker()
        at: int | None = maker.add(Text((shared + f"row {i}: ",)), None)
        sampling = SamplingParams(
            max_tokens=12 + i,
            temperature=0.8 if i % 2 else 0.0,
            top_k=40,
            logprobs=i in SCORED,
            top_logprobs=2 if i in SCORED else 0,
        )
        at = maker.add(Gen("a", sampling), at)
        at = maker.add(Select("b", CHOICES), at)
        if i % 3 == 0:
            at = maker.add(Gen("c", SamplingParams(max_tokens=60), JsonSchema(SCHEMA)), at)
        if i % 3 == 1:
            penalised = SamplingParams(max_tokens=9, presence_penalty=0.5, logprobs=True)
            at = maker.add(Gen("d", penalised), at)
        if i % 3 == 2:
            at = maker.add(Gen("e", SamplingParams(max_tokens=20), Regex(PATTERN)), at)
        maker.add(Gen("f", SamplingParams(max_tokens=5, ignore_eos=True)), at)
        yield maker.graph()


def start(engine: Engine | EngineClient, graphs: Sequence[RequestGraph]) -> list[Collector]:
    """Start a run of each graph, as rows of one batch."""
    collectors = []
    for row, graph in enumerate(graphs):
        collectors.append(Collector())
        session = engine.open(RunOptions(seed=7, row=row), collectors[-1])
        session.extend(graph)
        session.close()
    return collectors


def run(engine: Engine | EngineClient, graphs: Sequence[RequestGraph]) -> list[Collector]:
    """Run graphs to their ends, as rows of one batch."""
    collectors = start(engine, graphs)
    for graph, collector in zip(graphs, collectors, strict=True):
        collector.wait(len(graph.nodes), timeout=300)
    return collectors
