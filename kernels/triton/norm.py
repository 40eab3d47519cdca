"""RMSNorm, alone and fused with the residual add. One program normalises a few rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

# elements that one program holds; short rows (a head's) share a program
_TILE = 2048


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr,
    num_rows, num_heads, token_stride, head_stride, weight_stride, eps,
    n: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < n)[None, :]
    token, head = rows // num_heads, rows % num_heads
    at = (token * token_stride + head * head_stride)[:, None] + columns[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    dense = rows[:, None] * n + columns[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + dense, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(
            x.dtype
        )  # the norm sees the residual as it is stored
        tl.store(residual_ptr + dense, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / n + eps)
    # rounded where the reference rounds
    normed = (wide * scale[:, None]).to(x.dtype).to(tl.float32)
    weight = tl.load(
        weight_ptr + (head * weight_stride)[:, None] + columns[None, :], mask=mask, other=0.0
    )
    tl.store(out_ptr + dense, (normed * weight.to(tl.float32)).to(x.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, the mean taken in float32.

    x: [num_tokens, n] or [num_tokens, num_heads, n], its last dimension contiguous;
    weight: [n], or [num_heads, n].
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, eps)
    return out


def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` ([num_tokens, n], contiguous) in place and return the normed sum."""
    assert residual.is_contiguous(), "the residual is updated as one block"
    out = torch.empty_like(residual)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    n = x.shape[-1]
    num_rows = x.numel() // n
    if num_rows == 0:
        return
    assert x.dim() in (2, 3), f"x has {x.dim()} dimensions, not 2 or 3"
    assert x.stride(-1) == 1, "the last dimension of x is not contiguous"
    assert weight.is_contiguous(), "the weight is not contiguous"
    num_heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    block = triton.next_power_of_2(n)
    rows = max(1, _TILE // block)
    launch(_rms_norm_kernel, (triton.cdiv(num_rows, rows),))(
        x, residual, weight, out,
        num_rows, num_heads, x.stride(0), head_stride, n if weight.dim() == 2 else 0, eps,
        n=n, BLOCK=block, ROWS=rows, HAS_RESIDUAL=residual is not None,
        num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip
