"""How the rows of a batch are sampled and masked, as device tensors; knows no kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """What each row is sampled with, [num_rows] each.

    Temperature 0 is greedy; top-k 0, top-p 1 and min-p 0 switch their filter off.
    """

    temperature: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seeds: Tensor  # int64, the bits of an unsigned number
    counters: Tensor  # int64, not negative
    is_filtered: bool = True  # whether a row may have top-k, top-p or min-p

    def first(self, num_rows: int, *, is_filtered: bool) -> SamplingTensors:
        """Return the first rows."""
        return SamplingTensors(
            temperature=self.temperature[:num_rows],
            top_k=self.top_k[:num_rows],
            top_p=self.top_p[:num_rows],
            min_p=self.min_p[:num_rows],
            seeds=self.seeds[:num_rows],
            counters=self.counters[:num_rows],
            is_filtered=is_filtered,
        )


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Which ids each row of a batch may take: row `states[i]` of a table of packed masks.

    Bit j of word i stands for id 32 * i + j, and a set bit allows it.
    """

    table: Tensor  # int32 [num_states, ceil(vocab_size / 32)]
    states: Tensor  # int32 [num_rows]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of all tokens in a row: those of id i are from starts[i] to starts[i + 1]."""

    data: Tensor  # uint8 [num_bytes]
    starts: Tensor  # int32 [vocab_size + 1]
