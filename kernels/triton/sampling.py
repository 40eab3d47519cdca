"""Sampling, one program per row: greedy, or temperature, top-k, top-p, min-p and inverse CDF.

A row's result depends on that row alone. Filters rank ids by (falling logit, rising id) and keep a
first part of that order, so each comes down to a threshold logit and a number of ids that share it.
Thresholds are found by narrowing an interval of logits with eight pivots a pass, exactly, without
sorting. The random number is the first word of Philox4x32-10 with the row's seed as its key and the
row's counter as its counter, times 2**-32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_GREEDY_BLOCK = 8192


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """What each row is sampled with, [num_rows] each.

    Temperature 0 is greedy; top-k 0, top-p 1 and min-p 0 switch their filter off.
    """

    temperature: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seeds: Tensor  # int64, the bits of an unsigned number
    counters: Tensor  # int64, not negative


@triton.jit
def _key(x):
    # float32 -> int32 in the same order, -0.0 as 0.0
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(base, start, vocab_size, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(base + columns, mask=columns < vocab_size, other=float("-inf"))
    return x.to(tl.float32), columns


@triton.jit
def _highest(base, vocab_size: tl.constexpr, BLOCK: tl.constexpr):
    """Return the highest logit and its lowest id; NaN where the row has one."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        x, columns = _load(base, start, vocab_size, BLOCK)
        has_nan |= (x != x).to(tl.int32)
        is_better = x > best
        best = tl.where(is_better, x, best)
        at = tl.where(is_better, columns, at)
    top = tl.max(best, axis=0)
    token_id = tl.min(tl.where(best == top, at, vocab_size), axis=0)
    return tl.where(tl.max(has_nan, axis=0) > 0, float("nan"), top), token_id


@triton.jit
def _measure(x, top, temperature, MASS: tl.constexpr):
    if MASS:
        return tl.exp((x - top) / temperature)
    else:
        return tl.where(x > float("-inf"), 1.0, 0.0)


@triton.jit
def _threshold(
    base, vocab_size: tl.constexpr, low, high, needed, top, temperature,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the highest key t in [low, high) with measure(keys >= t) >= needed, and
    measure(keys > t). The measure is the weight, or the number of ids; low is taken to do.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    above = needed * 0.0
    while high - low > 1:
        pivots = low + (high - low) * (tl.arange(0, 8) + 1) // 9
        sums = tl.zeros([8], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            x, _columns = _load(base, start, vocab_size, BLOCK)
            value = _measure(x, top, temperature, MASS)
            reached = _key(x)[None, :] >= pivots[:, None]
            sums += tl.sum(tl.where(reached, value[None, :], 0.0), axis=1)
        # sums fall as pivots rise: rounding is monotone too
        does = (sums >= needed) | (pivots == low)
        low = tl.max(tl.where(does, pivots, low), axis=0)
        high = tl.min(tl.where(does, high, pivots), axis=0)
        above = tl.maximum(above, tl.max(tl.where(does, 0.0, sums), axis=0))
    return low.to(tl.int32), above


@triton.jit
def _kept_weights(
    base, start, vocab_size, top, temperature, min_p, key, num_ties, seen, BLOCK: tl.constexpr
):  # fmt: skip
    """Return one block's weights after the filters, and how many ids at the threshold it has."""
    x, columns = _load(base, start, vocab_size, BLOCK)
    weight = tl.exp((x - top) / temperature)
    keys = _key(x)
    tied = (keys == key).to(tl.int32)
    kept = (keys > key) | ((tied > 0) & (seen + tl.cumsum(tied, axis=0) <= num_ties))
    weight = tl.where(kept & (weight >= min_p), weight, 0.0).to(tl.float64)
    return weight, columns, tl.sum(tied, axis=0)


@triton.jit
def _draw(base, vocab_size, top, temperature, min_p, key, num_ties, u, BLOCK: tl.constexpr):
    """Return the first id whose cumulative weight exceeds u times the whole."""
    total = u * 0.0
    seen = num_ties * 0
    last = seen
    for start in range(0, vocab_size, BLOCK):
        weight, columns, num_tied = _kept_weights(
            base, start, vocab_size, top, temperature, min_p, key, num_ties, seen, BLOCK
        )
        total += tl.sum(weight, axis=0)
        seen += num_tied
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, columns, 0), axis=0))
    target = u * total
    before = u * 0.0
    seen = num_ties * 0
    found = seen + vocab_size
    start = seen
    while (found == vocab_size) & (start < vocab_size):
        weight, columns, num_tied = _kept_weights(
            base, start, vocab_size, top, temperature, min_p, key, num_ties, seen, BLOCK
        )
        cdf = before + tl.cumsum(weight, axis=0)
        found = tl.min(tl.where((cdf > target) & (weight > 0.0), columns, vocab_size), axis=0)
        before += tl.sum(weight, axis=0)
        seen += num_tied
        start += BLOCK
    return tl.minimum(found, last)  # rounding can leave the target a little too high


@triton.jit
def _uniform(seed, counter):
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, high, zero, zero)
    return word.to(tl.float64) * (1.0 / 4294967296.0)


@triton.jit
def _sample_kernel(
    logits_ptr, out_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, counter_ptr,
    row_stride, vocab_size: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    top, token_id = _highest(base, vocab_size, BLOCK)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    if is_finite & (temperature > 0.0):
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        u = _uniform(tl.load(seed_ptr + row), tl.load(counter_ptr + row))
        lowest, high = _key(top * 0.0 + float("-inf")), _key(top) + 1
        key, num_ties = lowest, vocab_size + 0 * lowest
        if (top_k > 0) & (top_k < vocab_size):
            key, above = _threshold(
                base, vocab_size, lowest, high, top_k.to(tl.float32), top, temperature, False, BLOCK
            )
            num_ties = top_k - above.to(tl.int32)
        if top_p < 1.0:
            mass = top * 0.0
            seen = num_ties * 0
            for start in range(0, vocab_size, BLOCK):
                weight, _, num_tied = _kept_weights(
                    base, start, vocab_size, top, temperature, 0.0, key, num_ties, seen, BLOCK
                )
                mass += tl.sum(weight.to(tl.float32), axis=0)
                seen += num_tied
            needed = top_p * mass
            p_key, above = _threshold(
                base, vocab_size, key, high, needed, top, temperature, True, BLOCK
            )
            bits = p_key ^ ((p_key >> 31) & 0x7FFFFFFF)
            each = tl.exp((bits.to(tl.float32, bitcast=True) - top) / temperature)
            ties = tl.ceil((needed - above) / tl.maximum(each, 1e-38))
            ties = tl.maximum(tl.minimum(ties, 1.0 * vocab_size), 1.0).to(tl.int32)
            num_ties = tl.where(p_key > key, ties, tl.minimum(ties, num_ties))
            key = p_key
        token_id = _draw(
            base, vocab_size, top, temperature, tl.load(min_p_ptr + row), key, num_ties, u, BLOCK
        )
    tl.store(out_ptr + row, tl.where(is_finite, token_id, -1).to(tl.int64))


@triton.jit
def _greedy_kernel(
    logits_ptr, value_ptr, id_ptr, row_stride, vocab_size, num_parts, BLOCK: tl.constexpr
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, columns = _load(logits_ptr + row * row_stride, part * BLOCK, vocab_size, BLOCK)
    top = tl.max(x, axis=0)
    token_id = tl.min(tl.where(x == top, columns, vocab_size), axis=0)
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    tl.store(value_ptr + row * num_parts + part, tl.where(has_nan, float("nan"), top))
    tl.store(id_ptr + row * num_parts + part, token_id)


@triton.jit
def _merge_greedy_kernel(value_ptr, id_ptr, out_ptr, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    x = tl.load(value_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_parts + parts, mask=parts < num_parts, other=0)
    top = tl.max(x, axis=0)
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    is_finite = (top > float("-inf")) & (top < float("inf")) & (has_nan == 0)
    token_id = tl.min(tl.where(x == top, ids, 2147483647), axis=0)
    tl.store(out_ptr + row, tl.where(is_finite, token_id, -1).to(tl.int64))


def greedy(logits: Tensor) -> Tensor:
    """Return the id of each row's highest logit, int64 [num_rows]; ties go to the lowest id.

    logits: [num_rows, vocab_size]. A row that has a NaN or no finite highest logit gives -1.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        assert logits.stride(1) == 1, "the rows are not contiguous"
        block = min(_GREEDY_BLOCK, triton.next_power_of_2(vocab_size))
        parts = triton.cdiv(vocab_size, block)
        values = torch.empty(num_rows, parts, dtype=torch.float32, device=logits.device)
        ids = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
        _greedy_kernel[(num_rows, parts)](
            logits, values, ids, logits.stride(0), vocab_size, parts, BLOCK=block, num_warps=8
        )
        _merge_greedy_kernel[(num_rows,)](
            values, ids, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1
        )
    return out


def sample(logits: Tensor, rows: SamplingTensors) -> Tensor:
    """Return one id per row, int64 [num_rows], by the rules of the runtime's sampler.

    logits: [num_rows, vocab_size], after penalties and masks. A row that has a NaN or no finite
    highest logit gives -1.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        assert logits.stride(1) == 1, "the rows are not contiguous"
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        _sample_kernel[(num_rows,)](
            logits, out, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds,
            rows.counters, logits.stride(0), vocab_size, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out
