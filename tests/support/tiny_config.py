"""The shape of a model small enough to run in tests, with random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from umbel.runtime.models import ModelConfig
from umbel.runtime.models.rope import Rope

#: a config.json of two layers of 32, two heads of 16 on one
_TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def tiny_llama(folder: Path) -> str:
    """Write the shape to a folder; return the reference of a model of it, with random weights."""
    path = folder / "config.json"
    path.write_text(json.dumps(_TINY_LLAMA))
    return f"dummy:{path}"


def tiny_config(architecture: str, vocab_size: int, **changes: Any) -> ModelConfig:
    """Return two layers of 32, four heads of 16 on two; `changes` are other fields."""
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=Rope(),
        max_position_embeddings=64,
        tied_embeddings=True,
    )
    return replace(config, **changes)
