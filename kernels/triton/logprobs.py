"""Log-probabilities of chosen tokens, without a float32 copy of the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 4096


@triton.jit
def _logprobs_kernel(
    logits_ptr, ids_ptr, out_ptr, row_stride, vocab_size: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * row_stride
    # an online softmax per lane, merged once at the end (Milakov and Gimelshein, 2018)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(base + columns, mask=columns < vocab_size, other=float("-inf"))
        x = x.to(tl.float32)
        new = tl.maximum(highest, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(highest - safe) + tl.exp(x - safe)
        highest = new
    top = tl.max(highest, axis=0)
    total = tl.sum(total * tl.exp(highest - top), axis=0)
    chosen = tl.load(base + tl.load(ids_ptr + row)).to(tl.float32)
    tl.store(out_ptr + row, chosen - top - tl.log(total))


def gather_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return log softmax(logits)[row, token_ids[row]] in float32; logits [num_rows, vocab_size].

    NaN for a row that has a NaN or no finite highest logit.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        assert logits.stride(1) == 1, "the rows are not contiguous"
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        launch(_logprobs_kernel, (num_rows,))(
            logits, token_ids, out, logits.stride(0), vocab_size, BLOCK=block, num_warps=8
        )
    return out
