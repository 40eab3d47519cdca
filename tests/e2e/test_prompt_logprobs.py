"""Scores of prompts on a real model: transformers' numbers, and no tensor of rows x vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engine_harness import TOKENIZER, Collector, drive, make_engine, open_run
from tests.support.graphs import GraphBuilder
from transformers import LlamaConfig, LlamaForCausalLM

from umbel.lang.ir import Gen, Select, Text
from umbel.lang.results import TokenLogprob
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.runner import MAX_SCORED_ROWS, ModelRunner
from umbel.runtime.models import load_model
from umbel.runtime.models.llama import LlamaForCausalLM as OurLlama

CPU = torch.device("cpu")
MAX_CONTEXT = 512
TEXT = "abc xyxy 0123456789 " * 12


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()  # type: ignore[no-any-return,no-untyped-call]


@pytest.fixture(scope="module")
def model(oracle: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> OurLlama:
    path: Path = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(path)
    loaded = load_model(path, dtype=torch.float32, device=CPU)
    assert isinstance(loaded, OurLlama)
    return loaded


def engine_of(model: OurLlama, **options: Any) -> Engine:
    shape = model.config
    pool = KVPool(shape.num_layers, 1024, shape.num_kv_heads, shape.head_dim, torch.float32, CPU)
    options = {"max_step_tokens": 4096} | options
    return make_engine(ModelRunner(model, pool, CPU), **options)


def ask(engine: Engine, text: str, num_top: int = 3, max_tokens: int = 2) -> Collector:
    builder = GraphBuilder()
    sampling = SamplingParams(
        max_tokens=max_tokens, prompt_logprobs=True, top_logprobs=num_top, ignore_eos=True
    )
    builder.add(Gen("x", sampling), builder.add(Text((text,)), None))
    _, collector = open_run(engine, builder.piece())
    return collector


def scores(collector: Collector) -> tuple[TokenLogprob, ...]:
    return collector.results[1].samples[0].prompt_logprobs


def assert_as_transformers(
    oracle: LlamaForCausalLM, text: str, found: tuple[TokenLogprob, ...], num_top: int
) -> None:
    ids = TOKENIZER.encode_text(text)
    with torch.no_grad():
        logprobs = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert [token.token_id for token in found] == ids[1:]
    for row, token in zip(logprobs, found, strict=False):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        best = row.topk(num_top).values.tolist()
        assert [value for _, value in token.top] == pytest.approx(best, abs=1e-4)
        for token_id, value in token.top:
            assert value == pytest.approx(float(row[token_id]), abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 17}, {"prefix_cache": False}])
def test_scores_are_those_of_transformers(
    oracle: LlamaForCausalLM, model: OurLlama, options: dict[str, Any]
) -> None:
    engine = engine_of(model, **options)
    texts = [TEXT, TEXT[:101] + "9988", TEXT + "ab", "0"]
    for _ in range(2):  # cold and at once, then cached
        seen = [ask(engine, text) for text in texts]
        drive(engine)
        for text, collector in zip(texts, seen, strict=True):
            assert_as_transformers(oracle, text, scores(collector), 3)


def test_logits_are_made_a_few_rows_at_a_time(
    model: OurLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the head: 400 rows of a prompt and 300 of a select, in slices."""
    made: list[int] = []
    head = model.head

    class CountingHead:
        row = None  # no way of its own for a single row

        def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
            logits = head(hidden)
            made.append(len(logits))
            return logits

    monkeypatch.setattr(model, "head", CountingHead())
    engine = engine_of(model)
    collector = ask(engine, "0123456789" * 40, max_tokens=1)
    builder = GraphBuilder()
    choices = tuple(digit * 30 for digit in "0123456789")
    builder.add(Select("s", choices), builder.add(Text(("a",)), None))
    open_run(engine, builder.piece())
    drive(engine)
    assert len(scores(collector)) == 399
    assert sum(made) >= 399 + 290
    assert max(made) == MAX_SCORED_ROWS
