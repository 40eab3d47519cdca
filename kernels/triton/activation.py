"""SiLU of the gate times up, over merged rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, row_stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < n
    gate = tl.load(x_ptr + row * row_stride + columns, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * row_stride + n + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)  # as the reference rounds
    tl.store(out_ptr + row * n + columns, (silu * up.to(tl.float32)).to(gate.dtype), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return silu(gate) * up of the merged [gate | up] rows: [..., 2 n] -> [..., n]."""
    n = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    if out.numel():
        rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
        assert rows.stride(1) == 1, "the last dimension of x is not contiguous"
        grid = (rows.shape[0], triton.cdiv(n, _BLOCK))
        launch(_silu_and_mul_kernel, grid)(rows, out, rows.stride(0), n, BLOCK=_BLOCK)
    return out
