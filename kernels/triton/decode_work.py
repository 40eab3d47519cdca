"""The work list of a decode step: which lane reads which slots for which rows.

Nodes are cut into tiles (as many sequences as a tile takes) and tiles into items (stretches of
slots) so that every lane costs about the same. All KV heads do the same items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .kv_nodes import KVNodes, TileCosts
from .work_buffer import merge_table

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ITEM = 8  # int32s per item: start, stop, first row, number of rows, first partial or -1, padding


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """The shapes of a decode kernel: rows of the two kinds of tiles, slots per block."""

    small: int
    big: int  # 0: there are no big tiles
    block: int
    small_stages: int
    big_stages: int
    num_warps: int
    programs_per_sm: int

    def small_rows(self, group: int) -> int:
        """Return the sequences that a small tile takes."""
        return self.small // group

    def big_rows(self, group: int) -> int:
        """Return the sequences that the widest tile takes."""
        return max(self.big, self.small) // group


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A decode step, laid out for the device."""

    arrays: dict[str, IntArray]  # as in decode_buffer_sizes
    num_partials: int
    room: int  # tokens by which every sequence may grow


def decode_work(
    nodes: KVNodes,
    rows_of_slots: Sequence[IntArray],
    tokens: IntArray,
    *,
    tile_rows: tuple[int, int],
    block: int,
    lanes: int,
    costs: TileCosts,
    room: int,
    max_rows: int,
) -> DecodeWork:
    """Lay out a step for sequences with these slots, whose query rows are `tokens`.

    `tile_rows` are the sequences that a small and a big tile take.
    """
    num_nodes = len(nodes.owner)
    lens = nodes.stop - nodes.start
    is_tail = nodes.count == 1
    # every tail keeps room behind it, where its sequence can grow
    space = lens + np.where(is_tail, room, 0)
    bases = np.cumsum(space) - space
    slots = np.zeros(int(space.sum()), np.int64)
    for base, owner, start, stop in zip(
        bases.tolist(), nodes.owner.tolist(), nodes.start.tolist(), nodes.stop.tolist(), strict=True
    ):
        slots[base : base + stop - start] = rows_of_slots[owner][start:stop]

    # big tiles first: lanes that compute then share an SM with lanes that load
    is_small = nodes.count <= tile_rows[0]
    num_tiles = np.where(is_small, 1, -(-nodes.count // tile_rows[1]))
    by_kind = np.argsort(is_small, kind="stable")
    node = np.repeat(by_kind, num_tiles[by_kind])
    nth = np.arange(len(node)) - np.repeat(
        np.cumsum(num_tiles[by_kind]) - num_tiles[by_kind], num_tiles[by_kind]
    )
    # the sequences of a node spread evenly over its tiles
    from_row = nth * nodes.count[node] // num_tiles[node]
    to_row = (nth + 1) * nodes.count[node] // num_tiles[node]

    slot_cost = np.where(is_small, costs.small_slot, costs.big_slot)[node]
    cost = (lens + np.where(is_tail, room // 2, 0))[node] * slot_cost + costs.tile
    tile, first, last, lane_starts = _cut(cost, slot_cost, lens[node], block, lanes)
    item_node = node[tile]
    item_row = nodes.first[item_node] + from_row[tile]
    num_rows = (to_row - from_row)[tile]

    # a sequence that one item reads from end to end needs no partial
    is_whole = (first == 0) & (last == lens[item_node]) & is_tail[item_node]
    is_whole &= nodes.start[item_node] == 0
    split_rows = np.where(is_whole, 0, num_rows)
    first_partial = np.cumsum(split_rows) - split_rows
    split = ~is_whole
    ids, starts, stops = merge_table(
        item_row[split], num_rows[split], first_partial[split], len(tokens)
    )
    items = np.zeros((len(tile), ITEM), np.int64)
    items[:, 0] = bases[item_node] + first
    items[:, 1] = bases[item_node] + last
    items[:, 2] = item_row
    items[:, 3] = num_rows
    items[:, 4] = np.where(is_whole, -1, first_partial)

    # rows past the batch exist in a captured graph: they get zeros
    merge = np.zeros((max_rows, 3), np.int64)
    merge[:, 0] = np.arange(max_rows)
    merge[: len(tokens), 0] = tokens[nodes.order]
    merge[: len(tokens), 1] = starts
    merge[: len(tokens), 2] = stops
    merge[: len(tokens), 0][starts == stops] = -1
    ends = is_tail[item_node] & (last == lens[item_node])
    tails = np.full(max_rows, -1, np.int64)
    tails[nodes.owner[item_node[ends]]] = np.flatnonzero(ends)
    return DecodeWork(
        {
            "lanes": lane_starts,
            "rows": tokens[nodes.order],
            "tails": tails,
            "merge": merge.reshape(-1),
            "merge_ids": ids,
            "items": items.reshape(-1),
            "slots": slots,
        },
        num_partials=int(split_rows.sum()),
        room=room,
    )


def _cut(
    cost: FloatArray, slot_cost: FloatArray, lens: IntArray, block: int, lanes: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Lay the tiles end to end and cut them into lanes of equal cost, between blocks of slots.

    Returns each item's tile and its range in the tile, and where each lane's items start.
    """
    ends = np.cumsum(cost)
    goals = ends[-1] * np.arange(1, lanes) / lanes
    at = np.minimum(np.searchsorted(ends, goals, side="right"), len(cost) - 1)
    # what starting the tile costs comes first
    tile_cost = cost[at] - lens[at] * slot_cost[at]
    inside = (goals - (ends[at] - cost[at]) - tile_cost) / slot_cost[at]
    inside = np.rint(inside / block).astype(np.int64) * block
    inside = np.clip(inside, 0, lens[at])
    inside[lens[at] - inside < block // 2] = lens[at][lens[at] - inside < block // 2]
    starts = np.cumsum(lens) - lens
    cuts = starts[at] + inside
    borders = np.unique(np.concatenate([starts, cuts, [starts[-1] + lens[-1]]]))
    begins, stops = borders[:-1], borders[1:]
    tile = np.searchsorted(starts, begins, side="right") - 1
    lane_starts = np.concatenate([[0], np.searchsorted(begins, cuts), [len(begins)]])
    return tile, begins - starts[tile], stops - starts[tile], lane_starts
