"""Llama, top to bottom: also Mistral, Qwen2 (biases on Q, K and V) and SmolLM2.

Knows the pass as a ForwardBatch and the cache as a KVPool; nothing of requests or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from umbel.kernels import AttentionPlan, AttentionShape, attention, ops_for, plan_attention

from ..kv_cache.kv_pool import KVPool
from .forward_batch import ForwardBatch
from .layers import GatedMLP, Linear, NamedWeights, Placement, RMSNorm, RotaryEmbedding
from .model_config import ModelConfig


class CausalLM(Protocol):
    """A model that predicts the next token."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    def forward(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        """Write the pass's K and V to `pool`; return float32 logits [num_logits, vocab_size]."""
        ...

    def named_weights(self) -> NamedWeights:
        """Yield every weight under its Hugging Face name, as a view for a loader to fill."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """What every layer of one pass shares."""

    cos: Tensor  # [num_tokens, 1, head_dim / 2]
    sin: Tensor  # [num_tokens, 1, head_dim / 2]
    slots: Tensor  # [num_tokens]
    plan: AttentionPlan


class LlamaAttention:
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim
        self.qkv = Linear(
            config.hidden_size,
            (heads * dim, kv_heads * dim, kv_heads * dim),
            bias=config.qkv_bias,
            placement=placement,
        )
        self.output = Linear(
            heads * dim, (config.hidden_size,), bias=config.output_bias, placement=placement
        )
        self._ops = ops_for(placement.device)

    def norm_heads(self, qk: Tensor) -> Tensor:
        """Return the query and key heads [num_tokens, num_heads + num_kv_heads, head_dim] normed.

        Llama has no such norm; the result may share memory with the argument.
        """
        return qk

    def __call__(self, x: Tensor, this: Pass, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size]; writes K and V before it reads the cache."""
        heads = torch.unflatten(self.qkv(x), -1, (-1, self.head_dim))
        qk = self.norm_heads(heads[:, : self.num_heads + self.num_kv_heads])
        v = heads[:, self.num_heads + self.num_kv_heads :]
        self._ops.apply_rope_(qk, this.cos, this.sin)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        self._ops.write_kv_(k_cache, v_cache, this.slots, k, v)
        return self.output(attention(q, k_cache, v_cache, this.plan).flatten(1))

    def named_weights(self, prefix: str) -> NamedWeights:
        """Yield the projections."""
        names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        yield from self.qkv.named_weights(names)
        yield from self.output.named_weights((f"{prefix}.o_proj",))


class LlamaLayer:
    """One decoder layer, pre-norm."""

    def __init__(
        self, config: ModelConfig, attention: type[LlamaAttention], placement: Placement
    ) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, placement)
        self.attention = attention(config, placement)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps, placement)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias, placement=placement
        )

    def __call__(
        self, x: Tensor, residual: Tensor, this: Pass, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Return what is to be added to `residual`, which is updated in place."""
        x = self.attention(self.input_norm.add_(x, residual), this, k_cache, v_cache)
        return self.mlp(self.post_norm.add_(x, residual))

    def named_weights(self, prefix: str) -> NamedWeights:
        """Yield the layer's weights."""
        yield from self.input_norm.named_weights(f"{prefix}.input_layernorm")
        yield from self.attention.named_weights(f"{prefix}.self_attn")
        yield from self.post_norm.named_weights(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.named_weights(f"{prefix}.mlp")


class LlamaForCausalLM:
    """The model; its weights are uninitialised until a loader fills them."""

    attention_class: ClassVar[type[LlamaAttention]] = LlamaAttention

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self.config = config
        self.embedding = placement.empty(config.vocab_size, config.hidden_size)
        self.layers = [
            LlamaLayer(config, self.attention_class, placement) for _ in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, placement)
        self.head = (
            self.embedding
            if config.tied_embeddings
            else placement.empty(config.vocab_size, config.hidden_size)
        )
        self.rope = RotaryEmbedding(config.rope, config.head_dim, placement)
        self.attention_shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            placement.dtype,
            placement.device,
        )

    def forward(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        """Write the pass's K and V to `pool`; return float32 logits [num_logits, vocab_size]."""
        cos, sin = self.rope.cos_sin(batch.positions)
        plan = plan_attention(batch.layout, self.attention_shape)
        this = Pass(cos, sin, batch.slot_mapping, plan)
        x = F.embedding(batch.token_ids, self.embedding)  # [num_tokens, hidden_size]
        residual = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, residual, this, pool.k[i], pool.v[i])
        rows = batch.logits_rows
        x = self.norm.add_(x.index_select(0, rows), residual.index_select(0, rows))
        return F.linear(x, self.head).float()

    def named_weights(self) -> NamedWeights:
        """Yield every weight under its Hugging Face name, as a view for a loader to fill."""
        yield "model.embed_tokens.weight", self.embedding
        for i, layer in enumerate(self.layers):
            yield from layer.named_weights(f"model.layers.{i}")
        yield from self.norm.named_weights("model.norm")
        if not self.config.tied_embeddings:
            yield "lm_head.weight", self.head
