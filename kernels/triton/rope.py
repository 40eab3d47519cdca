"""From the QKV projection to the KV caches in one launch: head norms, RoPE, KV write.

A program takes one token and a few heads of one kind: query heads are normed and rotated in place,
key heads normed, rotated and stored in the cache, value heads stored.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, overlap

_MAX_GROUP = 8  # heads per program


@triton.jit
def _load_halves(base, stride, columns, half, ROWS: tl.constexpr, mask):
    at = base + tl.arange(0, ROWS)[:, None] * stride + columns[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + half, mask=mask, other=0.0)


@triton.jit
def _store_halves(base, stride, columns, half, first, second, ROWS: tl.constexpr, mask):
    at = base + tl.arange(0, ROWS)[:, None] * stride + columns[None, :]
    tl.store(at, first, mask=mask)
    tl.store(at + half, second, mask=mask)


@triton.jit
def _norm_and_rotate(
    first, second, weight_ptr, cos, sin, eps, columns, half,
    HAS_WEIGHT: tl.constexpr, HAS_ROPE: tl.constexpr,
):  # fmt: skip
    a, b = first.to(tl.float32), second.to(tl.float32)
    if HAS_WEIGHT:
        square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        scale = tl.rsqrt(square / (2 * half) + eps)[:, None]
        valid = columns < half
        low = tl.load(weight_ptr + columns, mask=valid, other=0.0).to(tl.float32)
        high = tl.load(weight_ptr + half + columns, mask=valid, other=0.0).to(tl.float32)
        # rounded where the separate ops round
        a = ((a * scale).to(first.dtype).to(tl.float32) * low[None, :]).to(first.dtype)
        b = ((b * scale).to(first.dtype).to(tl.float32) * high[None, :]).to(first.dtype)
        a, b = a.to(tl.float32), b.to(tl.float32)
    if HAS_ROPE:
        a, b = a * cos - b * sin, b * cos + a * sin
    return a.to(first.dtype), b.to(first.dtype)


@triton.jit
def _heads_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    k_cache_ptr, v_cache_ptr, slots_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token,
    cache_slot, cache_head, num_q_groups, num_kv_groups, eps,
    half: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_KV: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = (columns < half)[None, :] & (tl.arange(0, GROUP) >= 0)[:, None]
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    cos = tl.zeros([1, BLOCK], tl.float32)
    sin = cos
    if HAS_ROPE:
        valid = columns < half
        cos = tl.load(cos_ptr + token * cos_token + columns, mask=valid, other=0.0)
        sin = tl.load(sin_ptr + token * sin_token + columns, mask=valid, other=0.0)
        cos, sin = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    if group < num_q_groups:
        base = q_ptr + token * q_token + group * GROUP * q_head
        first, second = _load_halves(base, q_head, columns, half, GROUP, mask)
        first, second = _norm_and_rotate(
            first, second, q_weight_ptr, cos, sin, eps, columns, half, HAS_NORM, HAS_ROPE
        )
        _store_halves(base, q_head, columns, half, first, second, GROUP, mask)
    elif HAS_KV:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if group < num_q_groups + num_kv_groups:
            head = (group - num_q_groups) * GROUP
            base = k_ptr + token * k_token + head * k_head
            first, second = _load_halves(base, k_head, columns, half, GROUP, mask)
            first, second = _norm_and_rotate(
                first, second, k_weight_ptr, cos, sin, eps, columns, half, HAS_NORM, HAS_ROPE
            )
            base = k_cache_ptr + slot * cache_slot + head * cache_head
            _store_halves(base, cache_head, columns, half, first, second, GROUP, mask)
        else:
            head = (group - num_q_groups - num_kv_groups) * GROUP
            base = v_ptr + token * v_token + head * v_head
            first, second = _load_halves(base, v_head, columns, half, GROUP, mask)
            base = v_cache_ptr + slot * cache_slot + head * cache_head
            _store_halves(base, cache_head, columns, half, first, second, GROUP, mask)


def norm_rope_write_kv_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_norms: tuple[Tensor, Tensor, float] | None,
    cos_sin: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Do rms_norm of q and k, apply_rope_ of both and write_kv_ in one launch.

    q [num_tokens, num_heads, head_dim] ends normed and rotated in place; k and v [num_tokens,
    num_kv_heads, head_dim] are read and end in the caches. `head_norms` is (q weight [head_dim],
    k weight [head_dim], eps); `cos_sin` is as in apply_rope_; `cache` is (k_cache, v_cache, slots)
    as in write_kv_. Heads may be strided; every last dimension is contiguous.
    """
    k_cache, v_cache, slots = cache
    assert k_cache.stride() == v_cache.stride(), "the two caches differ in layout"
    _launch(q, k, v, head_norms, cos_sin, k_cache, v_cache, slots)


def rope_and_cache_(
    heads: Tensor,
    num_heads: int,
    head_norms: tuple[Tensor, float] | None,
    cos_sin: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Norm and rotate the query and key heads, store keys and values; return the queries.

    Shapes as in reference.rope_and_cache_; all query heads have one norm, and all key heads.
    """
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    norms = None
    if head_norms is not None:
        weight, eps = head_norms
        norms = weight[0], weight[num_heads], eps
    norm_rope_write_kv_(q, k, v, norms, cos_sin, cache)
    return q


def apply_rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the heads of `x` in place; dimension i pairs with i + head_dim / 2.

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim / 2].
    """
    nothing = x[:, :0]
    _launch(x, nothing, nothing, None, (cos, sin), None, None, None)


def write_kv_(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [num_tokens, num_kv_heads, head_dim] at `slots` [num_tokens] of the caches.

    The caches are [num_slots, num_kv_heads, head_dim]; no slot may be named twice.
    """
    assert k_cache.stride() == v_cache.stride(), "the two caches differ in layout"
    _launch(k[:, :0], k, v, None, None, k_cache, v_cache, slots)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_norms: tuple[Tensor, Tensor, float] | None,
    cos_sin: tuple[Tensor, Tensor] | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slots: Tensor | None,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert head_dim % 2 == 0, f"head_dim {head_dim} is odd"
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the last dimension is not contiguous"
    if num_tokens == 0:
        return
    # a power of two that divides both numbers of heads
    group = math.gcd(num_heads, num_kv_heads, _MAX_GROUP)
    q_weight, k_weight, eps = (None, None, 0.0) if head_norms is None else head_norms
    cos, sin = (None, None) if cos_sin is None else cos_sin
    for table in (cos, sin):
        assert table is None or table.stride(-1) == 1, "cos and sin rows are not contiguous"
    q_groups, kv_groups = num_heads // group, num_kv_heads // group
    launch(_heads_kernel, (num_tokens, q_groups + 2 * kv_groups))(
        q, k, v, q_weight, k_weight, cos, sin, k_cache, v_cache, slots,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0),
        0 if k_cache is None else k_cache.stride(0), 0 if k_cache is None else k_cache.stride(1),
        q_groups, kv_groups, eps,
        half=head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2), GROUP=group,
        HAS_NORM=head_norms is not None, HAS_ROPE=cos_sin is not None, HAS_KV=slots is not None,
        num_warps=1 if group <= 2 else 2,
        # of use where a pass is a chain of short launches, as measured on an H200
        **overlap(q.device, num_tokens == 1),
    )  # fmt: skip
