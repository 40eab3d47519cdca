"""A random two-layer model in fp32, and runners of it over a real paged pool."""

from __future__ import annotations

import functools

import torch
from tests.support.engine_harness import TOKENIZER

from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.runner import ModelRunner
from umbel.runtime.models import CausalLM, ModelConfig, load_dummy_model

CPU = torch.device("cpu")


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


def tiny_runner(num_slots: int = 768) -> ModelRunner:
    """Return a runner of the tiny model on a pool of its own."""
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
    return ModelRunner(model, pool, CPU)
