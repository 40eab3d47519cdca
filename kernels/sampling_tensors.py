"""How the rows of a batch are sampled, as device tensors; knows no kernel."""

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

    def first(self, num_rows: int) -> SamplingTensors:
        """Return the first rows."""
        return SamplingTensors(
            temperature=self.temperature[:num_rows],
            top_k=self.top_k[:num_rows],
            top_p=self.top_p[:num_rows],
            min_p=self.min_p[:num_rows],
            seeds=self.seeds[:num_rows],
            counters=self.counters[:num_rows],
        )
