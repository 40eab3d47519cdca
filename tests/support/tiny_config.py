"""The shape of a model small enough to run in tests, with random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from umbel.runtime.models import ModelConfig
from umbel.runtime.models.rope import Rope


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
