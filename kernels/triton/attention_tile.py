"""What the attention kernels are made of: one tile of query rows over a range of slots.

A tile holds query rows of one KV head: the heads of its group for one or more tokens, packed into
the M dimension of the matrix products. It reads K and V block by block with an online softmax
(Milakov and Gimelshein, 2018) in base 2. Where several tiles read the slots of one row, each
leaves a partial output and the logarithm of its weight, and `merge_kernel` combines them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paged_attention import AttentionShape
from .launch import launch, overlap

# below every score: a row that has seen nothing yet has this maximum, so no two infinities meet.
# A hidden score is HIDDEN, which weighs nothing beside it: a finite one, scaled in one operation
# with the subtraction, would leave its own rounding error as an exponent.
LOWEST = tl.constexpr(-1.0e30)
HIDDEN = tl.constexpr(float("-inf"))

# partials that a merging program reads at a time: where there are few programs, as many as may be
_MERGE_BLOCK, _FEW_MERGE_BLOCK, _FEW_MERGES = 8, 32, 1024

_CPU_SMS = 3  # the interpreter has none to count


@triton.jit
def load_rows(base, token, head, valid, token_stride, head_stride, columns, HEAD_DIM: tl.constexpr):
    """Return q[token, head] for each row of a tile, zeros where it is not valid."""
    at = token.to(tl.int64) * token_stride + head * head_stride
    mask = valid[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(base + at[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_slots(base, offsets, columns, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return one head of a cache at `offsets`: [len(offsets), BLOCK_D]."""
    at = base + offsets[:, None] + columns[None, :]
    if HEAD_DIM == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=(columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def accumulate(scores, v, highest, total, acc, scale):
    """Fold a block of raw scores and its values into the online softmax."""
    new = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    decay = tl.exp2(highest - new)
    weights = tl.exp2(scores * scale - new[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
def attend(
    q, k_base, v_base, slots_ptr, slot_stride, columns, start, stop, scale, highest, total, acc,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Let every row see slots[start:stop], whole blocks of them if it IS_EXACT."""
    for at in tl.range(start, stop, BLOCK, num_stages=STAGES):
        kv = at + tl.arange(0, BLOCK)
        # past the end the last slot is read again: no mask, and no value of another sequence
        slots = tl.load(slots_ptr + (kv if IS_EXACT else tl.minimum(kv, stop - 1)))
        offsets = slots.to(tl.int64) * slot_stride
        k = load_slots(k_base, offsets, columns, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if not IS_EXACT:
            scores = tl.where((kv < stop)[None, :], scores, HIDDEN)
        v = load_slots(v_base, offsets, columns, HEAD_DIM, BLOCK_D)
        highest, total, acc = accumulate(scores, v, highest, total, acc, scale)
    return highest, total, acc


@triton.jit
def store_rows(
    highest, total, acc, out_ptr, partial_ptr, weight_ptr, token, partial, head, valid,
    num_heads, columns, HEAD_DIM: tl.constexpr, is_partial,
):  # fmt: skip
    """Store rows: finished ones at out[token, head], partial ones at partials[partial, head].

    A mask may hide all that one item reads from a row: its partial is zero and weighs nothing.
    """
    total = tl.where(total > 0.0, total, 1.0)
    acc = acc * (1.0 / total)[:, None]
    mask = valid[:, None] & (columns < HEAD_DIM)[None, :]
    if is_partial:
        row = partial.to(tl.int64) * num_heads + head
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + columns[None, :], acc, mask=mask)
        tl.store(weight_ptr + row, highest + tl.log2(total), mask=valid)
    else:
        row = token.to(tl.int64) * num_heads + head
        value = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * HEAD_DIM + columns[None, :], value, mask=mask)


@triton.jit
def merge_kernel(
    out_ptr, partial_ptr, weight_ptr, merge_ptr, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Write one head of one token from its partials. An entry: token or -1, first and last + 1.

    A token with no partials only pads the batch, and gets zeros. If it IS_OVERLAPPED, the launch
    may begin before the one that leaves the partials has ended.
    """
    entry = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(merge_ptr + entry * 3)
    start = tl.load(merge_ptr + entry * 3 + 1)
    stop = tl.load(merge_ptr + entry * 3 + 2)
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    if token >= 0:
        columns = tl.arange(0, BLOCK_D)
        highest = tl.full([], LOWEST, tl.float32)
        total = tl.zeros([], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for at in range(start, stop, BLOCK):
            part = at + tl.arange(0, BLOCK)
            valid = part < stop
            rows = part.to(tl.int64) * num_heads + head
            weights = tl.load(weight_ptr + rows, mask=valid, other=LOWEST)
            mask = valid[:, None] & (columns < HEAD_DIM)[None, :]
            places = partial_ptr + rows[:, None] * HEAD_DIM + columns[None, :]
            parts = tl.load(places, mask=mask, other=0.0)
            new = tl.maximum(highest, tl.max(weights, axis=0))
            decay = tl.exp2(highest - new)
            weights = tl.where(valid, tl.exp2(weights - new), 0.0)
            total = total * decay + tl.sum(weights, axis=0)
            acc = acc * decay + tl.sum(weights[:, None] * parts, axis=0)
            highest = new
        acc = acc / tl.where(total > 0.0, total, 1.0)
        at = (token.to(tl.int64) * num_heads + head) * HEAD_DIM
        value = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at + columns, value, mask=columns < HEAD_DIM)


class Partials:
    """Room for partial outputs and their weights, and the launch that merges them."""

    def __init__(self, size: int, shape: AttentionShape) -> None:
        heads, device = shape.num_heads, shape.device
        self.out = torch.empty(size, heads, shape.head_dim, dtype=torch.float32, device=device)
        self.weights = torch.empty(size, heads, dtype=torch.float32, device=device)

    def __len__(self) -> int:
        return len(self.weights)

    def merge(self, out: Tensor, merge: Tensor, num_entries: int) -> None:
        """Merge the first `num_entries` of a table, right after what left the partials."""
        num_heads, head_dim = out.shape[1:]
        block = _FEW_MERGE_BLOCK if num_entries * num_heads <= _FEW_MERGES else _MERGE_BLOCK
        launch(merge_kernel, (num_entries, num_heads))(
            out, self.out, self.weights, merge, num_heads,
            HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK=block,
            num_warps=1, **overlap(out.device),
        )  # fmt: skip


def check_strides(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Assert what the kernels rely on."""
    assert q.stride(2) == k_cache.stride(2) == 1, "the last dimension is not contiguous"
    assert k_cache.stride() == v_cache.stride(), "the two caches differ in layout"


def softmax_scale(head_dim: int) -> float:
    """Return the scale of scores in base 2."""
    return math.log2(math.e) / math.sqrt(head_dim)


def num_lanes(shape: AttentionShape, programs_per_sm: int) -> int:
    """Return how many programs per KV head fill the device."""
    sms = _CPU_SMS
    if shape.device.type == "cuda":
        sms = torch.cuda.get_device_properties(shape.device).multi_processor_count
    return max(1, sms * programs_per_sm // shape.num_kv_heads)
