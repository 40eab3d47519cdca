"""Paged attention by torch's scaled_dot_product_attention: the backend of the CPU.

Sequences of like lengths are padded into groups, each one gather and one SDPA call per layer, so
that a batch of decodes is a single call. A layer runs no Python per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from .paged_attention import AttentionLayout, AttentionPlan, AttentionShape

# The cost of a group in units of one query row meeting one slot, measured on two AVX-512 cores:
# gathering a slot's K and V costs about 15, a call with its gather about 2,000.
_GATHER_COST = 15
_CALL_COST = 2000

IntArray = npt.NDArray[np.int64]


class TorchAttention:
    """Plans a pass as a few padded SDPA calls; works on any device."""

    def plan(self, layout: AttentionLayout, shape: AttentionShape) -> AttentionPlan:
        """Plan one pass."""
        q_lens = np.diff(layout.query_indptr)
        kv_lens = np.diff(layout.kv_indptr)
        groups: list[_Group] = []
        # where each row of q comes out, when the groups' outputs are laid end to end
        out_rows = np.empty(int(layout.query_indptr[-1]), np.int64)
        base = 0
        for members in _like_lengths(q_lens, kv_lens, layout):
            group = _plan_group(members, q_lens[members], kv_lens[members], layout, shape)
            for i, seq in enumerate(members.tolist()):
                start = base + i * group.max_q
                stop = start + int(q_lens[seq])
                out_rows[layout.query_indptr[seq] : layout.query_indptr[seq + 1]] = np.arange(
                    start, stop
                )
            base += group.size * group.max_q
            groups.append(group)
        in_order = base == len(out_rows) and bool((np.diff(out_rows) == 1).all())
        return _TorchPlan(
            groups, None if in_order else torch.as_tensor(out_rows, device=shape.device)
        )


def _like_lengths(
    q_lens: IntArray, kv_lens: IntArray, layout: AttentionLayout
) -> Iterator[IntArray]:
    """Split the sequences into groups whose padding costs less than one more call would.

    A sequence without a prefix needs no mask (the call's own causal one is right for padded rows
    too), so those are never mixed with the others.
    """
    causal = q_lens == kv_lens
    for seq in layout.masks:
        causal[seq] = False
    group: list[int] = []
    max_q = max_kv = cost = 0
    for seq in np.lexsort((kv_lens, q_lens, causal)).tolist():
        q_len, kv_len = int(q_lens[seq]), int(kv_lens[seq])
        wide_q, wide_kv = max(max_q, q_len), max(max_kv, kv_len)
        alone = _cost(1, q_len, kv_len)
        together = _cost(len(group) + 1, wide_q, wide_kv)
        if group and (causal[seq] != causal[group[0]] or together > cost + alone + _CALL_COST):
            yield np.asarray(group, np.int64)
            group = []
            wide_q, wide_kv, together = q_len, kv_len, alone
        group.append(seq)
        max_q, max_kv, cost = wide_q, wide_kv, together
    if group:
        yield np.asarray(group, np.int64)


def _cost(size: int, q_len: int, kv_len: int) -> int:
    return size * kv_len * (_GATHER_COST + q_len)


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences padded to the same shape."""

    size: int
    max_q: int
    max_kv: int
    q_rows: Tensor  # [size * max_q] rows of q; padding repeats a sequence's last row
    kv_slots: Tensor  # [size * max_kv] padding repeats a sequence's last slot
    mask: Tensor | None  # [size, 1, max_q, max_kv] additive, in the dtype of q
    causal: bool

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return [size * max_q, num_heads, head_dim]."""
        # index_select, since k_cache[slots] is several times slower on a CPU
        queries = torch.unflatten(q.index_select(0, self.q_rows), 0, (self.size, self.max_q))
        keys = torch.unflatten(k_cache.index_select(0, self.kv_slots), 0, (self.size, self.max_kv))
        values = torch.unflatten(
            v_cache.index_select(0, self.kv_slots), 0, (self.size, self.max_kv)
        )
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=self.mask,
            is_causal=self.causal,
            enable_gqa=q.shape[1] != k_cache.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)


def _plan_group(
    members: IntArray,
    q_lens: IntArray,
    kv_lens: IntArray,
    layout: AttentionLayout,
    shape: AttentionShape,
) -> _Group:
    max_q, max_kv = int(q_lens.max()), int(kv_lens.max())
    q_at = np.minimum(np.arange(max_q), q_lens[:, None] - 1)  # [size, max_q]
    kv_at = np.minimum(np.arange(max_kv), kv_lens[:, None] - 1)  # [size, max_kv]
    slots = layout.kv_indices[layout.kv_indptr[members, None] + kv_at]
    masked = [i for i, seq in enumerate(members.tolist()) if seq in layout.masks]
    causal = not masked and bool((q_lens == kv_lens).all())
    mask: Tensor | None = None
    if not causal and (masked or max_q > 1 or bool((kv_lens != max_kv).any())):
        # row j sees slots up to its own; a padded row sees what the sequence's last row sees
        visible = np.arange(max_kv) <= ((kv_lens - q_lens)[:, None] + q_at)[:, :, None]
        for i in masked:
            q_len, kv_len = int(q_lens[i]), int(kv_lens[i])
            visible[i, :q_len, :kv_len] = layout.masks[int(members[i])]
        additive = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
        mask = torch.as_tensor(additive, device=shape.device).to(shape.dtype)
    q_rows = layout.query_indptr[members, None] + q_at
    return _Group(
        size=len(members),
        max_q=max_q,
        max_kv=max_kv,
        q_rows=torch.as_tensor(q_rows.reshape(-1), device=shape.device),
        kv_slots=torch.as_tensor(slots.reshape(-1), device=shape.device),
        mask=mask,
        causal=causal and max_q > 1,
    )


@dataclass(frozen=True, slots=True)
class _TorchPlan:
    groups: list[_Group]
    out_rows: Tensor | None = field(default=None)  # [num_tokens]; None where already in order

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        outs = [group.run(q, k_cache, v_cache) for group in self.groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self.out_rows is None else out.index_select(0, self.out_rows)
