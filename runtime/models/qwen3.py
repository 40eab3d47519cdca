"""Qwen3: Llama with a norm on every query and key head; knows nothing else."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .layers import NamedWeights, Placement
from .llama import LlamaAttention, LlamaForCausalLM
from .model_config import ModelConfig


class Qwen3Attention(LlamaAttention):
    """Llama's attention with QK-norm."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.q_norm = placement.empty(self.head_dim)
        self.k_norm = placement.empty(self.head_dim)
        self._eps = config.norm_eps

    def norm_heads(self, qk: Tensor) -> Tensor:
        """Return every query and key head normed over its own dimensions."""
        weight = torch.cat(
            (
                self.q_norm.expand(self.num_heads, -1),
                self.k_norm.expand(self.num_kv_heads, -1),
            )
        )
        return self._ops.rms_norm(qk, weight, self._eps)

    def named_weights(self, prefix: str) -> NamedWeights:
        """Yield the projections and the two norms."""
        yield from super().named_weights(prefix)
        yield f"{prefix}.q_norm.weight", self.q_norm
        yield f"{prefix}.k_norm.weight", self.k_norm


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The model; its weights are uninitialised until a loader fills them."""

    attention_class: ClassVar[type[LlamaAttention]] = Qwen3Attention
