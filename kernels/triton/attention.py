"""Triton attention for passes of any sequences, each planned as a decode or as an extend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from ..paged_attention import AttentionLayout, AttentionShape
from .decode_attention import DecodeAttention
from .decode_work import DecodeTiles
from .extend_attention import ExtendAttention, ExtendTiles, is_short

IntArray = npt.NDArray[np.int64]

# captured passes of so many tokens are decodes beside a few short extends (jumps, forks, literals),
# whose tiles are those of one new token
_FEW_TOKENS = 128

# sequences that a captured pass may extend: each is a program at least, which takes time where it
# has nothing to do
_MAX_EXTENDS = 128


class TritonAttention:
    """Plans passes of changing sizes; its buffers grow with the largest one.

    Sequences with one new row and no mask are decodes, and share what they can; the others are
    extends. For a pass that a graph captures, make a `DecodeAttention` or a `MixedAttention`
    with fixed bounds instead.
    """

    def __init__(self) -> None:
        self._shape: AttentionShape | None = None
        self._decode: tuple[tuple[int, ...], DecodeAttention] | None = None
        # by whether all sequences are short: those take other tiles
        self._extends: dict[bool, tuple[tuple[int, ...], ExtendAttention]] = {}

    def plan(self, layout: AttentionLayout, shape: AttentionShape) -> TritonPlan:
        """Plan one pass."""
        if shape != self._shape:
            self._shape, self._decode, self._extends = shape, None, {}
        q_lens, kv_lens = np.diff(layout.query_indptr), np.diff(layout.kv_indptr)
        decodes, extends = _by_kind(layout)
        decode = extend = None
        if len(decodes):
            decode = self._decode_for(shape, len(decodes), int(kv_lens[decodes].sum()))
            decode.plan(layout, decodes)
        if len(extends):
            extend = self._extend_for(
                shape,
                int(q_lens[extends].max()),
                len(extends),
                int(q_lens[extends].sum()),
                int(kv_lens[extends].sum()),
                sum(mask.size for mask in layout.masks.values()),
            )
            extend.plan(layout, extends)
        return TritonPlan(decode, len(decodes), extend)

    def _decode_for(self, shape: AttentionShape, *needs: int) -> DecodeAttention:
        if self._decode is None or not _holds(self._decode[0], needs):
            num_seqs, num_slots = bounds = _roomy(needs)
            self._decode = bounds, DecodeAttention(shape, num_seqs, num_slots)
        return self._decode[1]

    def _extend_for(self, shape: AttentionShape, max_q_len: int, *needs: int) -> ExtendAttention:
        key = is_short(shape, max_q_len)
        if key not in self._extends or not _holds(self._extends[key][0], needs):
            num_seqs, num_tokens, num_slots, num_mask_bytes = bounds = _roomy(needs)
            extend = ExtendAttention(
                shape, num_seqs, num_tokens, num_slots, num_mask_bytes, max_q_len=max_q_len
            )
            self._extends[key] = bounds, extend
        return self._extends[key][1]


class MixedAttention:
    """Passes of up to `max_tokens` tokens of any sequences, for a graph that captures `run`.

    Up to 128 of them may be extends. Room is for `max_slots` slots that decodes read and as many
    that extends do, and for masks of `max_mask` bytes. All device memory is taken here.
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_tokens: int,
        max_slots: int,
        max_mask: int,
        *,
        decode_tiles: DecodeTiles | None = None,
        extend_tiles: ExtendTiles | None = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._decode = DecodeAttention(shape, max_tokens, max_slots, tiles=decode_tiles)
        self._extend = ExtendAttention(
            shape,
            min(max_tokens, _MAX_EXTENDS),
            max_tokens,
            max_slots,
            max_mask,
            max_q_len=1 if max_tokens <= _FEW_TOKENS else max_tokens,
            is_captured=True,
            tiles=extend_tiles,
        )

    def plan(self, layout: AttentionLayout) -> None:
        """Plan a pass. Raises ValueError where it needs more room than there is."""
        decodes, extends = _by_kind(layout)
        for attention, members in ((self._decode, decodes), (self._extend, extends)):
            if len(members):
                attention.plan(layout, members)
            else:
                attention.plan_nothing()

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return the attention output; shapes as in `AttentionPlan.run`."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._decode.run_into(out, q, k_cache, v_cache, self._max_tokens)
        self._extend.run_into(out, q, k_cache, v_cache)
        return out


def _by_kind(layout: AttentionLayout) -> tuple[IntArray, IntArray]:
    """Return which sequences are decodes, and which are not."""
    is_decode = np.diff(layout.query_indptr) == 1
    is_decode[list(layout.masks)] = False
    return np.flatnonzero(is_decode), np.flatnonzero(~is_decode)


def _holds(bounds: tuple[int, ...], needs: tuple[int, ...]) -> bool:
    return all(need <= bound for need, bound in zip(needs, bounds, strict=True))


def _roomy(needs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(triton.next_power_of_2(need)) if need else 0 for need in needs)


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A pass as its decodes and its extends, an `AttentionPlan`."""

    decode: DecodeAttention | None
    num_decodes: int
    extend: ExtendAttention | None

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return the attention output; shapes as in `AttentionPlan.run`."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.run_into(out, q, k_cache, v_cache)
        return out

    def run_into(self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """Write all rows of `out`, which is contiguous."""
        if self.decode is not None:
            self.decode.run_into(out, q, k_cache, v_cache, self.num_decodes)
        if self.extend is not None:
            self.extend.run_into(out, q, k_cache, v_cache)
