"""The engine on a GPU: captured or launched, either attention, overlapped or not: one output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.device_programs import OPTIONS, SHAPES, programs, run, write_config
from tests.support.engine_harness import GraphMaker

from umbel.lang.ir import Gen, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine

pytestmark = pytest.mark.gpu


@pytest.fixture(params=sorted(SHAPES))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_config(request.param, tmp_path)


def outcomes(config: Path, **options: Any) -> list[dict[int, Any]]:
    engine = Engine.from_model(f"dummy:{config}", **(OPTIONS | options))
    try:
        collectors = run(engine, list(programs()))
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
        graphs = []
        for prompt in prompts:
            maker = GraphMaker()
            at = maker.add(Text((prompt,)), None)
            maker.add(Gen("a", SamplingParams(max_tokens=64, ignore_eos=True)), at)
            graphs.append(maker.graph())
        collectors = run(engine, graphs)
        engine.close()
        found[device] = [c.results[1].samples[0].token_ids for c in collectors]
    assert found["cuda"] == found["cpu"]


STARTS = ("The history of", "Here is how to explain", "A short poem about", "Three facts about")
TOPICS = ("the sea", "railways", "bread", "the planet Mars", "chess")
