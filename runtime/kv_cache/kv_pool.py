"""The K and V tensors, slot by slot; knows nothing of who holds a slot."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class KVPool:
    """Keys and values of `num_slots` tokens in every layer (page size 1: a page is a slot).

    `k[layer]` and `v[layer]` are [num_slots + 1, num_kv_heads, head_dim]: the last one takes
    what rows that only pad a batch write. The memory is zeroed, so that a slot nobody has written
    yet, read by such a row, is no NaN.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots + 1, num_kv_heads, head_dim)
        self.num_slots = num_slots
        self.k: list[Tensor] = list(_zeros(shape, dtype, device).unbind())
        self.v: list[Tensor] = list(_zeros(shape, dtype, device).unbind())
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    @property
    def spare_slot(self) -> int:
        """The slot that no request holds."""
        return self.num_slots

    @property
    def num_bytes(self) -> int:
        """Memory held by the pool."""
        return self.num_slots * self.bytes_per_token


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU their memory is taken page by page when it is first written.

    torch.zeros writes every page: 5 s and more for the gigabytes that a pool may grow to.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
