"""The offline benchmark: every workload runs, on one engine, with its floor beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import EngineConfigError
from umbel.lang.ir import Gen
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.bench.engines import NULL, BenchmarkModel
from umbel.runtime.bench.grammar_cases import INCIDENT
from umbel.runtime.bench.offline import free_gen, num_tokens, num_valid, submit_prompts
from umbel.runtime.bench.offline_workloads import (
    OFFLINE_WORKLOADS,
    OfflineFigure,
    OfflineSizes,
    as_table,
    run_offline,
)
from umbel.runtime.config import EngineConfig
from umbel.runtime.tokenizer import Tokenizer
from umbel.runtime.tokenizer_files import byte_alphabet

TINY = OfflineSizes(requests=6).scaled(0.02)


def figures_of(name: str, workloads: list[str]) -> list[OfflineFigure]:
    config = EngineConfig(device="cpu", max_running=8, kv_tokens=4096)
    return run_offline(
        lambda: BenchmarkModel(name, config),
        workloads,
        TINY,
        repeats=2,
        seed=1,
        progress=lambda _: None,
    )


def test_every_workload_runs_and_stands_beside_its_floor() -> None:
    figures = figures_of("small", list(OFFLINE_WORKLOADS))
    assert [figure.workload for figure in figures] == [
        *("start", "throughput", "prefix", "prefix", "stream", "stream"),
        *("decode", "decode", "decode", "guided", "guided"),
    ]
    for figure in figures:
        assert min(figure.each) <= figure.value <= max(figure.each)
        if figure.floor is not None:
            is_rate = "tokens/s" in figure.unit
            quotient = figure.floor / figure.value if is_rate else figure.value / figure.floor
            assert figure.ratio == pytest.approx(quotient)
    step, alone = figures[6:8]
    assert step.idle == pytest.approx(1 - alone.value / step.value)
    assert step.floor == alone.floor
    assert len(as_table(figures).splitlines()) == 1 + len(figures)


def test_floors_of_one_batch_are_in_proportion_to_what_is_read() -> None:
    """A row of one request reads the weights once a pass, as a batch does."""
    figures = figures_of("small", ["stream", "decode"])
    stream, step = figures[1], figures[3]
    assert stream.floor is not None
    assert step.floor is not None
    model = BenchmarkModel("small", EngineConfig(device="cpu", kv_tokens=64))
    model.close()
    kv_tokens = {
        stream: TINY.stream_prompt + TINY.stream_out / 2,
        step: TINY.rows * (TINY.context + TINY.rows_out / 2),
    }
    least = {
        figure: model.parts.step_bytes + model.parts.kv_bytes_per_token * tokens
        for figure, tokens in kv_tokens.items()
    }
    # each run measures the copy for itself, and both figures are of one run
    assert step.floor / stream.floor == pytest.approx(least[step] / least[stream])


def test_without_a_model_there_is_no_floor() -> None:
    (_, figure) = figures_of(NULL, ["throughput"])
    assert (figure.floor, figure.ratio, figure.idle) == (None, None, None)
    assert figure.value > 0


def test_a_scale_multiplies_every_size() -> None:
    sizes = OfflineSizes(requests=100).scaled(0.5)
    assert (sizes.requests, sizes.longest, sizes.prefix, sizes.rows) == (50, 512, 2048, 32)
    assert OfflineSizes().scaled(1e-9).stream_out == 2


def test_values_that_a_schema_forbids_are_not_counted() -> None:
    model = BenchmarkModel("small", EngineConfig(device="cpu", kv_tokens=4096))
    engine = model.new_engine(threaded=True)
    schema = JsonSchema(json.dumps(INCIDENT))
    whole = Gen("", SamplingParams(max_tokens=500, temperature=0.8), schema)
    try:
        results = submit_prompts(
            engine, ["a", "b", "c"], [whole, whole, free_gen(7, 0.0)]
        ).results()
    finally:
        engine.close()
        model.close()
    assert num_valid(schema, results) == 2
    assert num_tokens(results[2:]) == 7


def test_a_shape_takes_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    vocab = dict(byte_alphabet()) | {f"x{i}": i for i in range(256, 5000)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    config = EngineConfig(device="cpu", kv_tokens=64)
    model = BenchmarkModel("small", config, tmp_path)
    assert model.tokenizer.vocab_size == model.parts.runner.vocab_size == 5000
    assert model.tokenizer.token_bytes == Tokenizer.from_folder(tmp_path).token_bytes
    model.close()
    with pytest.raises(EngineConfigError, match="its own tokenizer"):
        BenchmarkModel(NULL, config, tmp_path)
