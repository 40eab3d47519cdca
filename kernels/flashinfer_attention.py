"""FlashInfer attention: paged decodes and causal extends by the wrappers of flashinfer-python.

What FlashInfer is not given (rows under a mask, and what the choice leaves out) is Triton's.
Importing this needs both packages; dispatch.py decides who takes what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import flashinfer
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .paged_attention import AttentionLayout, AttentionPlan, AttentionShape
from .staging import Staging, new_event
from .triton import TritonAttention

IntArray = npt.NDArray[np.int64]

_PAGE_SIZE = 1
_GRAPH_PLAN_BYTES = 1 << 20  # a captured plan: 16 bytes for each row and part of a sequence
_PARTIAL_BYTES = 4  # per component: what is merged is float32


class FlashInferAttention:
    """Plans passes of changing sizes: FlashInfer's part, and Triton's for the rest.

    FlashInfer takes sequences without a mask: decodes if `takes_decodes`, and extends of at least
    `min_new` tokens where a pass has `min_total` in such ones.
    """

    def __init__(self, *, takes_decodes: bool = True, min_new: int = 1, min_total: int = 1) -> None:
        self._takes_decodes = takes_decodes
        self._min_new, self._min_total = min_new, min_total
        self._rest = TritonAttention()
        self._shape: AttentionShape | None = None

    def plan(self, layout: AttentionLayout, shape: AttentionShape) -> AttentionPlan:
        """Plan one pass."""
        if shape != self._shape:
            self._shape = shape
            workspace = _workspace(shape)
            self._decodes = _Decodes(shape, workspace)
            self._extends = _Extends(shape, workspace)
        q_lens = np.diff(layout.query_indptr)
        is_plain = np.ones(len(q_lens), np.bool_)
        is_plain[list(layout.masks)] = False
        is_decode = is_plain & (q_lens == 1) & self._takes_decodes
        is_extend = is_plain & (q_lens > 1) & (q_lens >= self._min_new)
        is_extend &= int(q_lens[is_extend].sum()) >= self._min_total
        parts: list[_Part] = []
        for takes, planned in ((is_decode, self._decodes), (is_extend, self._extends)):
            if takes.any():
                part = layout.select(np.flatnonzero(takes))
                planned.plan(part)
                parts.append(_Part(planned, _rows(layout, takes, shape.device)))
        is_rest = ~(is_decode | is_extend)
        if is_rest.any():
            plan = self._rest.plan(layout.select(np.flatnonzero(is_rest)), shape)
            parts.append(_Part(plan, _rows(layout, is_rest, shape.device)))
        return _PartsPlan(parts)


class FlashInferDecode:
    """A `DecodePlan`: captured decode passes of `sizes` rows each, which share their memory.

    FlashInfer cuts a step into work on the host, so a plan holds for one step and has no room: the
    slots that are left for `advance` are planned at once. Rows past the planned sequences read the
    first slot that is planned: what comes out there is finite, and nobody's.
    """

    def __init__(self, shape: AttentionShape, sizes: Sequence[int], max_slots: int) -> None:
        self._shape, self._sizes = shape, sorted(sizes)
        most = self._sizes[-1]
        device = shape.device
        workspace = _workspace(shape, most)
        # a replay reads these after its own plan has filled them, so all sizes take the same
        plan_memory = torch.empty(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=device)
        indptr, page_lens = torch.zeros(2, most + 1, dtype=torch.int32, device=device)
        self._indices = Staging(torch.zeros(max_slots, dtype=torch.int32, device=device))
        self._wrappers: dict[int, _Wrapper] = {}
        for size in self._sizes:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=_pays_tensor_cores(shape),
                paged_kv_indptr_buffer=indptr[: size + 1],
                paged_kv_indices_buffer=self._indices.target,
                paged_kv_last_page_len_buffer=page_lens[:size],
            )
            wrapper.reset_workspace_buffer(workspace, plan_memory)
            self._wrappers[size] = _Wrapper(wrapper, shape)

    @property
    def room(self) -> int:
        """Always 0: every step is planned."""
        return 0

    def plan(self, layout: AttentionLayout, *, room: int = 0, num_new: int = 0) -> None:
        """Plan a step for the smallest size that holds it; see `DecodePlan.plan`."""
        num_seqs = len(layout.kv_indptr) - 1
        if num_seqs > self._sizes[-1]:
            raise ValueError(
                f"a plan has {num_seqs} sequences, made for {self._sizes[-1]}; make it for more"
            )
        size = next(size for size in self._sizes if size >= num_seqs)
        used, num_slots = int(layout.kv_indptr[-1]), int(layout.kv_indptr[-1]) + size - num_seqs
        if num_slots > len(self._indices.target):
            raise ValueError(
                f"a plan needs {num_slots} slots, made for {len(self._indices.target)}; make it "
                "for more"
            )
        indices = self._indices.take(num_slots)
        indices[:used], indices[used:] = layout.kv_indices, layout.kv_indices[0]
        indptr = np.concatenate([layout.kv_indptr, np.arange(used, num_slots) + 1])
        self._wrappers[size].plan(
            _host(indptr, self._shape.device),
            self._indices.send(num_slots),
            _ones(size, self._shape),
        )

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return the attention output; q has as many rows as one of the sizes."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._wrappers[len(q)].run_into(out, q, k_cache, v_cache)
        return out

    def advance(self, slots: Tensor) -> None:
        """Queue nothing: the slots are in the plan."""

    def advanced(self) -> None:
        """Count nothing."""


class _Wrapper:
    """A wrapper of FlashInfer for layers of one shape.

    A plan is copied to the device from page-locked memory that the wrapper owns: the next one waits
    until that is done.
    """

    def __init__(self, wrapper: Any, shape: AttentionShape) -> None:
        self._wrapper, self._shape = wrapper, shape
        self._sent = new_event() if shape.device.type == "cuda" else None

    def plan(self, *arrays: Tensor, **options: Any) -> None:
        shape = self._shape
        if self._sent is not None:
            self._sent.synchronize()
        self._wrapper.plan(
            *arrays, shape.num_heads, shape.num_kv_heads, shape.head_dim, _PAGE_SIZE,
            q_data_type=shape.dtype, kv_data_type=shape.dtype, **options,
        )  # fmt: skip
        if self._sent is not None:
            self._sent.record()

    def run_into(self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        # without one to write to, FlashInfer would fill a new one with zeros first
        self._wrapper.run(q, (k_cache.unsqueeze(1), v_cache.unsqueeze(1)), out=out)


class _Decodes:
    """One new token for each sequence."""

    def __init__(self, shape: AttentionShape, workspace: Tensor) -> None:
        self._shape = shape
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=_pays_tensor_cores(shape)
        )
        self._wrapper = _Wrapper(wrapper, shape)

    def plan(self, layout: AttentionLayout) -> None:
        device = self._shape.device
        self._wrapper.plan(
            _host(layout.kv_indptr, device),
            _host(layout.kv_indices, device),
            _ones(len(layout.kv_indptr) - 1, self._shape),
        )

    def run_into(self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        self._wrapper.run_into(out, q, k_cache, v_cache)


class _Extends:
    """New tokens over their prefix and themselves: fa3 where the device has it, else fa2."""

    def __init__(self, shape: AttentionShape, workspace: Tensor) -> None:
        self._shape = shape
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
        self._wrapper = _Wrapper(wrapper, shape)

    def plan(self, layout: AttentionLayout) -> None:
        device = self._shape.device
        self._wrapper.plan(
            _host(layout.query_indptr, device),
            _host(layout.kv_indptr, device),
            _host(layout.kv_indices, device),
            _ones(len(layout.kv_indptr) - 1, self._shape),
            causal=True,
            max_token_per_sequence=int(np.diff(layout.query_indptr).max()),
        )

    def run_into(self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        self._wrapper.run_into(out, q, k_cache, v_cache)


def load_extends(shape: AttentionShape) -> None:
    """Load the kernels of extends, compiled the first time, which takes a minute.

    Raises RuntimeError or OSError where they are not there and cannot be compiled.
    """
    pair = np.asarray([0, 2])
    _Extends(shape, _workspace(shape)).plan(AttentionLayout(pair, pair, np.arange(2), {}))


class _PlannedPart(Protocol):
    """Sequences that are planned. They write all rows of a contiguous `out`."""

    def run_into(self, out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """Some sequences of a pass, planned, and their rows of q."""

    plan: _PlannedPart
    rows: slice | Tensor


@dataclass(frozen=True, slots=True)
class _PartsPlan:
    parts: list[_Part]

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in self.parts:
            rows = part.rows
            if isinstance(rows, slice):
                part.plan.run_into(out[rows], q[rows], k_cache, v_cache)
            else:  # neither reads nor writes rows that lie apart
                apart = q[rows]
                written = torch.empty_like(apart)
                part.plan.run_into(written, apart, k_cache, v_cache)
                out[rows] = written
        return out


def _rows(
    layout: AttentionLayout, takes: npt.NDArray[np.bool_], device: torch.device
) -> slice | Tensor:
    """Return the rows of q that these sequences own: a slice where they lie side by side."""
    rows = np.flatnonzero(np.repeat(takes, np.diff(layout.query_indptr)))
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        return slice(first, last + 1)
    return _host(rows, device, torch.int64).to(device, non_blocking=True)


def _host(array: IntArray, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return a copy on the host, page-locked where there is a device to copy it to.

    FlashInfer plans from it there, and its own copy to the device needs no waiting.
    """
    tensor = torch.from_numpy(array).to(dtype)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _ones(num_seqs: int, shape: AttentionShape) -> Tensor:
    """Return how full each sequence's last page is, on the host: pages hold one slot."""
    return _host(np.ones(num_seqs, np.int64), shape.device)


def _pays_tensor_cores(shape: AttentionShape) -> bool:
    """Whether a group's heads fill enough of a tensor core's tile; others are bound by it.

    Groups of 4 (32 heads of 8 KV heads) on an H200: 0.084 ms against 0.122.
    """
    return shape.num_heads // shape.num_kv_heads >= 4


def _workspace(shape: AttentionShape, max_captured: int = 0) -> Tensor:
    """Return memory for the partial results of whatever is planned, zeros as FlashInfer asks.

    FlashInfer splits sequences until two blocks run on every SM, of up to 128 rows each; a captured
    plan of tensor cores has a block for each sequence besides.
    """
    sms = 1
    if shape.device.type == "cuda":
        sms = torch.cuda.get_device_properties(shape.device).multi_processor_count
    group = shape.num_heads // shape.num_kv_heads
    tile = 16 if group <= 16 else 128
    captured = tile * (max_captured * group // tile + max_captured + 1)
    rows = max(128 * (2 * sms // shape.num_kv_heads + 1), captured)
    # one component more for the log-sum-exp
    size = _PARTIAL_BYTES * shape.num_heads * (shape.head_dim + 1) * rows + (1 << 20)
    return torch.zeros(size, dtype=torch.uint8, device=shape.device)
