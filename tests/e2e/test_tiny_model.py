"""The engine on a random two-layer model in fp32: real attention over the real paged pool."""

from __future__ import annotations

import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    TOKENIZER,
    check_idle,
    graphs,
    make_engine,
    run_graphs,
)
from tests.support.equality import assert_same_outcome

from umbel.lang.graph import RequestGraph
from umbel.runtime.engine import Engine
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.runner import ModelRunner
from umbel.runtime.models import CausalLM, ModelConfig, load_dummy_model

CPU = torch.device("cpu")
batches = st.lists(graphs(greedy=True), min_size=1, max_size=3)
quick = settings(max_examples=25)  # about a hundred over the four equalities


@functools.cache
def tiny_model() -> CausalLM:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": TOKENIZER.vocab_size,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
    )
    return load_dummy_model(config, dtype=torch.float32, device=CPU, seed=3)


def tiny_engine(num_slots: int = 768, **options: object) -> Engine:
    model = tiny_model()
    shape = model.config
    pool = KVPool(
        num_layers=shape.num_layers,
        num_slots=num_slots,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    return make_engine(ModelRunner(model, pool, CPU), **options)


def assert_same(
    programs: list[RequestGraph],
    one: Engine,
    two: Engine,
    *,
    alone: bool = False,
    pieces: bool = False,
) -> None:
    left = run_graphs(one, programs)
    right = run_graphs(two, programs, alone=alone, pieces=pieces)
    for graph, a, b in zip(programs, left, right, strict=True):
        assert_same_outcome(graph, a, b)
    check_idle(one)
    check_idle(two)


@quick
@given(batches)
def test_rule_16_cached_equals_cold(programs: list[RequestGraph]) -> None:
    assert_same(programs, tiny_engine(), tiny_engine(prefix_cache=False))


@quick
@given(batches)
def test_rule_16_batched_equals_alone(programs: list[RequestGraph]) -> None:
    assert_same(programs, tiny_engine(), tiny_engine(prefix_cache=False), alone=True)


@quick
@given(batches, st.integers(1, 12))
def test_rule_16_chunked_equals_whole(programs: list[RequestGraph], budget: int) -> None:
    assert_same(programs, tiny_engine(max_step_tokens=4096), tiny_engine(max_step_tokens=budget))


@quick
@given(batches, st.integers(150, 300))
def test_rule_16_stepwise_in_a_tiny_pool_equals_compiled(
    programs: list[RequestGraph], num_slots: int
) -> None:
    small = tiny_engine(num_slots, max_seq_len=149, max_step_tokens=16)
    assert_same(programs, tiny_engine(max_seq_len=149), small, pieces=True)
