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
from .work_buffer import place_partials

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# int32s per item: start and length in the slots, first row, number of rows, where the places of its
# partials are listed or -1, and padding
ITEM = 8


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """The shapes of a decode kernel: rows of the two kinds of tiles, slots per block."""

    small: int
    big: int  # 0: there are no big tiles
    small_block: int  # slots that a step of a tile reads
    big_block: int
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
) -> dict[str, IntArray]:
    """Return what a DecodeAttention's buffer holds of a step.

    Sequence i has the slots rows_of_slots[i] and the query row tokens[i], and may grow by `room`
    slots. `tile_rows` are the sequences that a small and a big tile take.
    """
    lens = nodes.stop - nodes.start
    is_tail = nodes.count == 1
    # every tail keeps room behind it, where its sequence can grow
    space = lens + np.where(is_tail, room, 0)
    bases = np.cumsum(space) - space

    is_small = nodes.count <= tile_rows[0]
    node, from_row, to_row = _tiles(nodes.count, is_small, tile_rows[1])
    slot_cost = np.where(is_small, costs.small_slot, costs.big_slot)[node]
    # a tail is about half grown when the next plan is made
    expected = lens + np.where(is_tail, room // 2, 0)
    cost = np.where(is_small, costs.small_tile, costs.big_tile)[node] + expected[node] * slot_cost
    tile, first, last, lane_starts = _cut(cost, slot_cost, lens[node], block, lanes)
    item_node = node[tile]
    item_row = nodes.first[item_node] + from_row[tile]
    num_rows = (to_row - from_row)[tile]

    # a sequence that one item reads from end to end needs no partial
    is_whole = (first == 0) & (last == lens[item_node]) & is_tail[item_node]
    is_whole &= nodes.start[item_node] == 0
    num_places = np.where(is_whole, 0, num_rows)
    first_place = np.cumsum(num_places) - num_places
    split = ~is_whole
    places, starts, stops = place_partials(item_row[split], num_rows[split], len(tokens))
    at, others, counts = _item_places(lane_starts)
    items = np.zeros((lanes + len(tile) + 1, ITEM), np.int64)
    items[at, 0] = bases[item_node] + first
    items[at, 1] = last - first
    items[at, 2] = item_row
    items[at, 3] = num_rows
    items[at, 4] = np.where(is_whole, -1, first_place)

    ends = is_tail[item_node] & (last == lens[item_node])
    tails = np.full(max_rows, -1, np.int64)
    tails[nodes.owner[item_node[ends]]] = at[ends]
    return {
        "lanes": np.stack([others, counts], 1).reshape(-1),
        "rows": tokens[nodes.order],
        "tails": tails,
        "merge": _merge_entries(tokens[nodes.order], starts, stops, max_rows),
        "places": places,
        "items": items.reshape(-1),
        "slots": _gather(nodes, rows_of_slots, bases, int(space.sum())),
    }


def _gather(
    nodes: KVNodes, rows_of_slots: Sequence[IntArray], bases: IntArray, size: int
) -> IntArray:
    """Return the nodes' slots, those of node n from bases[n] on."""
    slots = np.zeros(size, np.int64)
    spans = zip(
        bases.tolist(), nodes.owner.tolist(), nodes.start.tolist(), nodes.stop.tolist(), strict=True
    )
    for base, owner, start, stop in spans:
        slots[base : base + stop - start] = rows_of_slots[owner][start:stop]
    return slots


def _tiles(
    counts: IntArray, is_small: BoolArray, big_rows: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return each tile's node, and which of the node's sequences it takes.

    Big tiles come first: lanes that compute then share an SM with lanes that load.
    """
    num_tiles = np.where(is_small, 1, -(-counts // big_rows))
    by_kind = np.argsort(is_small, kind="stable")
    node = np.repeat(by_kind, num_tiles[by_kind])
    before = np.cumsum(num_tiles[by_kind]) - num_tiles[by_kind]
    nth = np.arange(len(node)) - np.repeat(before, num_tiles[by_kind])
    spread = counts[node], num_tiles[node]
    return node, nth * spread[0] // spread[1], (nth + 1) * spread[0] // spread[1]


def _merge_entries(tokens: IntArray, starts: IntArray, stops: IntArray, max_rows: int) -> IntArray:
    """Return (token, start, stop) of each row's partials, or -1 for what is already written."""
    merge = np.zeros((max_rows, 3), np.int64)
    # rows past the batch exist in a captured graph: with no partials they get zeros
    merge[:, 0] = np.arange(max_rows)
    merge[: len(tokens)] = np.stack([np.where(starts == stops, -1, tokens), starts, stops], 1)
    return merge.reshape(-1)


def _cut(
    cost: FloatArray, slot_cost: FloatArray, lens: IntArray, block: int, lanes: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Lay the tiles end to end and cut them, between blocks of slots, into lanes of equal cost.

    Returns each item's tile and its range in the tile, and where each lane's items start.
    """
    ends = np.cumsum(cost)
    goals = ends[-1] * np.arange(1, lanes) / lanes
    at = np.minimum(np.searchsorted(ends, goals, side="right"), len(cost) - 1)
    # what starting a tile costs comes before its slots
    inside = (goals - ends[at] + lens[at] * slot_cost[at]) / slot_cost[at]
    inside = np.clip(np.rint(inside / block).astype(np.int64) * block, 0, lens[at])
    # a few slots at a tile's end go with what is before them, where lanes are not plenty
    scraps = np.minimum(goals[:1] / slot_cost[at] / 2, block // 2)
    inside = np.where(lens[at] - inside < scraps, lens[at], inside)
    starts = np.cumsum(lens) - lens
    end = starts[-1] + lens[-1]
    cuts = starts[at] + inside
    borders = np.unique(np.concatenate([starts, cuts, [end]]))
    begins, stops = borders[:-1], borders[1:]
    tile = np.searchsorted(starts, begins, side="right") - 1
    lane_starts = np.searchsorted(begins, np.concatenate([[0], cuts, [end]]))
    return tile, begins - starts[tile], stops - starts[tile], lane_starts


def _item_places(lane_starts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return where each item lies, and for each lane where its others begin and how many it has.

    A lane finds its first item without looking it up: it has the lane's own number. The others
    follow each other behind all first ones, and one item more may be read than there are.
    """
    lanes = len(lane_starts) - 1
    counts = np.diff(lane_starts)
    has_any = counts > 0
    firsts = lane_starts[:-1][has_any]
    at = lanes + np.arange(int(lane_starts[-1]))
    at -= np.searchsorted(firsts, np.arange(len(at)), side="right")
    at[firsts] = np.flatnonzero(has_any)
    others = lanes + lane_starts[:-1] - (np.cumsum(has_any) - has_any)
    return at, others, counts
