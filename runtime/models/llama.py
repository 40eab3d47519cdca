"""Llama, top to bottom: also Mistral, Qwen2 (biases on Q, K and V) and SmolLM2.

Knows the pass as a ForwardBatch and the cache as a KVPool; nothing of requests or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from umbel.kernels import (
    AttentionLayout,
    AttentionPlan,
    AttentionShape,
    attention,
    attention_backend,
    ops_for,
)

from ..kv_cache.kv_pool import KVPool
from .forward_batch import ForwardBatch, PassRows
from .layers import GatedMLP, Linear, RMSNorm, RotaryEmbedding, Weights, take
from .model_config import ModelConfig


class CausalLM(Protocol):
    """A model that predicts the next token."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def attention_shape(self) -> AttentionShape:
        """What an attention plan must know of the layers."""
        ...

    def plan(self, layout: AttentionLayout) -> AttentionPlan:
        """Plan the attention of a pass; the plan holds until the next one is made."""
        ...

    def hidden(
        self, rows: PassRows, wanted: Tensor | None, plan: AttentionPlan, pool: KVPool
    ) -> Tensor:
        """Run a planned pass: write its K and V to `pool`; return what `logits` takes.

        That is [num_logits, hidden_size] for the rows `wanted`, or for all if it is None.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size], in the model's dtype, of what `hidden` made."""
        ...

    def forward(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        """Write the pass's K and V to `pool`; return float32 logits [num_logits, vocab_size]."""
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

    def __init__(self, weights: Weights, name: str, config: ModelConfig) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim
        self.qkv = Linear(
            weights,
            (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
            config.hidden_size,
            (heads * dim, kv_heads * dim, kv_heads * dim),
            bias=config.qkv_bias,
        )
        self.output = Linear(
            weights,
            (f"{name}.o_proj",),
            heads * dim,
            (config.hidden_size,),
            bias=config.output_bias,
        )
        self._ops = ops_for(weights.placement.device)

    @property
    def head_norms(self) -> tuple[Tensor, float] | None:
        """Weights [num_heads + num_kv_heads, head_dim] of a norm of each head, and its eps."""
        return None

    def __call__(self, x: Tensor, this: Pass, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size]; writes K and V before it reads the cache."""
        return self.output(self._attend(self.qkv(x), this, k_cache, v_cache))

    def add_row_(
        self, stream: Tensor, norm: RMSNorm, this: Pass, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """Add the result for one token, `stream` [1, hidden_size] normed, to `stream`."""
        assert self.qkv.row is not None
        assert self.output.row is not None
        qkv = self.qkv.row(stream, norm=norm.parts)
        self.output.row(self._attend(qkv, this, k_cache, v_cache), add_to=stream)

    def _attend(self, qkv: Tensor, this: Pass, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        heads = torch.unflatten(qkv, -1, (-1, self.head_dim))
        q = self._ops.rope_and_cache_(
            heads,
            self.num_heads,
            self.head_norms,
            (this.cos, this.sin),
            (k_cache, v_cache, this.slots),
        )
        return attention(q, k_cache, v_cache, this.plan).flatten(1)


class LlamaLayer:
    """One decoder layer, pre-norm."""

    def __init__(
        self, weights: Weights, name: str, config: ModelConfig, attention: type[LlamaAttention]
    ) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.input_norm = RMSNorm(weights, f"{name}.input_layernorm", size, eps)
        self.attention = attention(weights, f"{name}.self_attn", config)
        self.post_norm = RMSNorm(weights, f"{name}.post_attention_layernorm", size, eps)
        self.mlp = GatedMLP(
            weights, f"{name}.mlp", size, config.intermediate_size, bias=config.mlp_bias
        )

    def __call__(
        self, x: Tensor, residual: Tensor, this: Pass, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Return what is to be added to `residual`, which is updated in place."""
        x = self.attention(self.input_norm.add_(x, residual), this, k_cache, v_cache)
        return self.mlp(self.post_norm.add_(x, residual))

    def add_row_(self, stream: Tensor, this: Pass, k_cache: Tensor, v_cache: Tensor) -> None:
        """Run the layer for one token, in place: `stream` is [1, hidden_size]."""
        self.attention.add_row_(stream, self.input_norm, this, k_cache, v_cache)
        self.mlp.add_row_(stream, self.post_norm)


class LlamaForCausalLM:
    """The model."""

    attention_class: ClassVar[type[LlamaAttention]] = LlamaAttention

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        vocab, size = config.vocab_size, config.hidden_size
        placement = weights.placement
        self.embedding = take(weights, "model.embed_tokens.weight", vocab, size)
        self.layers = [
            LlamaLayer(weights, f"model.layers.{i}", config, self.attention_class)
            for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(weights, "model.norm", size, config.norm_eps)
        if config.tied_embeddings:
            self.head = Linear.tied(self.embedding)
        else:
            self.head = Linear(weights, ("lm_head",), size, (vocab,), bias=False)
        self.rope = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, placement
        )
        self.attention_shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            placement.dtype,
            placement.device,
        )
        self.attention = attention_backend(placement.attention, self.attention_shape)

    def forward(self, batch: ForwardBatch, pool: KVPool) -> Tensor:
        """Write the pass's K and V to `pool`; return float32 logits [num_logits, vocab_size]."""
        plan = self.plan(batch.layout)
        return self.logits(self.hidden(batch.rows, batch.logits_rows, plan, pool)).float()

    def plan(self, layout: AttentionLayout) -> AttentionPlan:
        """Plan the attention of a pass; the plan holds until the next one is made."""
        return self.attention.plan(layout, self.attention_shape)

    def hidden(
        self, rows: PassRows, wanted: Tensor | None, plan: AttentionPlan, pool: KVPool
    ) -> Tensor:
        """Run a planned pass: write its K and V to `pool`; return the rows `wanted`, or all.

        [num_logits, hidden_size], normed: the head alone stands between them and the logits. Queues
        kernels and nothing else: on a GPU a graph can capture it.
        """
        cos, sin = self.rope.cos_sin(rows.positions)
        this = Pass(cos, sin, rows.slot_mapping, plan)
        x = F.embedding(rows.token_ids, self.embedding)  # [num_tokens, hidden_size]
        if len(x) == 1 and self.head.row is not None:
            for i, layer in enumerate(self.layers):
                layer.add_row_(x, this, pool.k[i], pool.v[i])
            return self.norm(x)[: 1 if wanted is None else len(wanted)]
        residual = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, residual, this, pool.k[i], pool.v[i])
        if wanted is not None:
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
        return self.norm.add_(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size], in the model's dtype, of what `hidden` made."""
        if len(hidden) == 1 and self.head.row is not None:
            return self.head.row(hidden)
        return self.head(hidden)
