"""The engine on a GPU: captured or launched, any attention, overlapped or not: one output."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.device_programs import (
    CHOICES,
    OPTIONS,
    PATTERN,
    SCORED,
    SHAPES,
    programs,
    run,
    write_config,
)
from tests.support.engine_harness import Collector, GraphMaker

from umbel.lang.ir import Gen, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine

pytestmark = pytest.mark.gpu

#: attention -> the dtype that it runs in: FlashInfer has no kernels for float32
DTYPES = {"triton": "float32", "flashinfer": "bfloat16"}
MARGIN = 0.12  # of bfloat16, between two logits of a random model


@pytest.fixture(params=sorted(DTYPES))
def attention(request: pytest.FixtureRequest) -> str:
    if request.param == "flashinfer":
        pytest.importorskip("flashinfer")
    return str(request.param)


@pytest.fixture(params=sorted(SHAPES))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_config(request.param, tmp_path)


def run_programs(config: Path, attention: str, /, **options: Any) -> list[Collector]:
    settings = OPTIONS | {"attention": attention, "dtype": DTYPES[attention]} | options
    engine = Engine.from_model(f"dummy:{config}", **settings)
    try:
        collectors = run(engine, list(programs()))
    finally:
        engine.close()
    assert not any(collector.errors for collector in collectors)
    return collectors


_default: dict[tuple[str, str], list[Collector]] = {}


def run_by_default(config: Path, attention: str) -> list[Collector]:
    """Run once per shape and attention: a start captures its steps."""
    key = config.read_text(), attention
    if key not in _default:
        _default[key] = run_programs(config, attention)
    return _default[key]


def outcomes(collectors: list[Collector]) -> list[dict[int, Any]]:
    return [
        {
            node: (result.text, [sample.token_ids for sample in result.samples])
            for node, result in collector.results.items()
        }
        for collector in collectors
    ]


def assert_parts_only_at_ties(found: list[Collector], expected: list[Collector]) -> None:
    """Hold greedy gens to each other up to where their ids part, as they may where two ids tie."""
    for row in SCORED:
        ours, theirs = (c[row].results[1].samples[0].logprobs for c in (found, expected))
        assert ours
        for mine, other in zip(ours, theirs, strict=False):
            if mine.token_id != other.token_id:
                assert other.top[0][1] - other.top[1][1] < MARGIN
                break
            assert abs(mine.logprob - other.logprob) < MARGIN
        else:
            assert len(ours) == len(theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"capture": False},
        {"overlap": False},
        {"prefix_cache": False},
        {"attention": "torch"},
        {"jump_forward": False},
        {"grammar_device_states": 0},
        {"grammar_device_states": 40},
        {"max_step_tokens": 64},
    ],
    ids=str,
)
def test_no_setting_changes_an_output(
    config: Path, attention: str, options: dict[str, Any]
) -> None:
    found = run_programs(config, attention, **options)
    expected = run_by_default(config, attention)
    if DTYPES[attention] == "float32":
        assert outcomes(found) == outcomes(expected)
    else:
        assert_parts_only_at_ties(found, expected)


def test_constraints_hold(config: Path, attention: str) -> None:
    for i, collector in enumerate(run_by_default(config, attention)):
        assert collector.results[2].text in CHOICES
        if i % 3 == 2:
            assert re.fullmatch(PATTERN, collector.results[3].text)


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
