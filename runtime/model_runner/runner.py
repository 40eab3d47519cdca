"""One forward pass: step inputs in, logits out; knows no request and no schedule."""

from __future__ import annotations

from typing import Protocol

import torch

from ..kv_cache.kv_pool import KVPool
from ..models import CausalLM
from ..models.forward_batch import ForwardBatch
from .inputs import StepInputs


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

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Write the new rows' KV and return float32 logits, [num_logits, vocab_size]."""
        ...


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
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Write the new rows' KV and return float32 logits, [num_logits, vocab_size]."""
        batch = ForwardBatch.from_inputs(inputs, self._device)
        return self._model.forward(batch, self._pool)
