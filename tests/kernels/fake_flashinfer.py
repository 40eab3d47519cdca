"""Stands in for flashinfer-python: its two wrappers, by the definition of attention, on a CPU.

It holds its caller to what the real wrappers ask (int32 arrays on the host, pages of one slot, one
batch size where graphs are captured) and reads what the real kernels read: with graphs that is the
buffers given at the start, never the arrays of a plan. Arguments have the names they have there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from umbel.kernels import reference

OURS = "umbel.kernels.flashinfer_attention"

#: what was planned, newest last: the wrapper, and each sequence's new tokens
PLANS: list[tuple[object, list[int]]] = []


@contextmanager
def installed() -> Iterator[ModuleType]:
    """Put the stand-in where FlashInfer would be; yields our module over it."""
    before = {name: sys.modules.pop(name, None) for name in ("flashinfer", OURS)}
    sys.modules["flashinfer"] = sys.modules[__name__]
    PLANS.clear()
    try:
        yield importlib.import_module(OURS)
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


class _Planned:
    """What the last plan left."""

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8
        assert not workspace.any(), "zeros at first"
        self._q_indptr, self._indptr, self._indices = (torch.zeros(1) for _ in range(3))
        self._dtypes: tuple[torch.dtype, torch.dtype] | None = None

    def _keep(
        self,
        arrays: tuple[Tensor, Tensor, Tensor, Tensor],
        shape: tuple[int, int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        q_indptr, indptr, indices, last_page_len = arrays
        assert all(array.dtype == torch.int32 for array in arrays)
        assert len(q_indptr) == len(indptr) == len(last_page_len) + 1
        assert len(indices) == indptr[-1]
        num_heads, num_kv_heads, self._head_dim, page_size = shape
        assert page_size == 1
        assert (last_page_len == 1).all()
        assert num_heads % num_kv_heads == 0
        self._heads, self._dtypes = (num_heads, num_kv_heads), dtypes
        self._q_indptr, self._indptr, self._indices = (
            x.clone() for x in (q_indptr, indptr, indices)
        )
        PLANS.append((self, q_indptr.diff().tolist()))

    def _attend(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        k_pages, v_pages = paged_kv_cache
        assert k_pages.shape[1:] == (1, self._heads[1], self._head_dim)
        assert q.shape == (self._q_indptr[-1], self._heads[0], self._head_dim)
        assert (q.dtype, k_pages.dtype) == self._dtypes
        assert out.is_contiguous()
        q_indptr, indptr, indices = (
            x.numpy().astype(np.int64) for x in (self._q_indptr, self._indptr, self._indices)
        )
        k, v = k_pages[:, 0], v_pages[:, 0]
        out.copy_(reference.paged_attention(q, k, v, q_indptr, indptr, indices, {}))
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer)
        assert kv_layout == "NHD"
        self.use_tensor_cores = use_tensor_cores
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype = torch.float16,
    ) -> None:
        if self._buffers is not None:
            assert len(last_page_len) == len(self._buffers[2]), "the batch size is fixed"
            for buffer, array in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(array)].copy_(array)
        self._keep(
            (torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_data_type, kv_data_type),
        )

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        if self._buffers is not None:
            self._indptr, self._indices, _ = self._buffers
        return self._attend(q, paged_kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        super().__init__(float_workspace_buffer)
        assert (kv_layout, backend) == ("NHD", "auto")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype = torch.float16,
        max_token_per_sequence: int,
    ) -> None:
        assert causal
        assert max_token_per_sequence == qo_indptr.diff().max()
        self._keep(
            (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            (q_data_type, kv_data_type),
        )

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self._attend(q, paged_kv_cache, out)
