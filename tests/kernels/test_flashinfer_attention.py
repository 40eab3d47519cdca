"""FlashInfer attention: what it is given, on a CPU with a stand-in; what it gives, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels import fake_flashinfer
from tests.kernels.attention_cases import (
    DEVICE,
    Tensors,
    layout_of,
    random_extend,
    relative_error,
    tensors_for,
    tree_rows,
)

from umbel.kernels import AttentionLayout, AttentionShape

pytest.importorskip("triton")

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, torch.float32, CPU)


@pytest.fixture
def ours() -> Iterator[Any]:
    """The module as it is with the stand-in for FlashInfer, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("Triton's part of these passes is compiled here: it takes no CPU tensors")
    with fake_flashinfer.installed() as module:
        yield module


def planned() -> list[list[int]]:
    """Return the new tokens of the sequences in each of FlashInfer's plans."""
    return [q_lens for _, q_lens in fake_flashinfer.PLANS]


def check(backend: Any, layout: AttentionLayout, seed: int, shape: AttentionShape = SHAPE) -> None:
    tensors = tensors_for(layout, shape, seed)
    out = backend.plan(layout, shape).run(tensors.q, tensors.k_cache, tensors.v_cache)
    assert relative_error(out, tensors.oracle(layout)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"takes_decodes": False, "min_new": 3}], ids=str)
def test_a_pass_of_any_sequences_is_what_the_definition_says(
    ours: Any, options: dict[str, Any]
) -> None:
    backend = ours.FlashInferAttention(**options)
    for seed in range(6):  # few and short: the interpreter runs what is Triton's, in whole blocks
        check(backend, random_extend(np.random.default_rng(seed), longest=8), seed)
    assert planned()


def test_flashinfer_takes_decodes_and_extends_without_masks(ours: Any) -> None:
    rows = [np.arange(9) + 20 * i for i in range(6)]
    mask = {2: np.ones((1, 9), np.bool_), 4: np.tri(3, 9, 6, dtype=np.bool_)}
    layout = layout_of(rows, [5, 1, 1, 2, 3, 1], mask)
    check(ours.FlashInferAttention(), layout, seed=0)
    assert planned() == [[1, 1], [5, 2]]
    fake_flashinfer.PLANS.clear()
    check(ours.FlashInferAttention(takes_decodes=False, min_new=3), layout, seed=1)
    assert planned() == [[5]]


def test_flashinfer_takes_extends_where_a_pass_has_enough_of_them(ours: Any) -> None:
    rows = [np.arange(9) + 20 * i for i in range(4)]
    for q_lens, taken in (([1, 5, 2, 3], [[5, 3]]), ([1, 4, 2, 3], []), ([3, 2, 2, 6], [[3, 6]])):
        fake_flashinfer.PLANS.clear()
        backend = ours.FlashInferAttention(takes_decodes=False, min_new=3, min_total=8)
        check(backend, layout_of(rows, q_lens), seed=0)
        assert planned() == taken


def test_a_backend_goes_on_to_layers_of_another_shape(ours: Any) -> None:
    backend = ours.FlashInferAttention()
    layout = layout_of([np.arange(7), np.arange(3)], [4, 1])
    for heads in ((4, 2), (8, 1)):
        check(backend, layout, 0, AttentionShape(*heads, 16, torch.float32, CPU))
    tensor_cores = [
        wrapper.use_tensor_cores
        for wrapper, q_lens in fake_flashinfer.PLANS
        if isinstance(wrapper, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper)
    ]
    assert tensor_cores == [False, True]


def test_a_captured_size_runs_every_later_plan(ours: Any) -> None:
    """Plans of several sizes lie in the same buffers: what runs is what was planned last."""
    plan = ours.FlashInferDecode(SHAPE, [1, 2, 4], 60)
    rng = np.random.default_rng(0)
    for num_seqs, length in ((4, 9), (1, 20), (3, 12), (2, 5), (3, 1)):
        rows = tree_rows([(1, length), (num_seqs, 3)], rng)
        layout, size = layout_of(rows), {1: 1, 2: 2, 3: 4, 4: 4}[num_seqs]
        tensors = tensors_for(layout, SHAPE, seed=num_seqs)
        plan.plan(layout, room=9, num_new=1)
        q = torch.cat([tensors.q, torch.ones(size - num_seqs, 4, 16)])
        plan.advance(torch.zeros(size, dtype=torch.int64))
        out = plan.run(q, tensors.k_cache, tensors.v_cache)
        plan.advanced()
        assert relative_error(out[:num_seqs], tensors.oracle(layout)) < 1e-5
        assert out.isfinite().all()
        assert plan.room == 0


def test_a_step_that_does_not_fit_is_refused(ours: Any) -> None:
    plan = ours.FlashInferDecode(SHAPE, [1, 4], 10)
    with pytest.raises(ValueError, match="a plan needs 11 slots, made for 10"):
        plan.plan(layout_of([np.arange(4), np.arange(5)]))
    with pytest.raises(ValueError, match="a plan has 5 sequences, made for 4"):
        plan.plan(layout_of([np.arange(1)] * 5))


GPU_HEADS = [(32, 8), (16, 8), (8, 8), (64, 8), (12, 4), (7, 1)]


def gpu_shape(seed: int) -> AttentionShape:
    return AttentionShape(*GPU_HEADS[seed % len(GPU_HEADS)], 128, torch.bfloat16, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"takes_decodes": False, "min_new": 32}], ids=str)
def test_200_random_passes(options: dict[str, Any]) -> None:
    pytest.importorskip("flashinfer")
    from umbel.kernels.flashinfer_attention import FlashInferAttention

    backends: dict[AttentionShape, FlashInferAttention] = {}
    for seed in range(200):
        rng, shape = np.random.default_rng(seed), gpu_shape(seed)
        layout = random_extend(rng, longest=int(rng.choice([20, 150, 600])))
        if seed % 2:
            rows = np.split(layout.kv_indices, layout.kv_indptr[1:-1])
            layout = layout_of(rows, np.diff(layout.query_indptr).tolist())
        tensors = tensors_for(layout, shape, seed)
        backend = backends.setdefault(shape, FlashInferAttention(**options))
        out = backend.plan(layout, shape).run(tensors.q, tensors.k_cache, tensors.v_cache)
        assert relative_error(out, tensors.oracle(layout)) < 4e-3, seed


@pytest.mark.gpu
def test_200_random_decodes() -> None:
    pytest.importorskip("flashinfer")
    from umbel.kernels.flashinfer_attention import FlashInferAttention

    backends: dict[AttentionShape, FlashInferAttention] = {}
    for seed in range(200):
        rng, shape = np.random.default_rng(seed), gpu_shape(seed)
        shared = (1, int(rng.choice([1, 60, 900])))
        layout = layout_of(tree_rows([shared, (int(rng.integers(1, 80)), 1 + seed)], rng))
        tensors = tensors_for(layout, shape, seed)
        backend = backends.setdefault(shape, FlashInferAttention())
        out = backend.plan(layout, shape).run(tensors.q, tensors.k_cache, tensors.v_cache)
        assert relative_error(out, tensors.oracle(layout)) < 4e-3, seed


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (16, 8)], ids=["tensor cores", "CUDA cores"])
def test_graphs_run_every_later_plan(heads: tuple[int, int]) -> None:
    pytest.importorskip("flashinfer")
    from umbel.kernels.flashinfer_attention import FlashInferDecode

    shape = AttentionShape(*heads, 128, torch.bfloat16, DEVICE)
    sizes = [1, 8, 64]
    plan = FlashInferDecode(shape, sizes, 1 << 17)
    k_cache, v_cache = torch.randn(2, 8000, heads[1], 128, device=DEVICE).to(torch.bfloat16)
    q = torch.zeros(64, heads[0], 128, dtype=torch.bfloat16, device=DEVICE)
    replays: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
    for size in sizes:
        plan.plan(layout_of([np.arange(1)] * size))
        plan.run(q[:size], k_cache, v_cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = plan.run(q[:size], k_cache, v_cache)
        replays[size] = graph, out
    rng = np.random.default_rng(0)
    for levels in ([(1, 900), (64, 40)], [(37, 200)], [(1, 300), (4, 200)], [(1, 5000)], [(8, 1)]):
        layout = layout_of(tree_rows(levels, rng))
        batch = len(layout.query_indptr) - 1
        size = next(size for size in sizes if size >= batch)
        plan.plan(layout, room=32, num_new=1)
        q.normal_()
        replays[size][0].replay()
        out = replays[size][1]
        expected = Tensors(q[:batch], k_cache, v_cache).oracle(layout)
        assert relative_error(out[:batch], expected) < 4e-3
        assert out.isfinite().all()
