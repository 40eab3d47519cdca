"""Many byte strings as two arrays, which travel between processes without being copied one by one.

Knows nothing of what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class PackedBytes(NamedTuple):
    """The strings one after the other, and their lengths."""

    data: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]  # [num_strings]

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> PackedBytes:
        """Pack strings."""
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return cls(np.frombuffer(b"".join(strings), np.uint8), lengths)

    def strings(self) -> Iterator[bytes]:
        """Yield one string after the other."""
        view, start = self.data.data, 0
        for length in self.lengths.tolist():
            yield bytes(view[start : start + length])
            start += length
