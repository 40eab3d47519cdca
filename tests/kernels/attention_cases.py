"""Random attention passes: sequences that share slots as a radix tree would, over a random pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from umbel.kernels import AttentionLayout, AttentionShape, reference

IntArray = npt.NDArray[np.int64]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tree_rows(levels: Sequence[tuple[int, int]], rng: np.random.Generator) -> list[IntArray]:
    """Return the slots of every leaf of a tree: at each level (children, slots of each)."""
    paths: list[list[IntArray]] = [[]]
    size = 0
    for children, length in levels:
        grown = []
        for path in paths:
            for _ in range(children):
                grown.append([*path, np.arange(size, size + length)])
                size += length
        paths = grown
    places = rng.permutation(size)
    rows = [places[np.concatenate(path)] for path in paths]
    return [rows[i] for i in rng.permutation(len(rows))]


def layout_of(
    rows: Sequence[IntArray],
    q_lens: Sequence[int] | None = None,
    masks: dict[int, npt.NDArray[np.bool_]] | None = None,
) -> AttentionLayout:
    """Return a pass over these slots, of one new token each unless `q_lens` says more."""
    return AttentionLayout(
        query_indptr=np.cumsum([0, *(q_lens or [1] * len(rows))]),
        kv_indptr=np.cumsum([0, *map(len, rows)]),
        kv_indices=np.concatenate(rows),
        masks=masks or {},
    )


def random_extend(rng: np.random.Generator, longest: int) -> AttentionLayout:
    """Return a pass of decodes and extends, some under a mask."""
    num_seqs = int(rng.integers(1, 6))
    q_lens = rng.choice([1, 1, 2, 5, longest], num_seqs).tolist()
    prefixes = rng.choice([0, 1, 7, longest, 3 * longest], num_seqs).tolist()
    pool = rng.permutation(5 * longest)
    rows = [rng.permutation(pool)[: q + prefix] for q, prefix in zip(q_lens, prefixes, strict=True)]
    masks = {}
    for i, (q_len, prefix) in enumerate(zip(q_lens, prefixes, strict=True)):
        if rng.random() < 0.3:
            mask = rng.random((q_len, prefix + q_len)) < 0.4
            mask[:, prefix:] |= np.eye(q_len, dtype=np.bool_)
            # a select's rows all see their context
            mask[:, :prefix] |= rng.random() < 0.6
            masks[i] = mask
    return layout_of(rows, q_lens, masks)


@dataclass(frozen=True)
class Tensors:
    """What a layer passes to a plan."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor

    def oracle(self, layout: AttentionLayout) -> Tensor:
        return reference.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            layout.query_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            layout.masks,
        )


def tensors_for(layout: AttentionLayout, shape: AttentionShape, seed: int) -> Tensors:
    """Return random tensors: q inside a merged row, and NaN in every slot that nobody reads."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_slots = int(layout.query_indptr[-1]), int(layout.kv_indices.max()) + 3
    merged = torch.randn(num_tokens, shape.num_heads + 3, shape.head_dim, generator=generator)
    caches = torch.full((2, num_slots, shape.num_kv_heads, shape.head_dim), torch.nan)
    used = torch.as_tensor(np.unique(layout.kv_indices))
    caches[:, used] = torch.randn(2, len(used), *caches.shape[2:], generator=generator)
    merged, caches = (x.to(shape.device, shape.dtype) for x in (merged, caches))
    return Tensors(merged[:, 1:-2], caches[0], caches[1])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm())
