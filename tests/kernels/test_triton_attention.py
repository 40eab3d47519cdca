"""Triton attention equals the definition: compiled on a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.attention_cases import (
    DEVICE,
    Tensors,
    layout_of,
    random_extend,
    relative_error,
    tensors_for,
    tree_rows,
)

from umbel.kernels import AttentionShape
from umbel.kernels.triton import (
    DecodeAttention,
    ExtendAttention,
    MixedAttention,
    TritonAttention,
)
from umbel.kernels.triton.decode_work import DecodeTiles
from umbel.kernels.triton.extend_attention import ExtendTiles
from umbel.kernels.triton.extend_work import extend_work
from umbel.kernels.triton.kv_nodes import TileCosts

CHEAP = TileCosts(small_tile=0.01, big_tile=0.01, partial=0.001)  # shares all it can
DECODE_TILES = DecodeTiles(16, 32, 16, 16, 3, 3, num_warps=4, programs_per_sm=2)
EXTEND_TILES = ExtendTiles(32, 16, 3, num_warps=4, programs_per_sm=2)
TREES = [
    [(5, 40)],
    [(1, 45), (3, 20), (4, 9)],
    [(2, 33), (1, 3), (5, 1)],
    [(1, 60), (14, 2)],
]
HEADS = [(4, 2), (3, 3), (5, 1), (6, 2)]


def shape_of(
    heads: tuple[int, int], head_dim: int = 16, dtype: torch.dtype = torch.float32
) -> AttentionShape:
    return AttentionShape(heads[0], heads[1], head_dim, dtype, DEVICE)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("case", range(4))
def test_decode(case: int, is_tree: bool) -> None:
    rows = tree_rows(TREES[case], np.random.default_rng(case))
    # the interpreter has no bfloat16 products
    dtype = torch.float16 if case == 1 else torch.float32
    layout, shape = layout_of(rows), shape_of(HEADS[case], 20 if case == 2 else 16, dtype)
    tensors = tensors_for(layout, shape, seed=case)
    attention = DecodeAttention(shape, len(rows), 1000, tiles=DECODE_TILES, costs=CHEAP)
    attention.plan(layout, is_tree=is_tree)
    out = attention.run(tensors.q, tensors.k_cache, tensors.v_cache)
    assert relative_error(out, tensors.oracle(layout)) < (1e-3 if case == 1 else 1e-5)


def test_a_plan_advances_as_its_sequences_grow() -> None:
    rng = np.random.default_rng(0)
    full = tree_rows([(1, 30), (2, 10), (3, 12)], rng)
    layout, shape = layout_of(full), shape_of((4, 2))
    tensors = tensors_for(layout, shape, seed=0)
    attention = DecodeAttention(shape, len(full), 400, tiles=DECODE_TILES, costs=CHEAP)
    attention.plan(layout_of([row[:-3] for row in full]), room=3)
    for step in (3, 2, 1):
        new = torch.as_tensor([int(row[-step]) for row in full], device=DEVICE)
        assert attention.room == step
        attention.advance(new)
        seen = layout_of([row[: len(row) - step + 1] for row in full])
        out = attention.run(tensors.q, tensors.k_cache, tensors.v_cache)
        assert relative_error(out, tensors.oracle(seen)) < 1e-5
    with pytest.raises(AssertionError, match="no room left"):
        attention.advance(new)


def test_rows_that_pad_a_batch_are_zero() -> None:
    layout, shape = layout_of(tree_rows([(3, 9)], np.random.default_rng(0))), shape_of((4, 2))
    tensors = tensors_for(layout, shape, seed=0)
    attention = DecodeAttention(shape, 5, 100, tiles=DECODE_TILES)
    attention.plan(layout)
    padded = torch.cat([tensors.q, torch.full_like(tensors.q[:2], torch.nan)])
    out = attention.run(padded, tensors.k_cache, tensors.v_cache)
    assert relative_error(out[:3], tensors.oracle(layout)) < 1e-5
    assert (out[3:] == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of products with infinities
@pytest.mark.parametrize("levels", [[(6, 20)], [(1, 40), (6, 20)], [(2, 30), (3, 12)]])
def test_a_sequence_that_ended_reaches_no_other(levels: list[tuple[int, int]]) -> None:
    """Its slots are others' by then, its query is padding's; either may be anything."""
    full = tree_rows(levels, np.random.default_rng(1))
    layout, shape = layout_of(full), shape_of((4, 2))
    tensors = tensors_for(layout, shape, seed=1)
    expected = tensors.oracle(layout)
    attention = DecodeAttention(shape, len(full), 400, tiles=DECODE_TILES, costs=CHEAP)
    attention.plan(layout, room=1, num_new=1)
    ended, others = [1, 4], [0, 2, 3, 5]
    own = set(full[1]) ^ set(full[4])
    slots = sorted(int(slot) for slot in own if all(slot not in full[seq] for seq in others))
    for cache in (tensors.k_cache, tensors.v_cache):
        cache[slots], cache[slots[::2]] = torch.nan, torch.inf
    tensors.q[ended] = torch.nan
    new = torch.as_tensor([int(row[-1]) for row in full], device=DEVICE)
    new[ended] = slots[-1]
    attention.advance(new)
    out = attention.run(tensors.q, tensors.k_cache, tensors.v_cache)
    assert out[ended].isnan().all()
    assert relative_error(out[others], expected[others]) < 1e-5


def test_a_step_that_does_not_fit_is_refused() -> None:
    attention = DecodeAttention(shape_of((4, 2)), 4, 30, tiles=DECODE_TILES)
    with pytest.raises(ValueError, match=r"needs 36 of 'slots', the buffer holds 30"):
        attention.plan(layout_of(tree_rows([(4, 9)], np.random.default_rng(0))))
    with pytest.raises(ValueError, match=r"5 sequences, the buffer takes 1 to 4"):
        attention.plan(layout_of(tree_rows([(5, 2)], np.random.default_rng(0))))


def test_a_tree_too_deep_for_the_buffers_is_planned_flat() -> None:
    """A chain of forks where every sequence leaves the trunk a little later."""
    trunk = np.arange(60)
    rows = [np.append(trunk[: 4 * i + 4], 100 + i) for i in range(15)]
    layout, shape = layout_of(rows), shape_of((2, 1))
    tensors = tensors_for(layout, shape, seed=0)
    attention = DecodeAttention(shape, len(rows), 700, tiles=DECODE_TILES, costs=CHEAP)
    attention.plan(layout)
    out = attention.run(tensors.q, tensors.k_cache, tensors.v_cache)
    assert relative_error(out, tensors.oracle(layout)) < 1e-5


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("case", range(4))
def test_extend(case: int, is_captured: bool) -> None:
    rng = np.random.default_rng(case)
    layout, shape = random_extend(rng, longest=20), shape_of(HEADS[case], 20 if case == 2 else 16)
    tensors = tensors_for(layout, shape, seed=case)
    attention = ExtendAttention(
        shape, 6, 120, 500, 4000, is_captured=is_captured, tiles=EXTEND_TILES
    )
    # the rest of an earlier, larger plan must not be run again
    attention.plan(layout_of([np.arange(60)], [60]))
    attention.plan(layout)
    out = attention.run(tensors.q, tensors.k_cache, tensors.v_cache)
    assert relative_error(out, tensors.oracle(layout)) < 1e-5


def test_a_captured_pass_of_any_kind_follows_another() -> None:
    """Each plan leaves nothing of the last one: decodes alone, extends alone, both, in any order.

    A decode behind the extends has a row that padding names too.
    """
    shape, rng = shape_of((4, 2)), np.random.default_rng(0)
    attention = MixedAttention(
        shape, 64, 1000, 4000, decode_tiles=DECODE_TILES, extend_tiles=EXTEND_TILES
    )
    stem = np.arange(50)
    tree = [np.concatenate([stem, [100 + i]]) for i in range(6)]
    layouts = [
        layout_of(tree),
        layout_of([np.arange(40), np.arange(200, 230)], [3, 30]),
        layout_of([*tree, np.arange(300, 320)], [1, 1, 1, 1, 1, 1, 9]),
        layout_of([np.arange(40), *tree[:2], np.arange(60, 90), tree[3]], [3, 1, 1, 5, 1]),
        *(random_extend(rng, longest=12) for _ in range(4)),
        layout_of(tree[:1]),
    ]
    for seed, layout in enumerate(layouts):
        tensors = tensors_for(layout, shape, seed)
        num_tokens = int(layout.query_indptr[-1])
        padded = torch.full((64, *tensors.q.shape[1:]), torch.nan)
        padded[:num_tokens] = tensors.q
        attention.plan(layout)
        out = attention.run(padded.to(DEVICE), tensors.k_cache, tensors.v_cache)
        assert relative_error(out[:num_tokens], tensors.oracle(layout)) < 1e-5


def test_a_captured_pass_has_room_for_so_many_extends_and_no_more() -> None:
    attention = MixedAttention(shape_of((4, 2)), 400, 1000, 0)
    rows = [np.arange(2 * i, 2 * i + 2) for i in range(200)]
    attention.plan(layout_of(rows[:128], [2] * 128))
    attention.plan(layout_of(rows, [1] * 200))
    with pytest.raises(ValueError, match="make it for more sequences"):
        attention.plan(layout_of(rows, [2] * 200))


def test_few_new_tokens_behind_a_long_prefix_are_split() -> None:
    layout, shape = layout_of([np.arange(300)], [3]), shape_of((4, 2))
    tensors = tensors_for(layout, shape, seed=0)
    attention = ExtendAttention(shape, 1, 3, 300, tiles=EXTEND_TILES)
    attention.plan(layout)
    out = attention.run(tensors.q, tensors.k_cache, tensors.v_cache)
    assert relative_error(out, tensors.oracle(layout)) < 1e-5


def test_a_part_that_a_mask_hides_from_a_row_weighs_nothing() -> None:
    """The rows of a tree that has no cached prefix: some see nothing of what one item reads."""
    mask = np.ones((30, 130), np.bool_)
    mask[:, 100:] = np.tri(30, dtype=np.bool_)
    mask[::2, :100] = False
    layout = layout_of([np.random.default_rng(0).permutation(130)], [30], {0: mask})
    shape = shape_of((4, 2))
    tensors = tensors_for(layout, shape, seed=0)
    assert extend_work(layout, np.arange(1), tile_tokens=16, block=16, lanes=3).num_merges > 0
    attention = ExtendAttention(shape, 1, 30, 130, mask.size, tiles=EXTEND_TILES)
    attention.plan(layout)
    out = attention.run(tensors.q, tensors.k_cache, tensors.v_cache)
    assert relative_error(out, tensors.oracle(layout)) < 1e-5


def test_a_backend_plans_one_mixed_pass_after_the_other() -> None:
    backend = TritonAttention()
    for seed in range(3):
        layout, shape = random_extend(np.random.default_rng(seed + 7), 12), shape_of((4, 2))
        tensors = tensors_for(layout, shape, seed)
        out = backend.plan(layout, shape).run(tensors.q, tensors.k_cache, tensors.v_cache)
        assert relative_error(out, tensors.oracle(layout)) < 1e-5


GPU_SHAPES = [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 64), (8, 8, 80), (64, 8, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("is_tree", [False, True])
def test_200_random_decodes(is_tree: bool) -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        *heads, head_dim = GPU_SHAPES[seed % len(GPU_SHAPES)]
        levels = [
            (int(rng.integers(1, 7)), int(rng.choice([1, 5, 64, 200, 700])))
            for _ in range(int(rng.integers(1, 5)))
        ]
        rows = [
            row[: len(row) - int(rng.integers(levels[-1][1]))] for row in tree_rows(levels, rng)
        ]
        layout = layout_of(rows)
        shape = shape_of((heads[0], heads[1]), head_dim, torch.bfloat16)
        tensors = tensors_for(layout, shape, seed)
        costs = CHEAP if seed % 2 else None
        attention = DecodeAttention(shape, len(rows), sum(map(len, rows)), costs=costs)
        attention.plan(layout, is_tree=is_tree)
        out = attention.run(tensors.q, tensors.k_cache, tensors.v_cache)
        assert relative_error(out, tensors.oracle(layout)) < 4e-3, seed


@pytest.mark.gpu
def test_200_random_extends() -> None:
    backend = TritonAttention()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        *heads, head_dim = GPU_SHAPES[seed % len(GPU_SHAPES)]
        layout = random_extend(rng, longest=int(rng.choice([20, 150, 600])))
        shape = shape_of((heads[0], heads[1]), head_dim, torch.bfloat16)
        tensors = tensors_for(layout, shape, seed)
        out = backend.plan(layout, shape).run(tensors.q, tensors.k_cache, tensors.v_cache)
        assert relative_error(out, tensors.oracle(layout)) < 4e-3, seed


@pytest.mark.gpu
def test_one_captured_graph_runs_every_later_plan() -> None:
    shape, rng = shape_of((32, 8), 128, torch.bfloat16), np.random.default_rng(0)
    attention = DecodeAttention(shape, 64, 1 << 17)
    batches = [[(1, 900), (64, 40)], [(37, 300)], [(1, 300), (4, 200), (8, 50)], [(1, 5000)]]
    layouts = [layout_of(tree_rows(levels, rng)) for levels in batches]
    num_slots = max(int(layout.kv_indices.max()) for layout in layouts) + 1
    q = torch.zeros(64, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    k_cache, v_cache = torch.randn(2, num_slots, 8, 128, device=DEVICE).to(torch.bfloat16)
    new = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    attention.plan(layouts[0], room=2)
    attention.advance(new)
    attention.run(q, k_cache, v_cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.advance(new)
        out = attention.run(q, k_cache, v_cache)
    for layout in layouts:
        batch = len(layout.query_indptr) - 1
        rows = np.split(layout.kv_indices, layout.kv_indptr[1:-1])
        attention.plan(layout_of([row[:-1] for row in rows]), room=1)
        q.normal_()
        new[:batch] = torch.as_tensor([int(row[-1]) for row in rows])
        graph.replay()
        attention.advanced()
        expected = Tensors(q[:batch], k_cache, v_cache).oracle(layout)
        assert relative_error(out[:batch], expected) < 4e-3
        assert (out[batch:] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [ExtendAttention, MixedAttention])
def test_one_captured_graph_extends_every_later_plan(make: type[Any]) -> None:
    shape = shape_of((32, 8), 128, torch.bfloat16)
    if make is ExtendAttention:
        attention = make(shape, 8, 512, 1 << 14, 1 << 16, is_captured=True)
    else:
        attention = make(shape, 512, 1 << 14, 1 << 16)
    q = torch.zeros(512, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    k_cache, v_cache = torch.randn(2, 4000, 8, 128, device=DEVICE).to(torch.bfloat16)
    attention.plan(layout_of([np.arange(600)], [512]))
    attention.run(q, k_cache, v_cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.run(q, k_cache, v_cache)
    for seed in range(10):
        layout = random_extend(np.random.default_rng(seed), longest=[10, 80][seed % 2])
        attention.plan(layout)
        q.normal_()
        graph.replay()
        num_tokens = int(layout.query_indptr[-1])
        expected = Tensors(q[:num_tokens], k_cache, v_cache).oracle(layout)
        assert relative_error(out[:num_tokens], expected) < 4e-3
