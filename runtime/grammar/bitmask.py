"""The allowed tokens of a batch as packed bits; knows no grammar and no device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from .matcher import BitmaskRow


class TokenBitmask:
    """A reusable int32 buffer [max_rows, ceil(vocab_size / 32)], one row per request.

    The numpy and the torch view share memory. Bit i%32 of word i//32 allows id i. With
    `pin_memory` the buffer is page-locked, so that it can be copied to a GPU without waiting.
    """

    def __init__(self, max_rows: int, vocab_size: int, *, pin_memory: bool = False) -> None:
        self.vocab_size = vocab_size
        num_words = (vocab_size + 31) // 32
        self.tensor = torch.full(  # [max_rows, num_words]
            (max_rows, num_words), -1, dtype=torch.int32, pin_memory=pin_memory
        )
        self.array: npt.NDArray[np.int32] = self.tensor.numpy()
        self._rows: list[BitmaskRow] = list(self.array)

    def row(self, index: int) -> BitmaskRow:
        """Return row `index` as a view that a matcher can fill; always the same one."""
        return self._rows[index]

    def forbid(self, index: int, token_ids: Iterable[int]) -> None:
        """Clear the bits of some ids in a row."""
        words = self.array[index].view(np.uint32)
        for token_id in token_ids:
            words[token_id // 32] &= ~np.uint32(1 << token_id % 32)
