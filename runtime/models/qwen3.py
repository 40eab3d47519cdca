"""Qwen3: Llama with a norm on every query and key head; knows nothing else."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .layers import Weights, take
from .llama import LlamaAttention, LlamaForCausalLM
from .model_config import ModelConfig


class Qwen3Attention(LlamaAttention):
    """Llama's attention with QK-norm."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig) -> None:
        super().__init__(weights, name, config)
        q_norm = take(weights, f"{name}.q_norm.weight", config.head_dim)
        k_norm = take(weights, f"{name}.k_norm.weight", config.head_dim)
        # one row per head, so that queries and keys are normed in one go
        weights_per_head = torch.cat(
            (q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1))
        )
        self._head_norms = weights_per_head, config.norm_eps

    @property
    def head_norms(self) -> tuple[Tensor, float]:
        """Weights of the norm of every query and key head, and its eps."""
        return self._head_norms


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The model."""

    attention_class: ClassVar[type[LlamaAttention]] = Qwen3Attention
