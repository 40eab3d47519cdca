"""The first launch of sampling: a row's logits in parts, one program each, and what it finds there.

Also how the later launches read logits and what is known of the parts. Packed masks are applied
where logits are read, or once and for all where the launches to come read them again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling_tensors import RowMasks, SamplingTensors
from .launch import launch

GROUP = 64  # logits that share one recorded maximum
_PART = 4096  # logits per program


@triton.jit
def load_logits(base, start, length, BLOCK: tl.constexpr):
    """Return logits as float32, -inf from `length` on, and their columns."""
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(base + columns, mask=columns < length, other=float("-inf"))
    return x.to(tl.float32), columns


@triton.jit
def row_words(table_ptr, state_ptr, row, table_stride, HAS_MASK: tl.constexpr):
    """Return where a row's mask begins."""
    words = table_ptr
    if HAS_MASK:
        words += tl.load(state_ptr + row).to(tl.int64) * table_stride
    return words


@triton.jit
def hide_forbidden(x, words, at, num_words):
    """Return logits [lines, 32], those that the lines' words mask out as -inf, but for NaN."""
    word = tl.load(words + at, mask=at < num_words, other=0)
    bit = (word[:, None] >> tl.arange(0, 32)[None, :]) & 1
    return tl.where((bit != 0) | (x != x), x, float("-inf"))


@triton.jit
def load_masked(
    base, words, start, length, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr
):  # fmt: skip
    """Load logits, those that `words` masks out as -inf, but for NaN."""
    x, columns = load_logits(base, start, length, BLOCK)
    if HAS_MASK:
        # one word for 32 neighbours; all logits are loaded, since one load a lane would take longer
        lines = start // 32 + tl.arange(0, BLOCK // 32)
        x = hide_forbidden(tl.reshape(x, [BLOCK // 32, 32]), words, lines, (length + 31) // 32)
        x = tl.reshape(x, [BLOCK])
    return x, columns


@triton.jit
def _hide(base, x, words, start, length, BLOCK: tl.constexpr):
    """Write masked logits back: all 32 of a word that forbids any, since one by one is slower."""
    lines = start // 32 + tl.arange(0, BLOCK // 32)
    word = tl.load(words + lines, mask=lines < (length + 31) // 32, other=0)
    columns = lines[:, None] * 32 + tl.arange(0, 32)[None, :]
    is_written = (word != -1)[:, None] & (columns < length)
    tl.store(base + columns, tl.reshape(x, [BLOCK // 32, 32]), mask=is_written)


@triton.jit
def _parts_kernel(
    logits_ptr, top_ptr, id_ptr, temperature_ptr, top_k_ptr, top_p_ptr, mass_ptr, group_ptr,
    table_ptr, state_ptr, row_stride, table_stride, vocab_size: tl.constexpr, num_parts,
    PART: tl.constexpr, GROUP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, IS_FILTERED: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Write a part's highest logit (NaN if it has a NaN) and its lowest id; for sampling also its
    weight relative to that logit, and the maxima of its groups. In a row with top-p alone, whose
    weights are summed again and again, forbidden logits are -inf in place from here on.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * num_parts + part
    words = row_words(table_ptr, state_ptr, row, table_stride, HAS_MASK)
    base = logits_ptr + row * row_stride
    x, columns = load_masked(base, words, part * PART, vocab_size, PART, HAS_MASK)
    if IS_FILTERED and HAS_MASK:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        if (top_p < 1.0) & ((top_k <= 0) | (top_k >= vocab_size)):
            _hide(base, x, words, part * PART, vocab_size, PART)
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
def merge_parts(top_ptr, id_ptr, row, num_parts, PARTS: tl.constexpr):
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
def row_masses(mass_ptr, row, tops, top, temperature, num_parts, PARTS: tl.constexpr):
    """Return the parts' weights relative to the row's highest logit."""
    parts = tl.arange(0, PARTS)
    masses = tl.load(mass_ptr + row * num_parts + parts, mask=parts < num_parts, other=0.0)
    return masses * tl.exp((tops - top) / temperature)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the first launch found in each row's parts; the last two only for sampling."""

    size: int  # logits of a part
    count: int  # parts of a row
    tops: Tensor  # float32 [num_rows, count], highest logits
    ids: Tensor  # int32 [num_rows, count], the lowest of those
    masses: Tensor | None  # float32 [num_rows, count], weights relative to the part's highest logit
    groups: Tensor | None  # float32 [num_rows, count * size / GROUP], highest of each GROUP logits


def launch_parts(logits: Tensor, rows: SamplingTensors | None, masks: RowMasks | None) -> Parts:
    """Look at all logits once: for sampling as the rows say, or for greedy.

    In rows with top-p alone what the masks forbid is -inf in place from here on; a NaN stays one.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "the rows are not contiguous"
    size = max(GROUP, min(_PART, triton.next_power_of_2(vocab_size)))
    count = triton.cdiv(vocab_size, size)
    tops = torch.empty(num_rows, count, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, count, dtype=torch.int32, device=logits.device)
    masses = groups = None
    if rows is not None:
        masses = torch.empty_like(tops)
        groups = tops.new_empty(num_rows, count * size // GROUP)
    table, states, table_stride = mask_arguments(masks)
    filters: Sequence[Tensor | None] = (None, None, None)
    if rows is not None:
        filters = (rows.temperature, rows.top_k, rows.top_p)
    launch(_parts_kernel, (num_rows, count))(
        logits, tops, ids, *filters, masses, groups, table, states,
        logits.stride(0), table_stride, vocab_size, count,
        PART=size, GROUP=GROUP, HAS_WEIGHTS=rows is not None,
        IS_FILTERED=rows is not None and rows.is_filtered, HAS_MASK=masks is not None, num_warps=4,
    )  # fmt: skip
    return Parts(size, count, tops, ids, masses, groups)


def mask_arguments(masks: RowMasks | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Return the table, the states and the table's stride, as kernels take them."""
    if masks is None:
        return None, None, 0
    assert masks.table.stride(1) == 1, "the masks are not contiguous"
    return masks.table, masks.states, masks.table.stride(0)
