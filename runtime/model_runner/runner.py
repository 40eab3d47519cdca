"""One forward pass: step inputs in, logits out; knows no request and no schedule."""

from __future__ import annotations

from typing import Protocol

import torch

from ..kv_cache.kv_pool import KVPool
from ..models import CausalLM
from ..models.forward_batch import ForwardBatch
from .inputs import StepInputs

#: rows whose logits are held at once where they are only scored: 64 rows of a vocabulary of 152k
#: are 39 MB in float32, while a prompt of 4,000 rows would be 2.4 GB
MAX_SCORED_ROWS = 64


class PassLogits(Protocol):
    """The logits of a pass's wanted rows, made when they are asked for: nobody holds them all."""

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return float32 logits [end - start, vocab_size] of `inputs.logits_rows[start:end]`."""
        ...


class Runner(Protocol):
    """What the engine asks of whatever computes logits."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def num_slots(self) -> int:
        """KV slots that `StepInputs` may name."""
        ...

    def forward(self, inputs: StepInputs) -> PassLogits:
        """Write the new rows' KV and return what gives the wanted rows' logits."""
        ...


class HiddenRows:
    """The last hidden rows of a pass, from which the head makes logits slice by slice."""

    def __init__(self, model: CausalLM, hidden: torch.Tensor) -> None:
        self._model = model
        self._hidden = hidden  # [num_logits, hidden_size]

    @torch.inference_mode()
    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return float32 logits [end - start, vocab_size] of the wanted rows from `start` on."""
        return self._model.logits(self._hidden[start:end])


class ModelRunner:
    """Runs a model over the paged KV pool."""

    def __init__(self, model: CausalLM, pool: KVPool, device: torch.device) -> None:
        self._model = model
        self._pool = pool
        self._device = device

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._model.config.vocab_size

    @property
    def num_slots(self) -> int:
        """KV slots of the pool."""
        return self._pool.num_slots

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> HiddenRows:
        """Write the new rows' KV and return what gives the wanted rows' logits."""
        batch = ForwardBatch.from_inputs(inputs, self._device)
        return HiddenRows(self._model, self._model.hidden(batch, self._pool))
