"""A model runner that computes nothing, so that what is left of a step is the host's time."""

from __future__ import annotations

from typing import Self

import torch

from ..model_runner.inputs import StepInputs


class NullRunner:
    """Fulfils the model runner's protocol with the same logits for every row.

    The best token is always `favourite`, and ids tie behind it: a greedy gen repeats it, a
    constrained one takes the least id that is allowed. Knows no KV, so nothing that it returns
    says whether slots were right.
    """

    def __init__(self, num_slots: int, vocab_size: int = 512, *, favourite: int = ord("a")) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self._row = torch.zeros(1, vocab_size)
        self._row[0, favourite] = 1.0

    def forward(self, inputs: StepInputs) -> Self:
        """Return what gives the wanted rows' logits: whatever was asked, itself."""
        return self

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return float32 logits, [end - start, vocab_size], one row's memory seen many times."""
        return self._row.expand(end - start, -1)
