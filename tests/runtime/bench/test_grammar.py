"""The grammar benchmark: its vocabulary is whole, its texts satisfy their schemas, it runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import torch

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import EngineError
from umbel.runtime.bench import grammar_beside
from umbel.runtime.bench.engines import NULL, BenchmarkModel
from umbel.runtime.bench.grammar import run_builds, run_fills
from umbel.runtime.bench.grammar_beside import run_beside
from umbel.runtime.bench.grammar_cases import JSON_CASES, JsonCase
from umbel.runtime.bench.grammar_device import run_device
from umbel.runtime.bench.grammar_jump import run_jump
from umbel.runtime.bench.grammar_steps import run_share
from umbel.runtime.bench.grammar_vocabulary import made_up_vocabulary
from umbel.runtime.bench.live_steps import LiveSteps
from umbel.runtime.bench.offline import free_gen, submit_prompts
from umbel.runtime.config import EngineConfig
from umbel.runtime.grammar import GrammarCompiler, validate_after

SIZE = 4096


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(made_up_vocabulary(SIZE))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def model() -> Iterator[BenchmarkModel]:
    config = EngineConfig(max_running=32, max_step_tokens=256, kv_tokens=16_384, device="cpu")
    model = BenchmarkModel("small", config)
    yield model
    model.close()


def test_a_made_up_vocabulary_is_whole_and_always_the_same(compiler: GrammarCompiler) -> None:
    vocabulary = compiler.vocabulary
    assert len(vocabulary.token_bytes) == vocabulary.size == SIZE
    assert len(set(vocabulary.token_bytes)) == SIZE
    assert {bytes([i]) for i in range(256)} < set(vocabulary.token_bytes)
    assert made_up_vocabulary(SIZE).token_bytes == vocabulary.token_bytes
    text = '{"name": "naïve 日本", "id": 12345}'
    ids = vocabulary.encode(text)
    assert b"".join(vocabulary.token_bytes[i] for i in ids).decode() == text
    assert len(ids) < len(text)
    with pytest.raises(ValueError, match="at least"):
        made_up_vocabulary(300)


@pytest.mark.parametrize("case", JSON_CASES, ids=lambda case: case.name)
def test_drawn_texts_satisfy_their_schemas(case: JsonCase) -> None:
    rng = random.Random(5)
    for _ in range(10):
        validate_after(JsonSchema(json.dumps(case.schema)), case.text(rng))


def test_fills_are_timed_for_every_engine_and_way(compiler: GrammarCompiler) -> None:
    figures = run_fills(compiler, num_rows=3, steps=4, repeats=1, num_threads=2)
    assert [f.engine for f in figures] == [
        "llguidance",
        "umbel-dfa",
        "default",
        *["llguidance"] * 2,
    ]
    assert all(0 < f.fill_p50_us <= f.fill_p95_us for f in figures)
    assert len({f.way for f in figures}) == 3


def test_builds_are_compared_on_the_same_automata(compiler: GrammarCompiler) -> None:
    figures = run_builds(compiler.vocabulary, repeats=1)
    assert [f.constraint for f in figures] == ["bounded e-mail regex", "nested schema"]
    assert all(f.states > 100 and f.umbel_s > 0 and f.outlines_s > 0 for f in figures)
    assert all(f.times_faster == f.outlines_s / f.umbel_s for f in figures)


@pytest.mark.parametrize("engine", ["umbel-dfa", "llguidance"])
def test_the_share_of_a_step_is_that_of_masks(model: BenchmarkModel, engine: str) -> None:
    figures = run_share(model, num_rows=4, steps=3, engine=engine)
    assert (figures.model, figures.engine, figures.rows) == ("small", engine, 4)
    assert figures.step_ms > 0
    # rows of few allowed ids are sampled faster than free ones: less than nothing may be added
    assert figures.masks_ms > -figures.step_ms
    assert figures.share > -1


def test_steps_beside_compiles_are_timed(model: BenchmarkModel, compiler: GrammarCompiler) -> None:
    figures = run_beside(model, compiler.vocabulary, seconds=0.5)
    assert (figures.requests, figures.vocab_size) == (32, SIZE)
    assert figures.compiles >= 1
    assert figures.longest_compile_s > 0
    assert figures.largest_mib > 0
    assert 0 < figures.alone_p50_ms <= figures.alone_p99_ms <= figures.alone_max_ms
    assert 0 < figures.beside_p50_ms <= figures.beside_p99_ms <= figures.beside_max_ms
    assert figures.p99_added == figures.beside_p99_ms / figures.alone_p99_ms - 1


def test_compiles_that_are_all_refused_end_the_measurement(
    model: BenchmarkModel, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_beside, "EMAIL", "(")
    with pytest.raises(EngineError, match="lower --seconds"):
        run_beside(model, compiler.vocabulary, seconds=0.5)


def test_jumps_save_steps_and_change_no_number_of_tokens() -> None:
    model = BenchmarkModel(NULL, EngineConfig(max_running=4, device="cpu"))
    try:
        figures = run_jump(model, num_rows=3, max_tokens=420, repeats=1)
    finally:
        model.close()
    ways = ["free", "guided", "guided, jumps"]
    assert [(f.schema, f.way) for f in figures] == [
        (schema, way) for schema in ("fixed keys", "nested") for way in ways
    ]
    for free, plain, jumps in (figures[:3], figures[3:]):
        assert (free.valid, free.tokens, free.forced) == (0, 3 * 420, 0)
        assert plain.forced == 0 < jumps.forced < jumps.tokens == plain.tokens
        assert free.live_steps > plain.live_steps > 0  # until the first of its rows ends
        assert plain.steps > jumps.steps
        assert (free.step_ratio, free.times_faster, jumps.step_ratio) == (None, None, None)
        assert plain.step_ratio is not None
        assert jumps.times_faster is not None
    assert figures[1].valid == figures[2].valid == 3  # whose length is bounded
    assert jumps.forced < figures[2].forced  # of less fixed text


def test_steps_are_live_where_all_rows_decode_behind_another_such_step() -> None:
    """Three requests, of which one ends early, and a prompt longer than a step."""
    config = EngineConfig(max_running=4, max_step_tokens=16, kv_tokens=512, device="cpu")
    model = BenchmarkModel(NULL, config)
    engine = model.new_engine()
    steps = LiveSteps(engine, 3)
    gens = [free_gen(n, 0.0) for n in (9, 9, 5)]
    batch = submit_prompts(engine, ["a" * 20, "b" * 4, "c" * 4], gens)
    while not batch.has_ended:
        steps.step()
    engine.close()
    # prompts take two steps, the second of which samples for all; then four decode until the last
    # of these ends a row; of the three before it the first follows a prefill
    assert len(steps.seconds) == 2


@pytest.mark.gpu
def test_automata_on_the_device_are_timed(compiler: GrammarCompiler) -> None:
    figures = run_device(compiler, torch.device("cuda"), rows=[4], repeats=1)
    assert [f.sampling for f in figures] == ["greedy", "temperature 1", "top-p 0.9", "top-k 50"]
    assert all(f.free_us > 0 and f.automata_us > 0 for f in figures)
