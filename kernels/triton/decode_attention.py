"""Decode attention, flat and tree, in two launches that a graph can capture.

The first runs a fixed number of programs; each takes its lane's items from a work list and reads a
stretch of slots for the sequences that share them. The second merges what several items left of
one row. Flat attention and any tree are the same launches over different lists, so one captured
graph serves both, and the grids depend on no length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..paged_attention import AttentionLayout, AttentionShape
from .attention_tile import (
    LOWEST,
    Partials,
    attend,
    check_strides,
    load_rows,
    num_lanes,
    softmax_scale,
    store_rows,
)
from .decode_work import ITEM, DecodeTiles, decode_work
from .kv_nodes import KVNodes, TileCosts, flat_nodes, shared_nodes
from .launch import launch, overlap
from .work_buffer import WorkBuffer

IntArray = npt.NDArray[np.int64]

_ITEM = tl.constexpr(ITEM)
_GROW_BLOCK = 128
_TREE_PARTIALS = 4  # per sequence, beside those that the cuts between lanes make


@triton.jit
def _load_item(at):
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _decode_tile(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, weight_ptr, slots_ptr, rows_ptr, places_ptr, head,
    start, length, first_row, num_rows, first_place,
    q_token, q_head, cache_slot, cache_head, num_heads, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    packed = tl.arange(0, ROWS)
    member = packed // GROUP
    valid = member < num_rows
    columns = tl.arange(0, BLOCK_D)
    is_partial = first_place >= 0
    token = tl.load(rows_ptr + first_row + member, mask=valid, other=0)
    partial = tl.load(places_ptr + first_place + member, mask=valid & is_partial, other=0)
    heads = head * GROUP + packed % GROUP
    q = load_rows(q_ptr, token, heads, valid, q_token, q_head, columns, HEAD_DIM)
    base = head.to(tl.int64) * cache_head
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    highest, total, acc = attend(
        q, k_ptr + base, v_ptr + base, slots_ptr + start, cache_slot, columns, 0, length, scale,
        highest, total, acc, HEAD_DIM, BLOCK_D, BLOCK, STAGES, False,
    )  # fmt: skip
    store_rows(
        highest, total, acc, out_ptr, partial_ptr, weight_ptr, token, partial, heads,
        valid, num_heads, columns, HEAD_DIM, is_partial,
    )  # fmt: skip


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, weight_ptr,
    slots_ptr, rows_ptr, places_ptr, items_ptr, lanes_ptr,
    q_token, q_head, cache_slot, cache_head, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SMALL: tl.constexpr, SMALL_BLOCK: tl.constexpr, SMALL_STAGES: tl.constexpr,
    BIG: tl.constexpr, BIG_BLOCK: tl.constexpr, BIG_STAGES: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Run one lane's items for one KV head."""
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    # the heads of a lane are neighbours: together they read whole slots
    lane = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    others = tl.load(lanes_ptr + lane * 2)
    num_items = tl.load(lanes_ptr + lane * 2 + 1)
    # an item is loaded before the slots of the one before it; its range is a start and a length,
    # since Triton 3.6 loses a carried value that is a loop's lower bound
    start, length, first_row, num_rows, first_place = _load_item(items_ptr + lane * _ITEM)
    # until here only lanes and items are read: `_grow_kernel` may have written items in this pass,
    # but is over, since the launch before this one, which stores K and V, waits itself and lets
    # nothing begin before it ends
    if IS_OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    for item in range(others, others + num_items):
        after = _load_item(items_ptr + item * _ITEM)
        if num_rows * GROUP <= SMALL:
            _decode_tile(
                q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, weight_ptr, slots_ptr, rows_ptr,
                places_ptr, head, start, length, first_row, num_rows, first_place,
                q_token, q_head, cache_slot, cache_head, KV_HEADS * GROUP, scale,
                GROUP, HEAD_DIM, BLOCK_D, SMALL, SMALL_BLOCK, SMALL_STAGES,
            )  # fmt: skip
        elif BIG > 0:
            _decode_tile(
                q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, weight_ptr, slots_ptr, rows_ptr,
                places_ptr, head, start, length, first_row, num_rows, first_place,
                q_token, q_head, cache_slot, cache_head, KV_HEADS * GROUP, scale,
                GROUP, HEAD_DIM, BLOCK_D, BIG, BIG_BLOCK, BIG_STAGES,
            )  # fmt: skip
        start, length, first_row, num_rows, first_place = after


@triton.jit(do_not_specialize=["num_seqs"])
def _grow_kernel(items_ptr, slots_ptr, tails_ptr, new_ptr, num_seqs, BLOCK: tl.constexpr):
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item = tl.load(tails_ptr + seq, mask=seq < num_seqs, other=-1)
    grows = item >= 0
    start = tl.load(items_ptr + item * _ITEM, mask=grows, other=0)
    length = tl.load(items_ptr + item * _ITEM + 1, mask=grows, other=0)
    slot = tl.load(new_ptr + seq, mask=grows, other=0)
    tl.store(slots_ptr + start + length, slot.to(tl.int32), mask=grows)
    tl.store(items_ptr + item * _ITEM + 1, length + 1, mask=grows)


def decode_tiles(shape: AttentionShape) -> DecodeTiles:
    """Return the tiles for these layers, as measured on an H200 (docs/benchmarks-gpu.md)."""
    group = shape.num_heads // shape.num_kv_heads
    small = max(16, triton.next_power_of_2(group))
    row_bytes = triton.next_power_of_2(shape.head_dim) * shape.dtype.itemsize
    if row_bytes <= 256:
        big = 64 if group <= 64 else 0
        return DecodeTiles(small, big, 64, 64, 5, 5, num_warps=4, programs_per_sm=2)
    return DecodeTiles(
        small, 0, 32, 32, 5, 5, num_warps=4, programs_per_sm=2 if row_bytes <= 512 else 1
    )


class DecodeAttention:
    """One new token for each of up to `max_seqs` sequences, over up to `max_slots` slots.

    Plan a step, then run it in every layer; `advance` moves the plan to the next step without the
    host. All device memory is taken here, so a graph that captured `run` and `advance` runs
    whatever is planned later.

    No row reaches another. Rows side by side in a tile all see each slot that it reads, and past
    its end the tile reads its own last slot again, at no weight: a row's scores and sums are of its
    own query over its own slots, and 0 * NaN arises only where a row sees the NaN anyway. Slots
    that not all of them see are read by other tiles, and each row's partials are merged by
    themselves.
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_seqs: int,
        max_slots: int,
        *,
        tiles: DecodeTiles | None = None,
        costs: TileCosts | None = None,
    ) -> None:
        assert shape.num_heads % shape.num_kv_heads == 0, "query heads are no multiple of KV heads"
        self._shape = shape
        self._max_seqs = max_seqs
        self._group = shape.num_heads // shape.num_kv_heads
        self._tiles = tiles or decode_tiles(shape)
        self._costs = costs or TileCosts()
        assert self._tiles.small >= self._group, "a tile holds the heads of a group"
        self._tile_rows = (self._tiles.small_rows(self._group), self._tiles.big_rows(self._group))
        self._lanes = lanes = num_lanes(shape, self._tiles.programs_per_sm)
        # flat attention always fits: an item per sequence, and one more for each cut
        max_partials = _TREE_PARTIALS * max_seqs + lanes * self._tile_rows[1]
        self._partials = Partials(max_partials, shape)
        self._work = WorkBuffer(
            {
                "lanes": 2 * lanes,
                "rows": max_seqs,
                "tails": max_seqs,
                "merge": 3 * max_seqs,
                "places": max_partials,
                "items": ITEM * (2 * max_seqs + 2 * lanes + 1),
                "slots": max_slots,
            },
            shape.device,
        )
        self._room = 0

    @property
    def room(self) -> int:
        """Steps that `advance` can still take before the next plan."""
        return self._room

    def plan(
        self,
        layout: AttentionLayout,
        members: IntArray | None = None,
        *,
        room: int = 0,
        num_new: int = 0,
        is_tree: bool = True,
    ) -> None:
        """Plan one step for the sequences of `layout`, or for `members` of them.

        Each has one query row and no mask. Rows past them come out as zeros; those of sequences
        that are no members are left alone. Every sequence gets `room` further slots for
        `advance`; the last `num_new` of its slots in `layout` are left for it to bring. Slots that
        sequences share are read once where that is cheaper, unless `is_tree` is false. Raises
        ValueError where the step needs more than this object has.
        """
        has_zeros = members is None
        if members is None:
            members = np.arange(len(layout.query_indptr) - 1)
        if not 1 <= len(members) <= self._max_seqs:
            raise ValueError(
                f"a plan has {len(members)} sequences, the buffer takes 1 to {self._max_seqs}; "
                "make it for more"
            )
        starts, stops = layout.kv_indptr[members].tolist(), layout.kv_indptr[members + 1].tolist()
        rows = [layout.kv_indices[a : b - num_new] for a, b in zip(starts, stops, strict=True)]
        flat = flat_nodes(np.asarray([len(row) for row in rows], np.int64))
        nodes = shared_nodes(rows, *self._tile_rows, self._costs) if is_tree else flat
        tokens = layout.query_indptr[members]
        work = self._lay_out(nodes, rows, tokens, room)
        if not self._work.fits(work):
            work = self._lay_out(flat, rows, tokens, room)
        if not has_zeros:
            work["merge"][3 * len(members) :: 3] = -1
        self._work.send(work)
        self._room = room

    def plan_nothing(self) -> None:
        """Plan a step without sequences: run from a graph, it leaves every row alone."""
        lanes, merge = self._work.room("lanes"), self._work.room("merge")
        self._work.send({"lanes": np.zeros(lanes, np.int64), "merge": np.full(merge, -1)})
        self._room = 0

    def _lay_out(
        self, nodes: KVNodes, rows: list[IntArray], tokens: IntArray, room: int
    ) -> dict[str, IntArray]:
        return decode_work(
            nodes,
            rows,
            tokens,
            tile_rows=self._tile_rows,
            block=self._tiles.small_block,
            lanes=self._lanes,
            costs=self._costs,
            room=room,
            max_rows=self._max_seqs,
        )

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return the attention output; rows past the planned sequences are zero.

        Query row i is that of sequence i. Shapes as in `AttentionPlan.run`.
        """
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.run_into(out, q, k_cache, v_cache, q.shape[0])
        return out

    def run_into(
        self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, num_rows: int
    ) -> None:
        """Write the planned rows of `out`, which is contiguous; `num_rows` of them are merged."""
        shape, tiles, work, partials = self._shape, self._tiles, self._work, self._partials
        check_strides(q, k_cache, v_cache)
        assert num_rows <= self._max_seqs, f"{num_rows} rows, made for {self._max_seqs}"
        launch(decode_kernel, (self._lanes * shape.num_kv_heads,))(
            q, k_cache, v_cache, out, partials.out, partials.weights,
            work["slots"], work["rows"], work["places"], work["items"], work["lanes"],
            q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
            softmax_scale(shape.head_dim),
            KV_HEADS=shape.num_kv_heads, GROUP=self._group,
            HEAD_DIM=shape.head_dim, BLOCK_D=triton.next_power_of_2(shape.head_dim),
            SMALL=tiles.small, SMALL_BLOCK=tiles.small_block, SMALL_STAGES=tiles.small_stages,
            BIG=tiles.big, BIG_BLOCK=tiles.big_block, BIG_STAGES=tiles.big_stages,
            num_warps=tiles.num_warps, **overlap(shape.device, len(q) == 1),
        )  # fmt: skip
        partials.merge(out, work["merge"], num_rows)

    def advance(self, slots: Tensor) -> None:
        """Let every sequence see one more slot: `slots[i]` for sequence i of the plan.

        One launch, for as many sequences as there are slots. When a graph that captured it is
        replayed, `advanced` keeps the count of `room`.
        """
        assert len(slots) <= self._max_seqs, f"{len(slots)} slots, made for {self._max_seqs}"
        self.advanced()
        work = self._work
        launch(_grow_kernel, (triton.cdiv(len(slots), _GROW_BLOCK),))(
            work["items"], work["slots"], work["tails"], slots, len(slots), BLOCK=_GROW_BLOCK
        )

    def advanced(self) -> None:
        """Count one step of `advance`."""
        assert self._room > 0, "no room left; plan again"
        self._room -= 1
