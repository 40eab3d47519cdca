"""Which sequences of a batch read the same slots, and when it pays to read them together.

Sequences that share a prefix in the cache name the same slots, so the tree is found in the slots
themselves: a node is a range of slots and the sequences that read it. A node is kept where one
read for all its sequences is cheaper than one for each of its children; else its range goes to
the children, and where nothing is kept the nodes are the sequences: plain flat attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

# nodes above each other; deeper ones are read with their sequences
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class TileCosts:
    """What the parts of a plan take of a lane's time, in microseconds.

    A lane is the work that one program does per KV head. The defaults are fitted to an H200 with
    heads of 128 in bfloat16 (docs/benchmarks-gpu.md); only their ratios matter.
    """

    small_slot: float = 0.030  # reading a slot in a small tile, from memory
    cached_slot: float = 0.0233  # the same where another sequence has brought it into the L2 cache
    big_slot: float = 0.0225  # reading a slot in a big tile
    small_tile: float = 2.3  # starting and storing a small tile
    big_tile: float = 4.5
    partial: float = 1.6  # writing and merging one more partial of a token


@dataclass(frozen=True, slots=True)
class KVNodes:
    """Ranges of slots with the sequences that read them.

    Node n is the positions start[n]:stop[n] of the slots of sequence owner[n], and is read by the
    sequences order[first[n]:first[n] + count[n]]. Each sequence has one node that nobody shares,
    with its last slots.
    """

    order: IntArray  # [num_seqs] the sequences, depth first
    owner: IntArray
    start: IntArray
    stop: IntArray
    first: IntArray
    count: IntArray


def flat_nodes(kv_lens: IntArray) -> KVNodes:
    """Return one node per sequence."""
    seqs = np.arange(len(kv_lens))
    return KVNodes(seqs, seqs, np.zeros_like(seqs), kv_lens, seqs, np.ones_like(seqs))


def shared_nodes(
    rows_of_slots: Sequence[IntArray], small_rows: int, big_rows: int, costs: TileCosts
) -> KVNodes:
    """Return the nodes that are cheapest to read for sequences of these slots.

    `small_rows` and `big_rows` are the sequences that a small and a big tile take. Exact for any
    slots: two sequences share a node only where their slots are equal from the first one on.
    """
    return _TreeBuilder(rows_of_slots, small_rows, big_rows, costs).build()


class _TreeBuilder:
    def __init__(
        self, rows: Sequence[IntArray], small_rows: int, big_rows: int, costs: TileCosts
    ) -> None:
        self._rows = rows
        self._lens = [len(row) for row in rows]
        self._small_rows, self._big_rows, self._costs = small_rows, big_rows, costs
        self._order: list[int] = []
        self._nodes: list[list[int]] = []  # owner, start, stop, first, count

    def build(self) -> KVNodes:
        self._split(list(range(len(self._rows))), 0, 0)
        nodes = np.asarray(self._nodes, np.int64).reshape(-1, 5)
        return KVNodes(np.asarray(self._order, np.int64), *nodes.T)

    def _split(self, members: list[int], at: int, depth: int) -> list[int]:
        """Add the nodes of sequences that agree before `at`; return those that start there."""
        groups: dict[int, list[int]] = {}
        for seq in members:
            # a sequence keeps its last slot to itself, and no slot is below 0
            ends = at >= self._lens[seq] - 1 or depth == _MAX_DEPTH
            groups.setdefault(-1 - seq if ends else self._rows[seq].item(at), []).append(seq)
        tops: list[int] = []
        for group in groups.values():
            first = len(self._order)
            if len(group) == 1:
                self._order.append(group[0])
                tops.append(self._add(group[0], at, self._lens[group[0]], first, 1))
                continue
            stop = self._agree_until(group, at)
            children = self._split(group, stop, depth + 1)
            if self._pays(stop - at, len(group), [self._nodes[child][4] for child in children]):
                tops.append(self._add(group[0], at, stop, first, len(group)))
            else:
                for child in children:
                    self._nodes[child][1] = at
                tops += children
        return tops

    def _add(self, owner: int, start: int, stop: int, first: int, count: int) -> int:
        self._nodes.append([owner, start, stop, first, count])
        return len(self._nodes) - 1

    def _agree_until(self, group: list[int], at: int) -> int:
        """Return where the first of these sequences leaves the others, or ends but for a slot."""
        stop = min([self._lens[seq] for seq in group]) - 1
        head = self._rows[group[0]]
        for seq in group[1:]:
            differs = head[at:stop] != self._rows[seq][at:stop]
            where = int(differs.argmax()) if len(differs) else 0
            if len(differs) and differs[where]:
                stop = at + where
        return stop

    def _pays(self, length: int, count: int, children: list[int]) -> bool:
        """Whether reading `length` slots for `count` sequences beats reading them per child."""
        costs = self._costs
        is_small = count <= self._small_rows
        tile = costs.small_tile if is_small else self._big_tiles(count) * costs.big_tile
        together = tile + count * costs.partial + length * self._slot_cost(count, costs.small_slot)
        apart = length * sum(self._slot_cost(child, costs.cached_slot) for child in children)
        return together < apart

    def _big_tiles(self, count: int) -> int:
        return -(-count // self._big_rows)

    def _slot_cost(self, count: int, small_slot: float) -> float:
        """Return what a slot costs that `count` sequences read together."""
        if count <= self._small_rows:
            return small_slot
        return self._big_tiles(count) * self._costs.big_slot
