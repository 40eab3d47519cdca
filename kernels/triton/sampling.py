"""Sampling: greedy, or temperature, top-k, top-p, min-p and inverse CDF, in two to five launches.

A row's result depends on that row alone. Filters rank ids by (falling logit, rising id) and keep a
first part of that order, so each comes down to a threshold logit and a number of ids that share it.

The first launch reads the logits in parts, one program each: a part's highest logit, its weight,
and the highest of every 64 logits. The last, one program per row, draws: first the part by the
parts' weights, then the id in it. Where rows have filters, three launches between the two bound the
threshold: two sum the weights above 16 pivots each, spread over the range of logits that is left,
the third gathers the logits of the last range, a few thousand at most where they differ, out of the
groups of 64 that reach it. From those the last launch finds the threshold exactly, with eight
pivots a pass; nothing is sorted. The random number is the first word of Philox4x32-10 with the
row's seed as its key and the row's counter as its counter, times 2**-32.

Packed masks are applied where logits are read. For top-p, which reads them again and again, the
first launch writes what a mask forbids as -inf in place of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling_tensors import RowMasks, SamplingTensors
from .launch import launch
from .sampling_parts import (
    GROUP,
    Parts,
    hide_forbidden,
    launch_parts,
    load_logits,
    load_masked,
    mask_arguments,
    merge_parts,
    row_masses,
    row_words,
)

_PIVOTS = 16  # of each launch that narrows a range
_GROUPS_AT_ONCE = 2  # of those that are gathered from, which are few: more, or warps, wait
_BLOCK = 2048  # gathered logits per step of the last launch
_WEIGHTLESS = tl.constexpr(-1.0e30)  # a logit that weighs nothing beside any higher one


@triton.jit
def _key(x):
    # float32 -> int32 in the same order, -0.0 as 0.0
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    # the float32 of a key
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _greedy_kernel(top_ptr, id_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _tops, _top, token_id, is_finite = merge_parts(top_ptr, id_ptr, row, num_parts, PARTS)
    tl.store(out_ptr + row, tl.where(is_finite, token_id, -1).to(tl.int64))


@triton.jit
def _narrow(low, high, above, pivots, sums, needed):
    # sums fall as pivots rise, since rounding is monotone too; low is known to do
    does = (sums >= needed) | (pivots == low)
    low = tl.max(tl.where(does, pivots, low), axis=0)
    high = tl.min(tl.where(does, high, pivots), axis=0)
    return low, high, tl.maximum(above, tl.max(tl.where(does, 0.0, sums), axis=0))


@triton.jit
def _pivots(low, high):
    return low + (high - low) * (tl.arange(0, 8) + 1) // 9


@triton.jit
def _bound_top_k(groups, num_kept, low, high):
    """Return a key that at least `num_kept` of the group maxima reach, or low."""
    keys, low, high = _key(groups), low.to(tl.int64), high.to(tl.int64)
    above = 0.0 * num_kept
    for _ in range(6):
        pivots = _pivots(low, high)
        reached = keys[None, :] >= pivots.to(tl.int32)[:, None]
        sums = tl.sum(tl.where(reached, 1.0, 0.0), axis=1)
        low, high, above = _narrow(low, high, above, pivots, sums, num_kept)
    return low.to(tl.int32)


@triton.jit
def _row_filters(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size):
    """Return how a row is filtered, and whether it has top-k."""
    top_k = tl.load(top_k_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    return tl.load(temperature_ptr + row), top_k, has_top_k, top_p, min_p


@triton.jit
def _below(weight, top, temperature):
    """Return a logit, top at most, below which all weigh less than `weight` whatever is rounded."""
    low = top + temperature * tl.log(weight) - 1e-3 * temperature - 1e-3
    return tl.minimum(low, top)


@triton.jit
def _range_pivots(low, high, top, PIVOTS: tl.constexpr):
    return low + (tl.minimum(high, top) - low) / PIVOTS * tl.arange(0, PIVOTS)


@triton.jit
def _narrowed_range(
    range_ptr, sum_ptr, row, top, needed, num_parts, PARTS: tl.constexpr, PIVOTS: tl.constexpr
):  # fmt: skip
    """Return the part of a range [low, high) between the last pivot from which on the weight is
    `needed` and the next one; low is taken to do.
    """
    low, high = tl.load(range_ptr + 2 * row), tl.load(range_ptr + 2 * row + 1)
    pivots = _range_pivots(low, high, top, PIVOTS)
    parts, at = tl.arange(0, PARTS), tl.arange(0, PIVOTS)
    sums = tl.load(
        sum_ptr + (row * num_parts + parts[:, None]) * PIVOTS + at[None, :],
        mask=parts[:, None] < num_parts, other=0.0,
    )  # fmt: skip
    does = (tl.sum(sums, axis=0) >= needed) | (at == 0)
    low = tl.max(tl.where(does, pivots, low), axis=0)
    return low, tl.min(tl.where(pivots > low, pivots, high), axis=0)


@triton.jit
def _range_kernel(
    logits_ptr, top_ptr, part_id_ptr, mass_ptr, group_ptr, last_range_ptr, last_sum_ptr,
    range_ptr, sum_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    row_stride, vocab_size: tl.constexpr, num_parts, num_groups,
    IS_FIRST: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """Write the range [low, high) of logits that holds a row's threshold, and a part's weight from
    each of its pivots on. That of top-k is bounded once, by one program. Min-p has no threshold to
    find: its range is empty, and all that it keeps lies above.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, has_top_k, top_p, min_p = _row_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size
    )
    if has_top_k & (part > 0):
        return
    tops, top, _id, is_finite = merge_parts(top_ptr, part_id_ptr, row, num_parts, PARTS)
    at = row * num_parts + part
    infinite = top * 0.0 + float("inf")
    low, high = -infinite, -infinite
    if is_finite & (temperature > 0.0):
        if has_top_k:
            high = infinite
            if IS_FIRST:
                each = tl.arange(0, GROUPS)
                groups = tl.load(
                    group_ptr + row * num_groups + each,
                    mask=each < num_groups, other=float("-inf"),
                )  # fmt: skip
                bound = _bound_top_k(groups, top_k.to(tl.float32), _key(low), _key(top) + 1)
                # what is forbidden is never kept, however few are left
                low = tl.maximum(_logit(bound), tl.minimum(top, _WEIGHTLESS))
            else:
                low = tl.load(last_range_ptr + 2 * row)
        elif top_p < 1.0:
            masses = row_masses(mass_ptr, row, tops, top, temperature, num_parts, PARTS)
            mass = tl.sum(masses, axis=0)
            if IS_FIRST:
                # all ids below this weight together are less than what top-p leaves out
                low = _below((1.0 - top_p) * mass / vocab_size, top, temperature)
                high = infinite
            else:
                low, high = _narrowed_range(
                    last_range_ptr, last_sum_ptr, row, top, top_p * mass, num_parts, PARTS, PIVOTS
                )
            sums = tl.zeros([PIVOTS], tl.float32)
            if tl.load(top_ptr + at) >= low:  # few parts of a masked or peaked row have any
                base = logits_ptr + row * row_stride
                x, _columns = load_logits(base, part * PART, vocab_size, PART)
                weight = tl.exp((x - top) / temperature)
                pivots = _range_pivots(low, high, top, PIVOTS)
                sums = tl.sum(tl.where(x[None, :] >= pivots[:, None], weight[None, :], 0.0), axis=1)
            tl.store(sum_ptr + at * PIVOTS + tl.arange(0, PIVOTS), sums)
        elif min_p > 0.0:
            low = _below(min_p, top, temperature)
            high = low
    if part == 0:
        tl.store(range_ptr + 2 * row, low)
        tl.store(range_ptr + 2 * row + 1, high)


@triton.jit
def _gather_kernel(
    logits_ptr, top_ptr, part_id_ptr, mass_ptr, group_ptr, last_range_ptr, last_sum_ptr,
    range_ptr, value_ptr, count_ptr, above_ptr, kept_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, table_ptr, state_ptr,
    row_stride, table_stride, vocab_size: tl.constexpr, num_parts,
    PARTS: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr,
    PIVOTS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Narrow a row's range for the last time and copy a part's logits in it. Write their number,
    the part's weight above the range, and how much of it min-p keeps.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    words = row_words(table_ptr, state_ptr, row, table_stride, HAS_MASK)
    temperature, _top_k, has_top_k, top_p, min_p = _row_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size
    )
    tops, top, _id, is_finite = merge_parts(top_ptr, part_id_ptr, row, num_parts, PARTS)
    if is_finite & (temperature > 0.0) & (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
        low, high = tl.load(last_range_ptr + 2 * row), tl.load(last_range_ptr + 2 * row + 1)
        is_hidden = (top_p < 1.0) & (has_top_k == 0)  # what the mask forbids, in place
        if is_hidden:
            masses = row_masses(mass_ptr, row, tops, top, temperature, num_parts, PARTS)
            needed = top_p * tl.sum(masses, axis=0)
            low, high = _narrowed_range(
                last_range_ptr, last_sum_ptr, row, top, needed, num_parts, PARTS, PIVOTS
            )
        at = row * num_parts + part
        groups: tl.constexpr = PART // GROUP
        each = tl.arange(0, groups)
        is_wanted = tl.load(group_ptr + at * groups + each) >= low
        nth_wanted = tl.cumsum(is_wanted.to(tl.int32), axis=0)
        num_wanted = tl.max(nth_wanted, axis=0)
        count, above, kept = part * 0, top * 0.0, (top * 0.0).to(tl.float64)
        done = part * 0
        while done < num_wanted:  # few groups of a part, mostly: as many at once as pays
            lines = tl.arange(0, AT_ONCE * (GROUP // 32))  # of 32 logits, with a word of the mask
            nth = done + lines // (GROUP // 32) + 1
            is_nth = is_wanted[None, :] & (nth_wanted[None, :] == nth[:, None])
            group = part * groups + tl.sum(tl.where(is_nth, each[None, :], 0), axis=1)
            line = group * (GROUP // 32) + lines % (GROUP // 32)
            columns = line[:, None] * 32 + tl.arange(0, 32)[None, :]
            is_there = (nth <= num_wanted)[:, None] & (columns < vocab_size)
            x = tl.load(
                logits_ptr + row * row_stride + columns, mask=is_there, other=float("-inf")
            ).to(tl.float32)
            if HAS_MASK and not is_hidden:
                x = hide_forbidden(x, words, line, (vocab_size + 31) // 32)
            weight = tl.where(x >= high, tl.exp((x - top) / temperature), 0.0)
            above += tl.sum(weight)
            kept += tl.sum(tl.where(weight >= min_p, weight, 0.0).to(tl.float64))
            x = tl.reshape(x, [AT_ONCE * GROUP])
            is_between = (x >= low) & (x < high) & tl.reshape(is_there, [AT_ONCE * GROUP])
            rank = tl.cumsum(is_between.to(tl.int32), axis=0)
            tl.store(value_ptr + at * PART + count + rank - 1, x, mask=is_between)
            count += tl.max(rank, axis=0)
            done += AT_ONCE
        tl.store(count_ptr + at, count)
        tl.store(above_ptr + at, above)
        tl.store(kept_ptr + at, kept)
        if part == 0:
            tl.store(range_ptr + 2 * row, low)
            tl.store(range_ptr + 2 * row + 1, high)


@triton.jit
def _load_gathered(
    value_ptr, counts, start, PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Return some columns of the gathered logits [PARTS, COLUMNS], and which there are."""
    columns = start + tl.arange(0, COLUMNS)
    is_there = columns[None, :] < counts[:, None]
    at = tl.arange(0, PARTS)[:, None] * PART + columns[None, :]
    return tl.load(value_ptr + at, mask=is_there, other=float("-inf")), is_there


@triton.jit
def _threshold(
    value_ptr, counts, low, high, above, needed, top, temperature,
    IS_MASS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the highest key t in [low, high) with measure(keys >= t) >= needed, and
    measure(keys > t). The measure is the weight, or the number of ids: `above` for those from high
    on, which are not gathered. Low is taken to do.
    """
    low, high, most = low.to(tl.int64), high.to(tl.int64), tl.max(counts, axis=0)
    outside = above
    while high - low > 1:
        pivots = _pivots(low, high)
        sums = tl.zeros([8], tl.float32)
        start = most * 0
        while start < most:
            x, is_there = _load_gathered(value_ptr, counts, start, PARTS, PART, COLUMNS)
            value = tl.where(is_there, 1.0, 0.0)
            if IS_MASS:
                value = tl.exp((x - top) / temperature)
            keys = tl.reshape(_key(x), [PARTS * COLUMNS])
            value = tl.reshape(value, [PARTS * COLUMNS])
            reached = keys[None, :] >= pivots.to(tl.int32)[:, None]
            sums += tl.sum(tl.where(reached, value[None, :], 0.0), axis=1)
            start += COLUMNS
        low, high, above = _narrow(low, high, above, pivots, outside + sums, needed)
    return low.to(tl.int32), above


@triton.jit
def _kept_parts(
    value_ptr, counts, top, temperature, min_p, key, num_ties,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the weight of what the filters keep of each part's gathered logits, and the number of
    ids at the threshold in the parts before.
    """
    masses, ties = tl.zeros([PARTS], tl.float64), tl.zeros([PARTS], tl.int32)
    start, most = num_ties * 0, tl.max(counts, axis=0)
    while start < most:
        x, is_there = _load_gathered(value_ptr, counts, start, PARTS, PART, COLUMNS)
        weight = tl.exp((x - top) / temperature)
        keys = _key(x)
        kept = tl.where((keys > key) & (weight >= min_p), weight, 0.0)
        masses += tl.sum(kept.to(tl.float64), axis=1)
        ties += tl.sum(((keys == key) & is_there).to(tl.int32), axis=1)
        start += COLUMNS
    before = tl.cumsum(ties, axis=0) - ties
    num_kept = tl.minimum(tl.maximum(num_ties - before, 0), ties)
    each = tl.exp((_logit(key) - top) / temperature)
    each = tl.where(each >= min_p, each, 0.0).to(tl.float64)
    return masses + num_kept.to(tl.float64) * each, before


@triton.jit
def _draw(
    base, words, masses, before, top, temperature, min_p, key, num_ties, u,
    vocab_size: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Return the id at u times the whole weight: its part by the parts' weights [PARTS], then the
    id in it. Kept are keys above `key`, and the first `num_ties` ids at it, of which `before` lie
    in the parts before each.
    """
    cdf = tl.cumsum(masses, axis=0)
    target = u * tl.max(cdf, axis=0)
    parts = tl.arange(0, PARTS)
    last = tl.max(tl.where(masses > 0.0, parts, 0), axis=0)
    part = tl.min(tl.where((cdf > target) & (masses > 0.0), parts, last), axis=0)
    mass = tl.sum(tl.where(parts < part, masses, 0.0), axis=0)
    seen = tl.sum(tl.where(parts == part, before, 0), axis=0)
    x, columns = load_masked(base, words, part * PART, vocab_size, PART, HAS_MASK)
    weight, keys = tl.exp((x - top) / temperature), _key(x)
    is_tied = (keys == key).to(tl.int32)
    kept = (keys > key) | ((is_tied > 0) & (seen + tl.cumsum(is_tied, axis=0) <= num_ties))
    weight = tl.where(kept & (weight >= min_p), weight, 0.0).to(tl.float64)
    cdf = mass + tl.cumsum(weight, axis=0)
    last = tl.max(tl.where(weight > 0.0, columns, 0), axis=0)  # rounding can leave the target high
    return tl.min(tl.where((cdf > target) & (weight > 0.0), columns, last), axis=0)


@triton.jit
def _uniform(seed, counter):
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, high, zero, zero)
    return word.to(tl.float64) * (1.0 / 4294967296.0)


@triton.jit
def _filtered(
    range_ptr, value_ptr, count_ptr, above_ptr, kept_ptr, row, mass, top, temperature,
    top_k, has_top_k, top_p, min_p, vocab_size: tl.constexpr, num_parts,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find a row's threshold among its gathered logits; `mass` is its whole weight. Return what of
    each part is kept, the ids at the threshold before it, the threshold's key and how many ids at
    it are kept.
    """
    key = _key(top * 0.0 + float("-inf"))  # of min-p alone
    num_ties = key * 0
    parts = tl.arange(0, PARTS)
    at, is_part = row * num_parts + parts, parts < num_parts
    counts = tl.load(count_ptr + at, mask=is_part, other=0)
    kept = tl.load(kept_ptr + at, mask=is_part, other=0.0)
    above = tl.sum(tl.load(above_ptr + at, mask=is_part, other=0.0), axis=0)
    low = _key(tl.load(range_ptr + 2 * row))
    high = tl.minimum(_key(tl.load(range_ptr + 2 * row + 1)), _key(top) + 1)
    value_ptr += row * num_parts * PART
    if has_top_k:
        key, above = _threshold(
            value_ptr, counts, low, high, above, top_k.to(tl.float32), top, temperature,
            False, PARTS, PART, COLUMNS,
        )  # fmt: skip
        num_ties = top_k - above.to(tl.int32)
        each, _before = _kept_parts(
            value_ptr, counts, top, temperature, 0.0, key, num_ties, PARTS, PART, COLUMNS
        )
        mass = tl.sum(each, axis=0).to(tl.float32)
        low, above = key, above * 0.0
    if top_p < 1.0:
        needed = top_p * mass
        p_key, above = _threshold(
            value_ptr, counts, low, high, above, needed, top, temperature,
            True, PARTS, PART, COLUMNS,
        )  # fmt: skip
        each_tie = tl.exp((_logit(p_key) - top) / temperature)
        ties = tl.ceil((needed - above) / tl.maximum(each_tie, 1e-38))
        ties = tl.maximum(tl.minimum(ties, 1.0 * vocab_size), 1.0).to(tl.int32)
        num_ties = tl.where(has_top_k & (p_key == key), tl.minimum(ties, num_ties), ties)
        key = p_key
    added, before = _kept_parts(
        value_ptr, counts, top, temperature, min_p, key, num_ties, PARTS, PART, COLUMNS
    )
    return kept + added, before, key, num_ties


@triton.jit
def _sample_kernel(
    logits_ptr, out_ptr, top_ptr, part_id_ptr, mass_ptr,
    range_ptr, value_ptr, count_ptr, above_ptr, kept_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, counter_ptr, table_ptr, state_ptr,
    row_stride, table_stride, vocab_size: tl.constexpr, num_parts,
    PARTS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr,
    IS_FILTERED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    words = row_words(table_ptr, state_ptr, row, table_stride, HAS_MASK)
    temperature, top_k, has_top_k, top_p, min_p = _row_filters(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocab_size
    )
    tops, top, token_id, is_finite = merge_parts(top_ptr, part_id_ptr, row, num_parts, PARTS)
    if is_finite & (temperature > 0.0):
        u = _uniform(tl.load(seed_ptr + row), tl.load(counter_ptr + row))
        masses = row_masses(mass_ptr, row, tops, top, temperature, num_parts, PARTS)
        mass = tl.sum(masses, axis=0)
        kept = masses.to(tl.float64)
        key = _key(top * 0.0 + float("-inf"))  # all that weigh anything are above
        num_ties, before = key * 0, tl.zeros([PARTS], tl.int32)
        if IS_FILTERED and (has_top_k | (top_p < 1.0) | (min_p > 0.0)):
            kept, before, key, num_ties = _filtered(
                range_ptr, value_ptr, count_ptr, above_ptr, kept_ptr, row, mass, top, temperature,
                top_k, has_top_k, top_p, min_p, vocab_size, num_parts, PARTS, PART, COLUMNS,
            )  # fmt: skip
        token_id = _draw(
            logits_ptr + row * row_stride, words, kept, before, top, temperature, min_p, key,
            num_ties, u, vocab_size, PARTS, PART, HAS_MASK,
        )  # fmt: skip
    tl.store(out_ptr + row, tl.where(is_finite, token_id, -1).to(tl.int64))


def greedy(logits: Tensor, masks: RowMasks | None = None) -> Tensor:
    """Return the id of each row's highest logit, int64 [num_rows]; ties go to the lowest id.

    logits: [num_rows, vocab_size]; ids that the masks forbid count as -inf. A row that has a NaN or
    no finite highest logit gives -1.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if out.numel():
        parts = launch_parts(logits, None, masks)
        launch(_greedy_kernel, (len(out),))(
            parts.tops, parts.ids, out, parts.count,
            PARTS=triton.next_power_of_2(parts.count), num_warps=1,
        )  # fmt: skip
    return out


def sample(logits: Tensor, rows: SamplingTensors, masks: RowMasks | None = None) -> Tensor:
    """Return one id per row, int64 [num_rows], by the rules of the runtime's sampler.

    logits: [num_rows, vocab_size], after penalties; ids that the masks forbid count as -inf. With
    filters they may be set to that in place: the logits are the sampler's from here on, but the
    same rows may be sampled from them again under the same masks. A row that has a NaN or no
    finite highest logit gives -1. With filters it takes scratch memory of 4 bytes a logit.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        parts = launch_parts(logits, rows, masks)
        gathered = _gather(logits, rows, masks, parts) if rows.is_filtered else _Gathered()
        table, states, table_stride = mask_arguments(masks)
        most = triton.next_power_of_2(parts.count)
        launch(_sample_kernel, (num_rows,))(
            logits, out, parts.tops, parts.ids, parts.masses, gathered.ranges, gathered.values,
            gathered.counts, gathered.above, gathered.kept, rows.temperature, rows.top_k,
            rows.top_p, rows.min_p, rows.seeds, rows.counters, table, states,
            logits.stride(0), table_stride, vocab_size, parts.count,
            PARTS=most, PART=parts.size, COLUMNS=min(parts.size, max(1, _BLOCK // most)),
            IS_FILTERED=rows.is_filtered, HAS_MASK=masks is not None, num_warps=4,
        )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Gathered:
    """What is known of the rows' thresholds before the last launch; nothing without filters."""

    ranges: Tensor | None = None  # float32 [num_rows, 2], of the logits that hold the threshold
    values: Tensor | None = None  # float32 [num_rows, num_parts, part], the logits in the range
    counts: Tensor | None = None  # int32 [num_rows, num_parts], of those
    above: Tensor | None = None  # float32 [num_rows, num_parts], weight above the range
    kept: Tensor | None = None  # float64 [num_rows, num_parts], what min-p keeps of that


def _gather(
    logits: Tensor, rows: SamplingTensors, masks: RowMasks | None, parts: Parts
) -> _Gathered:
    """Bound the rows' thresholds."""
    num_rows, vocab_size = logits.shape
    tops, ids, masses = parts.tops, parts.ids, parts.masses
    num_groups, most = parts.count * parts.size // GROUP, triton.next_power_of_2(parts.count)
    ranges = [tops.new_empty(num_rows, 2) for _ in range(3)]
    sums = [tops.new_empty(num_rows, parts.count, _PIVOTS) for _ in range(2)]
    table, states, table_stride = mask_arguments(masks)
    filters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    grid = (num_rows, parts.count)
    for i in range(2):
        launch(_range_kernel, grid)(
            logits, tops, ids, masses, parts.groups, ranges[i - 1], sums[i - 1], ranges[i], sums[i],
            *filters, logits.stride(0), vocab_size, parts.count, num_groups,
            IS_FIRST=i == 0, PARTS=most, PART=parts.size, GROUPS=triton.next_power_of_2(num_groups),
            PIVOTS=_PIVOTS, num_warps=8,
        )  # fmt: skip
    gathered = _Gathered(
        ranges[2],
        tops.new_empty(num_rows, parts.count, parts.size),
        torch.empty_like(ids),
        torch.empty_like(tops),
        torch.empty_like(tops, dtype=torch.float64),
    )
    launch(_gather_kernel, grid)(
        logits, tops, ids, masses, parts.groups, ranges[1], sums[1],
        gathered.ranges, gathered.values, gathered.counts, gathered.above, gathered.kept,
        *filters, table, states, logits.stride(0), table_stride, vocab_size, parts.count,
        PARTS=most, PART=parts.size, GROUP=GROUP, AT_ONCE=min(_GROUPS_AT_ONCE, parts.size // GROUP),
        PIVOTS=_PIVOTS, HAS_MASK=masks is not None, num_warps=1,
    )  # fmt: skip
    return gathered
