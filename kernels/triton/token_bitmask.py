"""Packed token masks applied to logits in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 2048


@triton.jit
def _bitmask_kernel(logits_ptr, mask_ptr, row_stride, mask_stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < vocab_size
    words = tl.load(mask_ptr + row * mask_stride + columns // 32, mask=valid, other=-1)
    forbidden = ((words >> (columns % 32)) & 1) == 0
    at = logits_ptr + row * row_stride + columns
    x = tl.load(at, mask=valid & forbidden, other=0.0).to(tl.float32)
    masked = tl.where(x == x, float("-inf"), x)  # a broken row must not pass for a masked one
    tl.store(at, masked, mask=valid & forbidden)


def apply_token_bitmask_(logits: Tensor, bitmask: Tensor) -> None:
    """Set the logits of the tokens that the mask forbids to -inf, in place; a NaN stays one.

    logits: [num_rows, vocab_size]; bitmask: int32 [num_rows, ceil(vocab_size / 32)], where bit j
    of word i stands for token 32 * i + j, and a set bit allows it. Allowed logits are not read.
    """
    num_rows, vocab_size = logits.shape
    if logits.numel():
        assert logits.stride(1) == bitmask.stride(1) == 1, "the rows are not contiguous"
        launch(_bitmask_kernel, (num_rows, triton.cdiv(vocab_size, _BLOCK)))(
            logits, bitmask, logits.stride(0), bitmask.stride(0), vocab_size, BLOCK=_BLOCK
        )
