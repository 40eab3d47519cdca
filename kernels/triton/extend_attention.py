"""Extend attention: new tokens over their prefix and themselves, causal or under a mask.

One program per item and KV head: the heads of a group for several new tokens fill a tile, so K
and V are read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paged_attention import AttentionLayout, AttentionShape
from .attention_tile import (
    HIDDEN,
    LOWEST,
    Partials,
    accumulate,
    attend,
    check_strides,
    load_rows,
    load_slots,
    num_lanes,
    softmax_scale,
    store_rows,
)
from .extend_work import ITEM, ExtendWork, extend_work
from .launch import launch, overlap
from .work_buffer import WorkBuffer

IntArray = npt.NDArray[np.int64]

_ITEM = tl.constexpr(ITEM)


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    """The shape of an extend kernel: packed rows, slots per block, pipeline depth."""

    rows: int
    block: int
    stages: int
    num_warps: int
    programs_per_sm: int


@triton.jit
def extend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, weight_ptr,
    slots_ptr, items_ptr, places_ptr, mask_ptr,
    q_token, q_head, cache_slot, cache_head, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HAS_MASK: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Run one item for one KV head; an item of no tokens pads a captured grid."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) % KV_HEADS
    item_ptr = items_ptr + tl.program_id(0) // KV_HEADS * _ITEM
    num_tokens = tl.load(item_ptr + 4)
    if num_tokens > 0:
        slots_ptr += tl.load(item_ptr)
        start = tl.load(item_ptr + 1)
        stop = tl.load(item_ptr + 2)
        first_token = tl.load(item_ptr + 3)
        sees = tl.load(item_ptr + 5)
        first_place = tl.load(item_ptr + 6)
        packed = tl.arange(0, ROWS)
        member = packed // GROUP
        valid = member < num_tokens
        is_partial = first_place >= 0
        partial = tl.load(places_ptr + first_place + member, mask=valid & is_partial, other=0)
        token = first_token + member
        heads = head * GROUP + packed % GROUP
        columns = tl.arange(0, BLOCK_D)
        q = load_rows(q_ptr, token, heads, valid, q_token, q_head, columns, HEAD_DIM)
        base = head.to(tl.int64) * cache_head
        k_base, v_base = k_ptr + base, v_ptr + base
        highest = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        # whole blocks that every row sees, then those that the diagonal or the mask cuts
        open_stop = tl.minimum(sees, stop)
        if HAS_MASK:
            mask_at = tl.load(item_ptr + 7) + member * tl.load(item_ptr + 8)
            is_masked = tl.load(item_ptr + 8) > 0
            open_stop = tl.where(is_masked, tl.minimum(tl.load(item_ptr + 9), stop), open_stop)
        middle = start + tl.maximum(open_stop - start, 0) // BLOCK * BLOCK
        highest, total, acc = attend(
            q, k_base, v_base, slots_ptr, cache_slot, columns, start, middle, scale,
            highest, total, acc, HEAD_DIM, BLOCK_D, BLOCK, STAGES, True,
        )  # fmt: skip
        for at in tl.range(middle, stop, BLOCK, num_stages=STAGES):
            kv = at + tl.arange(0, BLOCK)
            offsets = tl.load(slots_ptr + tl.minimum(kv, stop - 1)).to(tl.int64) * cache_slot
            k = load_slots(k_base, offsets, columns, HEAD_DIM, BLOCK_D)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            visible = kv[None, :] < tl.minimum(sees + member, stop)[:, None]
            if HAS_MASK:
                ruled = valid[:, None] & (kv >= open_stop)[None, :] & (kv < stop)[None, :]
                rule = tl.load(
                    mask_ptr + mask_at[:, None] + kv[None, :], mask=ruled & is_masked, other=0
                )
                visible = tl.where(is_masked, (kv < open_stop)[None, :] | (rule != 0), visible)
            scores = tl.where(visible, scores, HIDDEN)
            v = load_slots(v_base, offsets, columns, HEAD_DIM, BLOCK_D)
            highest, total, acc = accumulate(scores, v, highest, total, acc, scale)
        store_rows(
            highest, total, acc, out_ptr, partial_ptr, weight_ptr, token, partial, heads,
            valid, KV_HEADS * GROUP, columns, HEAD_DIM, is_partial,
        )  # fmt: skip


def extend_tiles(shape: AttentionShape, max_q_len: int) -> ExtendTiles:
    """Return the tiles for these layers, as measured on an H200 (docs/benchmarks-gpu.md)."""
    row_bytes = triton.next_power_of_2(shape.head_dim) * shape.dtype.itemsize
    if row_bytes > 256:
        return ExtendTiles(64, 32, 3, num_warps=4, programs_per_sm=1)
    if is_short(shape, max_q_len):
        return ExtendTiles(64, 64, 5, num_warps=4, programs_per_sm=2)
    return ExtendTiles(128, 64, 5, num_warps=8, programs_per_sm=1)


def is_short(shape: AttentionShape, max_q_len: int) -> bool:
    """Whether so many new tokens leave half of a large tile empty: their pass is bound by reads."""
    return max_q_len * (shape.num_heads // shape.num_kv_heads) <= 64


class ExtendAttention:
    """New tokens of several sequences: up to `max_tokens` of up to `max_seqs`.

    `max_mask` is the number of bytes that masks take: q_len times the columns that not every row
    sees, for each. `max_q_len` chooses the tiles: those for sequences of so many new tokens. All
    device memory is taken here. With `is_captured` the grids have the largest size that these
    bounds allow, so a graph that captured `run` runs whatever is planned later; without it they
    have the size of the plan.
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_seqs: int,
        max_tokens: int,
        max_slots: int,
        max_mask: int = 0,
        *,
        max_q_len: int | None = None,
        is_captured: bool = False,
        tiles: ExtendTiles | None = None,
    ) -> None:
        assert shape.num_heads % shape.num_kv_heads == 0, "query heads are no multiple of KV heads"
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        self._tiles = tiles or extend_tiles(shape, max_q_len or max_tokens)
        assert self._tiles.rows >= self._group, "a tile holds the heads of a group"
        self._tile_tokens = self._tiles.rows // self._group
        self._lanes = lanes = num_lanes(shape, self._tiles.programs_per_sm)
        self._is_captured = is_captured
        # tiles are split only where there are fewer than lanes, and then add one item for each
        self._max_items = max_tokens // self._tile_tokens + max_seqs + lanes
        self._partials = Partials(2 * lanes * self._tile_tokens, shape)
        self._work = WorkBuffer(
            {
                "merge": 3 * min(max_tokens, len(self._partials)),
                "places": len(self._partials),
                "items": ITEM * self._max_items,
                "mask": -(-max_mask // 4),
                "slots": max_slots,
            },
            shape.device,
        )
        self._planned: ExtendWork | None = None

    def plan(self, layout: AttentionLayout, members: IntArray | None = None) -> None:
        """Plan one pass for the sequences of `layout`, or for `members` of them.

        Raises ValueError where the pass needs more than this object was made for.
        """
        if members is None:
            members = np.arange(len(layout.query_indptr) - 1)
        work = extend_work(
            layout, members, tile_tokens=self._tile_tokens, block=self._tiles.block,
            lanes=self._lanes,
        )  # fmt: skip
        arrays = work.arrays
        if self._is_captured:
            self._work.check(arrays)
            # what the last plan left behind this one's end must do nothing
            arrays = arrays | self._nothing()
            for name in ("items", "merge"):
                arrays[name][: len(work.arrays[name])] = work.arrays[name]
        self._work.send(arrays)
        self._planned = work

    def plan_nothing(self) -> None:
        """Plan a pass without sequences: run from a graph, it leaves every row alone."""
        assert self._is_captured, "without a graph, don't run it"
        self._work.send(self._nothing())

    def _nothing(self) -> dict[str, IntArray]:
        items, merges = ITEM * self._max_items, self._work.room("merge")
        return {"items": np.zeros(items, np.int64), "merge": np.full(merges, -1, np.int64)}

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return the attention output; shapes as in `AttentionPlan.run`."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.run_into(out, q, k_cache, v_cache)
        return out

    def run_into(self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Write the planned rows of `out`, which is contiguous."""
        shape, tiles, work, partials = self._shape, self._tiles, self._work, self._partials
        check_strides(q, k_cache, v_cache)
        if self._is_captured:
            num_items, num_merges = self._max_items, work.room("merge") // 3
            has_mask = work.room("mask") > 0
        else:
            planned = self._planned
            assert planned is not None, "nothing is planned"
            num_items, num_merges = planned.num_items, planned.num_merges
            has_mask = planned.has_mask
        launch(extend_kernel, (num_items * shape.num_kv_heads,))(
            q, k_cache, v_cache, out, partials.out, partials.weights,
            work["slots"], work["items"], work["places"], work["mask"].view(torch.uint8),
            q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
            softmax_scale(shape.head_dim),
            KV_HEADS=shape.num_kv_heads, GROUP=self._group,
            HEAD_DIM=shape.head_dim, BLOCK_D=triton.next_power_of_2(shape.head_dim),
            ROWS=tiles.rows, BLOCK=tiles.block, STAGES=tiles.stages, HAS_MASK=has_mask,
            num_warps=tiles.num_warps, **overlap(shape.device, False),
        )  # fmt: skip
        if num_merges:
            partials.merge(out, work["merge"], num_merges)
