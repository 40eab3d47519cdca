"""The work lists of decode attention, walked on the host as the kernel walks them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.attention_cases import tree_rows

from umbel.kernels.triton.decode_work import ITEM, decode_work
from umbel.kernels.triton.kv_nodes import KVNodes, TileCosts, flat_nodes, shared_nodes

IntArray = npt.NDArray[np.int64]
CHEAP = TileCosts(small_tile=0.01, big_tile=0.01, partial=0.001)  # shares all it can
TILE_ROWS = (2, 5)
BLOCK = 8

trees = st.builds(
    lambda levels, seed: tree_rows(levels, np.random.default_rng(seed)),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(0, 1 << 30),
)


def lay_out(
    rows: list[IntArray], nodes: KVNodes, lanes: int, room: int = 0, max_rows: int = 0
) -> dict[str, IntArray]:
    return decode_work(
        nodes,
        rows,
        np.arange(len(rows)) + 100,
        tile_rows=TILE_ROWS,
        block=BLOCK,
        lanes=lanes,
        costs=CHEAP,
        room=room,
        max_rows=max_rows or len(rows),
    )


def walk(work: dict[str, IntArray]) -> list[list[IntArray]]:
    """Return each lane's items in the order in which the kernel takes them."""
    items = work["items"].reshape(-1, ITEM)
    lanes = []
    for lane, (others, count) in enumerate(work["lanes"].reshape(-1, 2)):
        taken, current = [], items[lane]
        for after in range(others, others + count):
            taken.append(current)
            current = items[after]
        lanes.append(taken)
    return lanes


@given(trees, st.integers(1, 9), st.integers(0, 9))
def test_every_row_reads_each_of_its_slots_once(
    rows: list[IntArray], lanes: int, room: int
) -> None:
    nodes = shared_nodes(rows, *TILE_ROWS, CHEAP)
    work = lay_out(rows, nodes, lanes, room)
    slots, order = work["slots"], work["rows"] - 100
    read: dict[int, list[int]] = {row: [] for row in range(len(rows))}
    partials: dict[int, list[int]] = {row: [] for row in range(len(rows))}
    wholes = set()
    for lane in walk(work):
        for start, length, first, count, place, *_ in lane:
            assert length > 0
            assert count <= max(TILE_ROWS)
            for i in range(count):
                row = int(order[first + i])
                read[row] += slots[start : start + length].tolist()
                if place < 0:
                    wholes.add(row)
                else:
                    partials[row].append(int(work["places"][place + i]))
    assert all(sorted(read[i]) == sorted(row) for i, row in enumerate(rows))

    # a row's partials lie side by side where its entry says, and no two rows share one
    merge = work["merge"].reshape(-1, 3)
    assert {int(order[i]) for i in np.flatnonzero(merge[:, 0] < 0)} == wholes
    for i, (token, start, stop) in enumerate(merge):
        row = int(order[i])
        if row in wholes:
            assert not partials[row]
        else:
            assert token == row + 100
            assert sorted(partials[row]) == list(range(start, stop))
    taken = [place for places in partials.values() for place in places]
    assert sorted(taken) == list(range(len(taken)))


@given(trees, st.integers(1, 9), st.integers(1, 9))
def test_every_sequence_has_a_tail_with_room_behind_it(
    rows: list[IntArray], lanes: int, room: int
) -> None:
    work = lay_out(rows, shared_nodes(rows, *TILE_ROWS, CHEAP), lanes, room, max_rows=len(rows) + 2)
    items = work["items"].reshape(-1, ITEM)
    tails = work["tails"]
    assert tails[len(rows) :].tolist() == [-1, -1]
    ends = []
    for seq, row in enumerate(rows):
        start, length, first, count = items[tails[seq], :4]
        assert count == 1
        assert work["rows"][first] == seq + 100
        assert work["slots"][start + length - 1] == row[-1]
        ends.append(int(start + length))
    # nobody else's slots begin within the room
    begins = {int(item[0]) for lane in walk(work) for item in lane}
    assert not any(begin in range(end, end + room) for end in ends for begin in begins)


@given(trees)
def test_nodes_hold_what_their_sequences_share(rows: list[IntArray]) -> None:
    nodes = shared_nodes(rows, *TILE_ROWS, CHEAP)
    assert sorted(nodes.order) == list(range(len(rows)))
    for owner, start, stop, first, count in zip(
        nodes.owner, nodes.start, nodes.stop, nodes.first, nodes.count, strict=True
    ):
        members = nodes.order[first : first + count]
        assert owner in members
        for seq in members:
            assert (rows[seq][:stop] == rows[owner][:stop]).all()
        assert start < stop


@given(st.integers(0, 1 << 30))
def test_slots_that_meet_by_chance_are_not_a_shared_prefix(seed: int) -> None:
    """Equal slots behind unequal ones do not share a node: what lies before differs."""
    rng = np.random.default_rng(seed)
    pool = np.arange(30)
    chance = [rng.permutation(pool)[: 3 + int(rng.integers(20))] for _ in range(6)]
    nodes = shared_nodes(chance, *TILE_ROWS, CHEAP)
    work = lay_out(chance, nodes, lanes=3)
    order = work["rows"] - 100
    read: dict[int, list[int]] = {row: [] for row in range(len(chance))}
    for lane in walk(work):
        for start, length, first, count, *_ in lane:
            for i in range(count):
                read[int(order[first + i])] += work["slots"][start:][:length].tolist()
    assert all(sorted(read[i]) == sorted(row) for i, row in enumerate(chance))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 12))
def test_where_nothing_is_shared_the_tree_is_the_flat_list(lens: list[int], lanes: int) -> None:
    places = np.random.default_rng(0).permutation(sum(lens))
    rows = np.split(places, np.cumsum(lens)[:-1])
    flat = lay_out(rows, flat_nodes(np.asarray(lens)), lanes)
    tree = lay_out(rows, shared_nodes(rows, *TILE_ROWS, TileCosts()), lanes)

    def reads(arrays: dict[str, IntArray]) -> list[tuple[list[int], list[int]]]:
        return sorted(
            (arrays["rows"][first : first + count].tolist(), arrays["slots"][start:][:n].tolist())
            for start, n, first, count, *_ in arrays["items"].reshape(-1, ITEM)
            if count
        )

    assert len(flat["items"]) == len(tree["items"])
    assert reads(flat) == reads(tree)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40), st.integers(1, 33))
def test_lanes_are_even_to_a_block_and_a_tile(lens: list[int], lanes: int) -> None:
    rows = np.split(np.arange(sum(lens)), np.cumsum(lens)[:-1])
    nodes = flat_nodes(np.asarray(lens))
    costs = TileCosts()
    work = decode_work(
        nodes,
        rows,
        np.arange(len(rows)),
        tile_rows=TILE_ROWS,
        block=BLOCK,
        lanes=lanes,
        costs=costs,
        room=0,
        max_rows=len(rows),
    )

    def cost(num_slots: int, num_items: int) -> float:
        return num_slots * costs.small_slot + num_items * costs.small_tile

    fair = cost(sum(lens), len(lens)) / lanes
    for lane in walk(work):
        taken = cost(sum(int(item[1]) for item in lane), len(lane))
        assert taken <= fair + cost(2 * BLOCK, 2)


def test_a_prefix_is_shared_only_where_that_is_cheaper() -> None:
    costs, rng = TileCosts(), np.random.default_rng(0)

    def widest(shared: int, num_seqs: int) -> int:
        rows = tree_rows([(1, shared), (num_seqs, 50)], rng)
        return int(shared_nodes(rows, 4, 16, costs).count.max())

    assert widest(4096, 64) == 64
    assert widest(4096, 2) == 2
    assert widest(4, 64) == 1
    assert widest(30, 2) == 1


def test_levels_that_do_not_pay_go_to_their_children() -> None:
    rows = tree_rows([(1, 2000), (4, 3), (4, 500), (4, 20)], np.random.default_rng(0))
    nodes = shared_nodes(rows, 4, 16, TileCosts())
    spans = {(int(a), int(b)) for a, b in zip(nodes.start, nodes.stop, strict=True)}
    assert spans == {(0, 2000), (2000, 2503), (2503, 2523)}
