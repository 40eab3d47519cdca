"""Times attention on a GPU, FlashInfer's where it is installed beside Triton's.

`python -m umbel.kernels.bench_attention` prints the tables.

A figure is the time of one layer inside a replayed graph that runs over several layers' caches,
together larger than the L2 cache; slots are scattered over the pool. The floor is the bytes that
must be read once, over what a copy moves, or the arithmetic over the matrix units' rate.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from . import reference
from .paged_attention import AttentionLayout, AttentionPlan, AttentionShape
from .triton import DecodeAttention, ExtendAttention
from .triton.kv_nodes import TileCosts

IntArray = npt.NDArray[np.int64]

_COPY_RATE = 4.25e12  # bytes/s, read and written, on an H200
_CACHES = 600 << 20  # bytes of K and V that the runs of a graph rotate among
_REPLAYS = 15
_SHARE_ALL = TileCosts(cached_slot=1e9)


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences that share slots as the leaves of a tree: at each level (children, slots)."""

    name: str
    levels: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (32, 8)


DECODES = (
    Case("flat, 1 x 1,024", ((1, 1024),)),
    Case("flat, 1 x 8,192", ((1, 8192),)),
    Case("flat, 8 x 1,024", ((8, 1024),)),
    Case("flat, 256 x 256", ((256, 256),)),
    Case("flat, 256 x 768, 16 heads of 8", ((256, 768),), (16, 8)),
    Case("64 on 4,096, 64 own", ((1, 4096), (64, 64))),
    Case("256 on 4,096, 128 own", ((1, 4096), (256, 128))),
    Case("4,096 / 8 x 512 / 64 x 64", ((1, 4096), (8, 512), (8, 64))),
    Case("16 forks of 4 on 1,024, 128 own", ((16, 1024), (4, 128))),
)
#: how many sequences, the new tokens of each, its prefix
EXTENDS = (
    (8, 2048, 0),
    (2, 4096, 0),
    (16, 512, 0),
    (32, 256, 0),
    (8, 256, 2048),
    (8, 128, 1024),
    (16, 32, 2048),
    (1, 64, 8000),
    (64, 8, 1024),
    (1, 8, 4096),
)


def measure(run: Callable[[int], object], num_layers: int) -> float:
    """Return the microseconds of `run(layer)`, the median over replays of one graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.current_stream().wait_stream(stream)
    repeats = num_layers * max(1, 24 // num_layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            run(i % num_layers)
    times: list[float] = []
    for _ in range(_REPLAYS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / repeats)
    return statistics.median(times[3:])


def tree_rows(levels: Sequence[tuple[int, int]], seed: int) -> list[IntArray]:
    """Return the slots of every leaf."""
    paths: list[list[IntArray]] = [[]]
    size = 0
    for children, length in levels:
        grown = []
        for path in paths:
            for _ in range(children):
                grown.append([*path, np.arange(size, size + length)])
                size += length
        paths = grown
    places = np.random.default_rng(seed).permutation(size)
    return [places[np.concatenate(path)] for path in paths]


def layout_of(rows: Sequence[IntArray], q_len: int = 1) -> AttentionLayout:
    """Return a pass of `q_len` new tokens for every sequence."""
    return AttentionLayout(
        np.arange(len(rows) + 1) * q_len,
        np.cumsum([0, *map(len, rows)]),
        np.concatenate(rows),
        {},
    )


def shape_of(heads: tuple[int, int]) -> AttentionShape:
    """Return bfloat16 layers with heads of 128."""
    return AttentionShape(heads[0], heads[1], 128, torch.bfloat16, torch.device("cuda"))


@dataclass(frozen=True, slots=True)
class _Layers:
    q: Tensor
    caches: Tensor  # [num_layers, 2, num_slots, num_kv_heads, head_dim]

    @staticmethod
    def make(layout: AttentionLayout, shape: AttentionShape) -> _Layers:
        num_slots = int(layout.kv_indices.max()) + 1
        num_layers = max(3, min(32, _CACHES // kv_bytes(num_slots, shape)))
        q_shape = (int(layout.query_indptr[-1]), shape.num_heads, shape.head_dim)
        caches = torch.empty(
            num_layers, 2, num_slots, shape.num_kv_heads, 128, dtype=shape.dtype, device="cuda"
        )
        for layer in caches:
            layer.normal_()
        return _Layers(torch.randn(q_shape, device="cuda").to(shape.dtype), caches)

    def time(self, attention: AttentionPlan) -> float:
        return measure(
            lambda i: attention.run(self.q, self.caches[i, 0], self.caches[i, 1]), len(self.caches)
        )

    def error(self, attention: AttentionPlan, layout: AttentionLayout) -> float:
        out = attention.run(self.q, self.caches[0, 0], self.caches[0, 1]).double()
        expected = reference.paged_attention(
            self.q,
            self.caches[0, 0],
            self.caches[0, 1],
            layout.query_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            {},
        ).double()
        return float((out - expected).norm() / expected.norm())


def kv_bytes(num_slots: int, shape: AttentionShape) -> int:
    """Return what K and V of so many slots take."""
    return 2 * num_slots * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def flashinfer_decode(layers: _Layers, layout: AttentionLayout, shape: AttentionShape) -> str:
    """Return the time of FlashInfer's captured decode; "-" where it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return "-"
    from .flashinfer_attention import FlashInferDecode

    plan = FlashInferDecode(shape, [len(layers.q)], len(layout.kv_indices))
    plan.plan(layout)
    return f"{layers.time(plan):.1f}"


def flashinfer_extend(layers: _Layers, layout: AttentionLayout, shape: AttentionShape) -> str:
    """Return the time of FlashInfer's extend; "-" where it is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return "-"
    from .flashinfer_attention import FlashInferAttention

    return f"{layers.time(FlashInferAttention().plan(layout, shape)):.1f}"


def bench_decode(case: Case, rows: list[IntArray]) -> None:
    """Print a case: flat, FlashInfer, the cost model's tree, floor, the host's time to plan."""
    layout, shape = layout_of(rows), shape_of(case.heads)
    layers = _Layers.make(layout, shape)
    num_slots = int(layout.kv_indices.max()) + 1
    attention = DecodeAttention(shape, len(rows), len(layout.kv_indices))
    attention.plan(layout, is_tree=False)
    flat = layers.time(attention)
    plans = []
    for _ in range(5):
        start = time.perf_counter()
        attention.plan(layout)
        plans.append(time.perf_counter() - start)
    tree, error = layers.time(attention), layers.error(attention, layout)
    num_bytes = kv_bytes(num_slots, shape)
    floor = num_bytes / _COPY_RATE * 1e6
    _row(
        case.name, f"{flat:.1f}", flashinfer_decode(layers, layout, shape), f"{tree:.1f}",
        f"{floor:.1f}", f"{tree / floor:.2f}",
        f"{num_bytes / tree / 1e6:.2f}", f"{min(plans) * 1e6:.0f}", f"{error:.1e}",
    )  # fmt: skip


def bench_choice(num_seqs: int, shared: int, own: int) -> None:
    """Print what the cost model chose beside flat attention and beside sharing all."""
    layout = layout_of(tree_rows(((1, shared), (num_seqs, own)), seed=3))
    shape = shape_of((32, 8))
    layers = _Layers.make(layout, shape)
    times = []
    for is_tree, costs in ((False, None), (True, _SHARE_ALL), (True, None)):
        attention = DecodeAttention(shape, num_seqs, len(layout.kv_indices), costs=costs)
        attention.plan(layout, is_tree=is_tree)
        times.append(layers.time(attention))
    flat, shared_all, chosen = times
    _row(
        f"{num_seqs} on {shared}, {own} own", f"{flat:.1f}", f"{shared_all:.1f}", f"{chosen:.1f}",
        f"{chosen / min(flat, shared_all):.2f}",
    )  # fmt: skip


def bench_extend(num_seqs: int, new: int, prefix: int) -> None:
    """Print a causal extend."""
    rows = tree_rows(((num_seqs, prefix + new),), seed=4)
    layout, shape = layout_of(rows, new), shape_of((32, 8))
    layers = _Layers.make(layout, shape)
    attention = ExtendAttention(
        shape, num_seqs, num_seqs * new, len(layout.kv_indices), max_q_len=new
    )
    attention.plan(layout)
    us, error = layers.time(attention), layers.error(attention, layout)
    visible = num_seqs * (new * prefix + new * (new + 1) / 2)
    flops = 4 * visible * shape.num_heads * shape.head_dim
    _row(
        f"{num_seqs} x ({prefix} + {new})", f"{us:.1f}", flashinfer_extend(layers, layout, shape),
        f"{flops / us / 1e6:.0f}", f"{error:.1e}",
    )  # fmt: skip


def _row(*cells: str) -> None:
    sys.stdout.write("| " + " | ".join(cells) + " |\n")
    sys.stdout.flush()


def _header(title: str, *cells: str) -> None:
    sys.stdout.write(f"\n{title}\n\n")
    _row(*cells)
    _row(*["---"] * len(cells))


def main() -> None:
    """Print every table; exit with a message where there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU: no CUDA device was found")
    device = torch.cuda.get_device_name()
    sys.stdout.write(f"{device}, torch {torch.__version__}, Triton {triton.__version__}\n")
    _header(
        "Decode, µs per layer", "sequences", "flat", "FlashInfer", "chosen", "floor", "of floor",
        "TB/s once", "plan µs", "error",
    )  # fmt: skip
    rng = np.random.default_rng(1)
    lens = rng.integers(1024, 1281, 64)
    lens[:] += (74_000 - lens.sum()) // 64
    uneven = np.split(rng.permutation(int(lens.sum())), np.cumsum(lens)[:-1])
    bench_decode(Case(f"flat, 64 of {lens.min()} to {lens.max()}: {lens.sum()}", ()), uneven)
    for case in DECODES:
        bench_decode(case, tree_rows(case.levels, seed=2))
    _header("The choice, µs per layer", "sequences", "flat", "all shared", "chosen", "of best")
    for num_seqs in (2, 8, 64):
        for shared in (16, 64, 256, 1024):
            bench_choice(num_seqs, shared, 256)
    _header(
        "Extend, causal", "sequences x (prefix + new)", "µs", "FlashInfer µs", "TFLOP/s", "error"
    )
    for extend in EXTENDS:
        bench_extend(*extend)


if __name__ == "__main__":
    main()
