"""Products for a single token, where reading the weights is all the work.

Each program owns some rows of a weight. What stands around the product is done with it: the norm of
the input before, the sum with the residual or SiLU-and-multiply after, so that a layer is a handful
of launches. On Hopper a program has asked for its first weights before the kernel in front of it is
over, since those depend on nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, overlap

_TILE = 16384  # weights that a program asks for at a time
_SMS = 132  # a program for each, at least, where the rows allow it


@triton.jit
def _inverse_rms(x_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    total = 0.0
    for start in tl.static_range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        total += tl.sum(x * x, axis=0)
    return tl.rsqrt(total / SIZE + eps)


@triton.jit
def _load_tile(weight_at, start, wanted, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    inside = wanted[:, None] & (columns < SIZE)[None, :]
    return tl.load(weight_at + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _load_input(
    x_ptr, norm_ptr, scale, start, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_NORM: tl.constexpr
):
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, mask=columns < SIZE, other=0.0)
    if HAS_NORM:  # rounded where the reference rounds
        weight = tl.load(norm_ptr + columns, mask=columns < SIZE, other=0.0)
        normed = (x.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
        x = (normed * weight.to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _row_product_kernel(
    x_ptr, weight_ptr, bias_ptr, norm_ptr, out_ptr, eps,
    NUM_OUT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATES: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = row < NUM_OUT
    at = weight_ptr + row.to(tl.int64)[:, None] * SIZE
    up_at = at + NUM_OUT * SIZE
    tile = _load_tile(at, 0, wanted, SIZE, BLOCK)
    if GATES:
        up_tile = _load_tile(up_at, 0, wanted, SIZE, BLOCK)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scale = 1.0
    if HAS_NORM:
        scale = _inverse_rms(x_ptr, eps, SIZE, BLOCK)
    total = tl.zeros([ROWS], tl.float32)
    up = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        x = _load_input(x_ptr, norm_ptr, scale, start, SIZE, BLOCK, HAS_NORM)
        total += tl.sum(tile.to(tl.float32) * x[None, :], axis=1)
        if GATES:
            up += tl.sum(up_tile.to(tl.float32) * x[None, :], axis=1)
        if start + BLOCK < SIZE:
            tile = _load_tile(at, start + BLOCK, wanted, SIZE, BLOCK)
            if GATES:
                up_tile = _load_tile(up_at, start + BLOCK, wanted, SIZE, BLOCK)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row, mask=wanted, other=0.0).to(tl.float32)
        if GATES:
            up += tl.load(bias_ptr + NUM_OUT + row, mask=wanted, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if GATES:
        gate = total.to(dtype).to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = silu * up.to(dtype).to(tl.float32)
    if ADDS:
        product = total.to(dtype).to(tl.float32)
        total = product + tl.load(out_ptr + row, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, total.to(dtype), mask=wanted)


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
    the result is silu(gate) * up, [1, out / 2]. Rounds where the separate ops round.
    """
    assert x.shape[0] == 1, f"{x.shape[0]} tokens, made for one"
    assert x.stride(1) == 1, "the input is not contiguous"
    assert weight.is_contiguous(), "the weight is not contiguous"
    assert add_to is None or not gates, "gated products are not added"
    size = weight.shape[1]
    num_out = weight.shape[0] // (2 if gates else 1)
    out = add_to
    if out is None:
        out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    block, rows, num_warps = _tiles(size, num_out, 2 if gates else 1)
    launch(_row_product_kernel, (triton.cdiv(num_out, rows),))(
        x, weight, bias, None if norm is None else norm[0], out,
        0.0 if norm is None else norm[1],
        NUM_OUT=num_out, SIZE=size, ROWS=rows, BLOCK=block,
        HAS_NORM=norm is not None, HAS_BIAS=bias is not None, ADDS=add_to is not None, GATES=gates,
        num_warps=num_warps, **overlap(x.device),
    )  # fmt: skip
    return out


def _tiles(size: int, num_out: int, num_weights: int) -> tuple[int, int, int]:
    """Return columns at a time, rows of a program, and warps."""
    block = min(triton.next_power_of_2(size), 4096)
    rows = max(1, _TILE // (block * num_weights))
    while rows > 1 and num_out < rows * _SMS:
        rows //= 2
    return block, rows, 8 if rows * block * num_weights >= 8192 else 4
