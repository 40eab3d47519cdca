"""Paged attention behind one plan per pass and one call per layer.

A backend turns the host's description of a pass into a plan once, and the plan runs for every
layer. Page size is 1: a page is a slot. Knows nothing of requests or of how K and V got into the
caches; all new K and V of a layer are written before the plan runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Which query rows see which slots, as host arrays.

    Sequence i owns the query rows query_indptr[i]:query_indptr[i + 1] and reads the slots
    kv_indices[kv_indptr[i]:kv_indptr[i + 1]], its new rows last. Row j of q_len sees the first
    kv_len - q_len + j + 1 slots, unless `masks[i]` [q_len, kv_len] says what it sees.
    Every sequence has 1 <= q_len <= kv_len, and every row sees at least one slot.
    """

    query_indptr: npt.NDArray[np.int64]  # [num_seqs + 1]
    kv_indptr: npt.NDArray[np.int64]  # [num_seqs + 1]
    kv_indices: npt.NDArray[np.int64]  # [kv_indptr[-1]]
    masks: Mapping[int, npt.NDArray[np.bool_]]

    def select(self, members: npt.NDArray[np.int64]) -> AttentionLayout:
        """Return the pass of these sequences alone, in this order."""
        q_lens, kv_lens = np.diff(self.query_indptr), np.diff(self.kv_indptr)
        spans = zip(self.kv_indptr[members], self.kv_indptr[members + 1], strict=True)
        return AttentionLayout(
            np.concatenate([[0], np.cumsum(q_lens[members])]),
            np.concatenate([[0], np.cumsum(kv_lens[members])]),
            np.concatenate([self.kv_indices[start:stop] for start, stop in spans]),
            {i: self.masks[seq] for i, seq in enumerate(members.tolist()) if seq in self.masks},
        )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a plan must know of the layers it will run in."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class AttentionPlan(Protocol):
    """A pass, planned; valid until the next pass of the same backend is planned."""

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return the attention output [num_tokens, num_heads, head_dim] of one layer.

        q: [num_tokens, num_heads, head_dim]; caches: [num_slots, num_kv_heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans."""

    def plan(self, layout: AttentionLayout, shape: AttentionShape) -> AttentionPlan:
        """Plan one pass. `layout` is the caller's and is not kept."""
        ...


class DecodePlan(AttentionPlan, Protocol):
    """Plans of decode passes at fixed addresses: a graph that captured `run` serves them all.

    Made for some numbers of rows and slots. One query row per sequence, in the order planned; what
    comes out in rows past the planned ones is finite. What comes out in a row depends on its own
    query and slots alone, even where another's hold NaN: a sequence may end and leave its place,
    whatever `advance` brings it and whoever writes to its slots from then on.
    """

    @property
    def room(self) -> int:
        """Steps that `advance` can still take before the next plan."""
        ...

    def plan(self, layout: AttentionLayout, *, room: int = 0, num_new: int = 0) -> None:
        """Plan a pass of decodes, the last `num_new` slots of each left for `advance` to bring.

        Every sequence may then grow by `room` slots, or by fewer, as the plan's own `room` says:
        one that can't grow on the device takes all slots of `layout` at once, ignores `advance`,
        and has no room. Raises ValueError where the pass has more sequences or slots than the plan
        was made for.
        """
        ...

    def advance(self, slots: Tensor) -> None:
        """Queue one more slot for each planned sequence: slots[i] for sequence i."""
        ...

    def advanced(self) -> None:
        """Count a step of `advance` that a captured graph took."""
        ...


class ExtendPlan(AttentionPlan, Protocol):
    """Plans of passes of any sequences at fixed addresses, for one captured number of tokens.

    Rows that no sequence of the plan owns come out undefined.
    """

    def plan(self, layout: AttentionLayout) -> None:
        """Plan a pass. Raises ValueError where it needs more room than the plan was made for."""
        ...
