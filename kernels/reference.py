"""Every op in plain torch: the path for the CPU, and the oracle of all other implementations.

Plain before fast, except where a plain form would cost a step on a CPU. Knows nothing of models:
shapes and strides come with the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return x -> x W^T + b for weight [out_features, in_features]."""
    return partial(F.linear, weight=weight, bias=bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, the mean taken in float32.

    `weight` broadcasts against `x`: one vector, or one per head.
    """
    if x.dtype == torch.float32:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place and return the normed sum."""
    residual += x
    return rms_norm(residual, weight, eps)


def row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    add_to: Tensor | None = None,
    gates: bool = False,
) -> Tensor:
    """Return x W^T + bias for one token: x [1, in], weight [out, in] -> [1, out].

    With `norm`, (weight [in], eps), x is RMS-normed first. With `add_to` [1, out] the product is
    added to it in place, and that is returned. With `gates` the weight holds gate and up rows, and
    the result is silu(gate) * up, [1, out / 2].
    """
    product = F.linear(x if norm is None else rms_norm(x, *norm), weight, bias)
    if gates:
        return silu_and_mul(product)
    return product if add_to is None else add_to.add_(product)


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the heads of `x` in place; dimension i pairs with i + head_dim / 2.

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim / 2].
    """
    first, second = x.chunk(2, dim=-1)
    rotated = first * cos - second * sin
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)


def rope_and_cache_(
    heads: Tensor,
    num_heads: int,
    head_norms: tuple[Tensor, float] | None,
    cos_sin: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Norm and rotate the query and key heads, store keys and values; return the queries.

    heads: [num_tokens, num_heads + 2 num_kv_heads, head_dim], the queries first, changed in place.
    `head_norms` is (weight [num_heads + num_kv_heads, head_dim], eps) as in rms_norm, where all
    query heads have one weight and all key heads have one. `cos_sin` is as in apply_rope_; `cache`
    is (k_cache, v_cache, slots) as in write_kv_. The result [num_tokens, num_heads, head_dim] may
    be a view.
    """
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    qk, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if head_norms is not None:
        qk = rms_norm(qk, *head_norms)
    apply_rope_(qk, *cos_sin)
    k_cache, v_cache, slots = cache
    write_kv_(k_cache, v_cache, slots, qk[:, num_heads:], v)
    return qk[:, :num_heads]


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up of the merged [gate | up] rows: [..., 2 n] -> [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def write_kv_(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [num_tokens, num_kv_heads, head_dim] at `slots` [num_tokens] of the caches.

    The caches are [num_slots, num_kv_heads, head_dim]; no slot may be named twice.
    """
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def apply_token_bitmask_(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of the tokens that the mask forbids to -inf, in place; a NaN stays one.

    logits: [num_rows, vocab_size]; bitmask: int32 [num_rows, ceil(vocab_size / 32)], where bit j
    of word i stands for token 32 * i + j, and a set bit allows it.
    """
    bits = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = ((bitmask[..., None] >> bits) & 1).flatten(-2)[..., : logits.shape[-1]]
    logits.masked_fill_((allowed == 0) & ~logits.isnan(), -torch.inf)


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return log softmax(logits)[row, token_ids[row]] in float32; logits [num_rows, vocab_size]."""
    chosen = logits.gather(-1, token_ids[:, None]).squeeze(-1)
    return chosen.float() - logits.float().logsumexp(-1)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_indptr: npt.NDArray[np.int64],
    kv_indptr: npt.NDArray[np.int64],
    kv_indices: npt.NDArray[np.int64],
    masks: Mapping[int, npt.NDArray[np.bool_]],
) -> Tensor:
    """Attend one sequence after the other, by the definition; the oracle of every backend.

    Sequence i owns the rows query_indptr[i]:query_indptr[i + 1] of q [num_tokens, num_heads,
    head_dim] and reads the slots kv_indices[kv_indptr[i]:kv_indptr[i + 1]]; its row j sees the
    first kv_len - q_len + j + 1 of them, or what masks[i] [q_len, kv_len] says. Computes in
    float64 and returns the shape and dtype of q.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // k_cache.shape[1]
    for i in range(len(query_indptr) - 1):
        rows = slice(int(query_indptr[i]), int(query_indptr[i + 1]))
        slots = torch.as_tensor(kv_indices[kv_indptr[i] : kv_indptr[i + 1]], device=q.device)
        queries = q[rows].double().transpose(0, 1)  # [num_heads, q_len, head_dim]
        keys = k_cache[slots].double().transpose(0, 1).repeat_interleave(group, 0)
        values = v_cache[slots].double().transpose(0, 1).repeat_interleave(group, 0)
        q_len, kv_len = queries.shape[1], keys.shape[1]
        if i in masks:
            visible = torch.as_tensor(masks[i], device=q.device)
        else:
            ones = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
            visible = ones.tril(kv_len - q_len)
        scores = queries @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[rows] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out
