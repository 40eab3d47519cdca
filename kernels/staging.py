"""From host arrays to a device tensor without waiting; knows nothing of what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NUM_BUFFERS = 3  # copies that may be under way at once
_FIRST_ITEMS = 1024  # that an ArraySender has room for, until it is given more


def new_event() -> torch.cuda.Event:
    """Return an event to wait for."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class Staging:
    """Feeds one device tensor [size] from page-locked memory, the first items at a time.

    `take`, fill what it returns, then `send`. On a CPU the tensor itself is filled.
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target
        self._buffers: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0
        if target.device.type == "cuda":
            self._buffers = [
                torch.zeros(target.shape, dtype=target.dtype, pin_memory=True)
                for _ in range(_NUM_BUFFERS)
            ]
            self._events = [new_event() for _ in range(_NUM_BUFFERS)]

    def take(self, num_items: int) -> npt.NDArray[Any]:
        """Return memory for the first items; waits only where all buffers are on their way."""
        assert num_items <= len(self.target), f"{num_items} items, room for {len(self.target)}"
        if not self._buffers:
            return self.target[:num_items].numpy()
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        self._events[self._turn].synchronize()
        return self._buffers[self._turn][:num_items].numpy()

    def send(self, num_items: int) -> Tensor:
        """Queue the copy of what was taken last; return the items on the device."""
        if self._buffers:
            buffer = self._buffers[self._turn]
            self.target[:num_items].copy_(buffer[:num_items], non_blocking=True)
            self._events[self._turn].record()
        return self.target[:num_items]


class ArraySender:
    """Sends arrays of one type and any length to a device; each takes the place of the last."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._staging = Staging(torch.zeros(_FIRST_ITEMS, dtype=dtype, device=device))

    def send(self, *arrays: npt.NDArray[Any]) -> Tensor:
        """Queue the copy of all items, one array after the other; return them on the device.

        They are there until the next call, for what is launched on the stream before it.
        """
        size = sum(map(len, arrays))
        target = self._staging.target
        if size > len(target):
            self._staging = Staging(target.new_zeros(2 * size))
        np.concatenate(arrays, out=self._staging.take(size))
        return self._staging.send(size)
