"""Sampling: greedy, or temperature, top-k, top-p, min-p and inverse CDF, in two launches.

A row's result depends on that row alone. Filters rank ids by (falling logit, rising id) and keep a
first part of that order, so each comes down to a threshold logit and a number of ids that share it.

The first launch reads the logits once, in parts: each part's highest logit, its weight, and the
highest of every 64 logits. The second, one program per row, draws at once where there is no filter.
Else it bounds the threshold from below by what the first left, gathers the few ids above the bound
(in id order), and narrows an interval of logits with eight pivots a pass until the threshold is
exact; nothing is sorted. The random number is the first word of Philox4x32-10 with the row's seed
as its key and the row's counter as its counter, times 2**-32.

Packed masks are applied where logits are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling_tensors import RowMasks, SamplingTensors

_PART = 4096  # logits per program of the first launch
_GROUP = 64  # logits that share one recorded maximum
_BLOCK = 2048  # gathered ids per step of the second


@triton.jit
def _key(x):
    # float32 -> int32 in the same order, -0.0 as 0.0
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(base, start, length, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(base + columns, mask=columns < length, other=float("-inf"))
    return x.to(tl.float32), columns


@triton.jit
def _load_logits(base, words, start, length, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr):
    """Load logits, those that `words` masks out as -inf, but for NaN."""
    x, columns = _load(base, start, length, BLOCK)
    if HAS_MASK:
        # one word for 32 neighbours; all logits are loaded, since one load a lane would take longer
        at = start // 32 + tl.arange(0, BLOCK // 32)
        word = tl.load(words + at, mask=at < (length + 31) // 32, other=0)
        allowed = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
        x = tl.where((tl.reshape(allowed, [BLOCK]) != 0) | (x != x), x, float("-inf"))
    return x, columns


@triton.jit
def _parts_kernel(
    logits_ptr, top_ptr, id_ptr, temperature_ptr, mass_ptr, group_ptr, table_ptr, state_ptr,
    row_stride, table_stride, vocab_size: tl.constexpr, num_parts,
    PART: tl.constexpr, GROUP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Write a part's highest logit (NaN if it has a NaN) and its lowest id; for sampling also its
    weight relative to that logit, and the maxima of its groups.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * num_parts + part
    words = table_ptr
    if HAS_MASK:
        words += tl.load(state_ptr + row).to(tl.int64) * table_stride
    base = logits_ptr + row * row_stride
    x, columns = _load_logits(base, words, part * PART, vocab_size, PART, HAS_MASK)
    top = tl.max(x, axis=0)
    tl.store(id_ptr + at, tl.min(tl.where(x == top, columns, vocab_size), axis=0))
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    tl.store(top_ptr + at, tl.where(has_nan, float("nan"), top))
    if HAS_WEIGHTS:
        temperature = tl.load(temperature_ptr + row)
        safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp((x - safe) / tl.where(temperature > 0.0, temperature, 1.0))
        tl.store(mass_ptr + at, tl.sum(weights, axis=0))
        groups: tl.constexpr = PART // GROUP
        maxima = tl.max(tl.reshape(x, [groups, GROUP]), axis=1)
        tl.store(group_ptr + at * groups + tl.arange(0, groups), maxima)


@triton.jit
def _merge_parts(top_ptr, id_ptr, row, num_parts, PARTS: tl.constexpr):
    """Return the parts' highest logits, the row's, its lowest id, and whether it can be sampled."""
    parts = tl.arange(0, PARTS)
    mask = parts < num_parts
    tops = tl.load(top_ptr + row * num_parts + parts, mask=mask, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_parts + parts, mask=mask, other=0)
    top = tl.max(tops, axis=0)
    has_nan = tl.max((tops != tops).to(tl.int32), axis=0) > 0
    is_finite = (top > float("-inf")) & (top < float("inf")) & (has_nan == 0)
    token_id = tl.min(tl.where(tops == top, ids, 2147483647), axis=0)
    return tops, top, token_id, is_finite


@triton.jit
def _greedy_kernel(top_ptr, id_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _tops, _top, token_id, is_finite = _merge_parts(top_ptr, id_ptr, row, num_parts, PARTS)
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
def _gather_above(
    base, words, value_ptr, id_ptr, bound,
    vocab_size: tl.constexpr, PART: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Copy the logits whose key reaches `bound`, and their ids, in order; return their number."""
    count = bound * 0
    for start in range(0, vocab_size, PART):
        x, columns = _load_logits(base, words, start, vocab_size, PART, HAS_MASK)
        wanted = (_key(x) >= bound) & (columns < vocab_size)
        rank = tl.cumsum(wanted.to(tl.int32), axis=0)
        at = count + rank - 1
        tl.store(value_ptr + at, x, mask=wanted)
        tl.store(id_ptr + at, columns, mask=wanted)
        count += tl.max(rank, axis=0)
    tl.debug_barrier()  # other threads of this program read them next
    return count


@triton.jit
def _threshold(
    value_ptr, count, low, high, needed, top, temperature,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the highest key t in [low, high) with measure(keys >= t) >= needed, and
    measure(keys > t). The measure is the weight, or the number of ids; low is taken to do.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    above = needed * 0.0
    while high - low > 1:
        pivots = _pivots(low, high)
        sums = tl.zeros([8], tl.float32)
        start = count * 0
        while start < count:
            x, columns = _load(value_ptr, start, count, BLOCK)
            value = tl.where(columns < count, 1.0, 0.0)
            if MASS:
                value = tl.exp((x - top) / temperature)
            reached = _key(x)[None, :] >= pivots.to(tl.int32)[:, None]
            sums += tl.sum(tl.where(reached, value[None, :], 0.0), axis=1)
            start += BLOCK
        low, high, above = _narrow(low, high, above, pivots, sums, needed)
    return low.to(tl.int32), above


@triton.jit
def _kept_weights(
    value_ptr, start, count, top, temperature, min_p, key, num_ties, seen, BLOCK: tl.constexpr
):  # fmt: skip
    """Return one block's weights after the filters, and how many ids at the threshold it has."""
    x, columns = _load(value_ptr, start, count, BLOCK)
    weight = tl.exp((x - top) / temperature)
    keys = _key(x)
    tied = ((keys == key) & (columns < count)).to(tl.int32)
    kept = (keys > key) | ((tied > 0) & (seen + tl.cumsum(tied, axis=0) <= num_ties))
    weight = tl.where(kept & (weight >= min_p), weight, 0.0).to(tl.float64)
    return weight, columns, tl.sum(tied, axis=0)


@triton.jit
def _kept_mass(value_ptr, count, top, temperature, min_p, key, num_ties, BLOCK: tl.constexpr):
    """Return the weight of all that the filters keep, and the place of the last of them."""
    total = (top * 0.0).to(tl.float64)
    seen, last, start = count * 0, count * 0, count * 0
    while start < count:
        weight, columns, num_tied = _kept_weights(
            value_ptr, start, count, top, temperature, min_p, key, num_ties, seen, BLOCK
        )
        total += tl.sum(weight, axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, columns, 0), axis=0))
        seen += num_tied
        start += BLOCK
    return total, last


@triton.jit
def _draw(value_ptr, count, top, temperature, min_p, key, num_ties, u, BLOCK: tl.constexpr):
    """Return the first place whose cumulative weight exceeds u times the whole."""
    total, last = _kept_mass(value_ptr, count, top, temperature, min_p, key, num_ties, BLOCK)
    target = u * total
    before = u * 0.0
    seen, start = count * 0, count * 0
    found = count
    while (found == count) & (start < count):
        weight, columns, num_tied = _kept_weights(
            value_ptr, start, count, top, temperature, min_p, key, num_ties, seen, BLOCK
        )
        cdf = before + tl.cumsum(weight, axis=0)
        found = tl.min(tl.where((cdf > target) & (weight > 0.0), columns, count), axis=0)
        before += tl.sum(weight, axis=0)
        seen += num_tied
        start += BLOCK
    return tl.minimum(found, last)  # rounding can leave the target a little too high


@triton.jit
def _draw_unfiltered(
    base, words, masses, tops, top, temperature, u, vocab_size: tl.constexpr,
    PARTS: tl.constexpr, PART: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Find the part that the target falls into, then the id in it."""
    cdf = tl.cumsum(masses, axis=0)
    target = u * tl.max(cdf, axis=0)
    parts = tl.arange(0, PARTS)
    last = tl.max(tl.where(masses > 0.0, parts, 0), axis=0)
    part = tl.min(tl.where((cdf > target) & (masses > 0.0), parts, last), axis=0)
    before = tl.sum(tl.where(parts < part, masses, 0.0), axis=0)
    x, columns = _load_logits(base, words, part * PART, vocab_size, PART, HAS_MASK)
    weight = tl.exp((x - top) / temperature).to(tl.float64)
    cdf = before + tl.cumsum(weight, axis=0)
    last = tl.max(tl.where(weight > 0.0, columns, 0), axis=0)
    return tl.min(tl.where((cdf > target) & (weight > 0.0), columns, last), axis=0)


@triton.jit
def _uniform(seed, counter):
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(seed, low, high, zero, zero)
    return word.to(tl.float64) * (1.0 / 4294967296.0)


@triton.jit
def _sample_kernel(
    logits_ptr, out_ptr, top_ptr, part_id_ptr, mass_ptr, group_ptr, value_ptr, id_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, counter_ptr, table_ptr, state_ptr,
    row_stride, table_stride, vocab_size: tl.constexpr, num_parts, num_groups,
    PARTS: tl.constexpr, PART: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * row_stride
    words = table_ptr
    if HAS_MASK:
        words += tl.load(state_ptr + row).to(tl.int64) * table_stride
    value_ptr += row * vocab_size
    id_ptr += row * vocab_size
    temperature = tl.load(temperature_ptr + row)
    tops, top, token_id, is_finite = _merge_parts(top_ptr, part_id_ptr, row, num_parts, PARTS)
    if is_finite & (temperature > 0.0):
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        u = _uniform(tl.load(seed_ptr + row), tl.load(counter_ptr + row))
        parts = tl.arange(0, PARTS)
        masses = tl.load(mass_ptr + row * num_parts + parts, mask=parts < num_parts, other=0.0)
        masses = masses * tl.exp((tops - top) / temperature)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        if has_top_k | (top_p < 1.0) | (min_p > 0.0):
            lowest, high = _key(top * 0.0 + float("-inf")), _key(top) + 1
            bound, num_ties = lowest, lowest * 0 + vocab_size
            mass = tl.sum(masses, axis=0)
            if has_top_k:
                at = tl.arange(0, GROUPS)
                groups = tl.load(
                    group_ptr + row * num_groups + at, mask=at < num_groups, other=float("-inf")
                )
                bound = _bound_top_k(groups, top_k.to(tl.float32), lowest, high)
            else:
                # all ids below this weight together are less than what top-p leaves out
                least = tl.where(top_p < 1.0, (1.0 - top_p) * mass / vocab_size, min_p)
                bound = _key(top + temperature * tl.log(least) - 1e-3 * temperature - 1e-3)
                bound = tl.minimum(bound, high - 1)
            count = _gather_above(base, words, value_ptr, id_ptr, bound, vocab_size, PART, HAS_MASK)
            key = bound - 1
            if has_top_k:
                key, above = _threshold(
                    value_ptr, count, bound, high, top_k.to(tl.float32), top, temperature,
                    False, BLOCK,
                )  # fmt: skip
                num_ties = top_k - above.to(tl.int32)
                kept, _last = _kept_mass(
                    value_ptr, count, top, temperature, 0.0, key, num_ties, BLOCK
                )
                mass = kept.to(tl.float32)
            if top_p < 1.0:
                needed = top_p * mass
                p_key, above = _threshold(
                    value_ptr, count, tl.maximum(key, bound), high, needed, top, temperature,
                    True, BLOCK,
                )  # fmt: skip
                bits = p_key ^ ((p_key >> 31) & 0x7FFFFFFF)
                each = tl.exp((bits.to(tl.float32, bitcast=True) - top) / temperature)
                ties = tl.ceil((needed - above) / tl.maximum(each, 1e-38))
                ties = tl.maximum(tl.minimum(ties, 1.0 * vocab_size), 1.0).to(tl.int32)
                num_ties = tl.where(p_key > key, ties, tl.minimum(ties, num_ties))
                key = p_key
            place = _draw(value_ptr, count, top, temperature, min_p, key, num_ties, u, BLOCK)
            token_id = tl.load(id_ptr + place)
        else:
            token_id = _draw_unfiltered(
                base, words, masses.to(tl.float64), tops, top, temperature, u, vocab_size,
                PARTS, PART, HAS_MASK,
            )  # fmt: skip
    tl.store(out_ptr + row, tl.where(is_finite, token_id, -1).to(tl.int64))


def _launch_parts(
    logits: Tensor, temperature: Tensor | None, masks: RowMasks | None
) -> tuple[int, int, Tensor, Tensor, Tensor | None, Tensor | None]:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "the rows are not contiguous"
    part = max(_GROUP, min(_PART, triton.next_power_of_2(vocab_size)))
    num_parts = triton.cdiv(vocab_size, part)
    tops = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    masses = groups = None
    if temperature is not None:
        masses = torch.empty_like(tops)
        groups = tops.new_empty(num_rows, num_parts * part // _GROUP)
    table, states, table_stride = _mask_arguments(masks)
    _parts_kernel[(num_rows, num_parts)](
        logits, tops, ids, temperature, masses, groups, table, states,
        logits.stride(0), table_stride, vocab_size, num_parts,
        PART=part, GROUP=_GROUP, HAS_WEIGHTS=temperature is not None, HAS_MASK=masks is not None,
        num_warps=8,
    )  # fmt: skip
    return part, num_parts, tops, ids, masses, groups


def _mask_arguments(masks: RowMasks | None) -> tuple[Tensor | None, Tensor | None, int]:
    if masks is None:
        return None, None, 0
    assert masks.table.stride(1) == 1, "the masks are not contiguous"
    return masks.table, masks.states, masks.table.stride(0)


def greedy(logits: Tensor, masks: RowMasks | None = None) -> Tensor:
    """Return the id of each row's highest logit, int64 [num_rows]; ties go to the lowest id.

    logits: [num_rows, vocab_size]; ids that the masks forbid count as -inf. A row that has a NaN or
    no finite highest logit gives -1.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if out.numel():
        _part, num_parts, tops, ids, _masses, _groups = _launch_parts(logits, None, masks)
        _greedy_kernel[(len(out),)](
            tops, ids, out, num_parts, PARTS=triton.next_power_of_2(num_parts), num_warps=1
        )
    return out


def sample(logits: Tensor, rows: SamplingTensors, masks: RowMasks | None = None) -> Tensor:
    """Return one id per row, int64 [num_rows], by the rules of the runtime's sampler.

    logits: [num_rows, vocab_size], after penalties; ids that the masks forbid count as -inf. A row
    that has a NaN or no finite highest logit gives -1. Takes scratch memory of 8 bytes a logit.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        part, num_parts, tops, ids, masses, groups = _launch_parts(logits, rows.temperature, masks)
        num_groups = num_parts * part // _GROUP
        gathered = tops.new_empty(num_rows, vocab_size)
        gathered_ids = ids.new_empty(num_rows, vocab_size)
        table, states, table_stride = _mask_arguments(masks)
        _sample_kernel[(num_rows,)](
            logits, out, tops, ids, masses, groups, gathered, gathered_ids,
            rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.counters,
            table, states, logits.stride(0), table_stride, vocab_size, num_parts, num_groups,
            PARTS=triton.next_power_of_2(num_parts), PART=part,
            GROUPS=triton.next_power_of_2(num_groups), BLOCK=min(_BLOCK, part),
            HAS_MASK=masks is not None, num_warps=8,
        )  # fmt: skip
    return out
