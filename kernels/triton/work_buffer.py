"""Plans on the device: named int32 arrays at fixed addresses, sent in one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..staging import Staging

IntArray = npt.NDArray[np.int64]
AnyIntArray = npt.NDArray[np.integer]


class WorkBuffer:
    """Named int32 arrays of fixed sizes in one device tensor.

    The addresses never change, so a captured graph sees whatever was sent last. The array that
    varies most in length comes last: what lies behind its end is not sent.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        # 16-byte steps keep every array aligned for wide loads
        steps = [-(-size // 4) * 4 for size in sizes.values()]
        ends = np.cumsum([0, *steps]).tolist()
        self._starts = dict(zip(sizes, ends, strict=False))
        self._sizes = dict(sizes)
        self._memory = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._arrays = {
            name: self._memory[start : start + sizes[name]] for name, start in self._starts.items()
        }
        self._staging = Staging(self._memory)

    def __getitem__(self, name: str) -> Tensor:
        """Return an array on the device."""
        return self._arrays[name]

    def room(self, name: str) -> int:
        """Return the size of an array."""
        return self._sizes[name]

    def fits(self, arrays: Mapping[str, AnyIntArray]) -> bool:
        """Whether every array has room."""
        return all(len(array) <= self._sizes[name] for name, array in arrays.items())

    def check(self, arrays: Mapping[str, AnyIntArray]) -> None:
        """Raise ValueError where one does not fit."""
        for name, array in arrays.items():
            if len(array) > self._sizes[name]:
                raise ValueError(
                    f"a plan needs {len(array)} of {name!r}, the buffer holds {self._sizes[name]}; "
                    "make it for more sequences or slots"
                )

    def send(self, arrays: Mapping[str, AnyIntArray]) -> None:
        """Copy arrays to the device without waiting for it; each may be shorter than its room.

        Raises ValueError where one does not fit.
        """
        self.check(arrays)
        used = max(self._starts[name] + len(array) for name, array in arrays.items())
        memory = self._staging.take(used)
        for name, array in arrays.items():
            start = self._starts[name]
            memory[start : start + len(array)] = array
        self._staging.send(used)


def place_partials(
    first_rows: IntArray, num_rows: IntArray, total_rows: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Give every row that an item covers a place for its partial, those of one row side by side.

    Item i covers the rows first_rows[i] + j for j < num_rows[i]. Returns the places, item after
    item, and for each of `total_rows` rows where its places start and stop.
    """
    within = np.arange(int(num_rows.sum())) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    rows = np.repeat(first_rows, num_rows) + within
    places = np.empty(len(rows), np.int64)
    places[np.argsort(rows, kind="stable")] = np.arange(len(rows))
    stops = np.cumsum(np.bincount(rows, minlength=total_rows))
    return places, np.concatenate([[0], stops[:-1]]), stops
