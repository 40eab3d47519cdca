"""The Triton attention backend: a pass of any sequences, planned as decodes and extends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from ..paged_attention import AttentionLayout, AttentionPlan, AttentionShape
from .decode_attention import DecodeAttention
from .extend_attention import ExtendAttention


class TritonAttention:
    """Plans passes of changing sizes; its buffers grow with the largest one.

    Sequences with one new row and no mask are decodes, and share what they can; the others are
    extends. For a pass that a graph captures, make a `DecodeAttention` or an `ExtendAttention`
    with fixed bounds instead.
    """

    def __init__(self) -> None:
        self._shape: AttentionShape | None = None
        self._decode: tuple[tuple[int, int], DecodeAttention] | None = None
        self._extend: tuple[tuple[int, int, int, int], ExtendAttention] | None = None

    def plan(self, layout: AttentionLayout, shape: AttentionShape) -> AttentionPlan:
        """Plan one pass."""
        if shape != self._shape:
            self._shape, self._decode, self._extend = shape, None, None
        is_decode = np.diff(layout.query_indptr) == 1
        is_decode[list(layout.masks)] = False
        decodes, extends = np.flatnonzero(is_decode), np.flatnonzero(~is_decode)
        decode = extend = None
        kv_lens = np.diff(layout.kv_indptr)
        if len(decodes):
            needs = (len(decodes), int(kv_lens[decodes].sum()))
            if self._decode is None or _exceeds(needs, self._decode[0]):
                bounds = (_roomy(needs[0]), _roomy(needs[1]))
                self._decode = bounds, DecodeAttention(shape, *bounds)
            decode = self._decode[1]
            decode.plan(layout, decodes)
        if len(extends):
            q_lens = np.diff(layout.query_indptr)[extends]
            mask = sum(mask.size for mask in layout.masks.values())
            wants = (len(extends), int(q_lens.sum()), int(kv_lens[extends].sum()), mask)
            if self._extend is None or _exceeds(wants, self._extend[0]):
                sizes = (_roomy(wants[0]), _roomy(wants[1]), _roomy(wants[2]), _roomy(wants[3]))
                self._extend = sizes, ExtendAttention(shape, *sizes)
            extend = self._extend[1]
            extend.plan(layout, extends)
        return _TritonPlan(decode, len(decodes), extend)


def _exceeds(needs: tuple[int, ...], bounds: tuple[int, ...]) -> bool:
    return any(need > bound for need, bound in zip(needs, bounds, strict=True))


def _roomy(size: int) -> int:
    return int(triton.next_power_of_2(size)) if size else 0


@dataclass(frozen=True, slots=True)
class _TritonPlan:
    decode: DecodeAttention | None
    num_decodes: int
    extend: ExtendAttention | None

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.decode is not None:
            self.decode.run_into(out, q, k_cache, v_cache, self.num_decodes)
        if self.extend is not None:
            self.extend.run_into(out, q, k_cache, v_cache)
        return out
