"""One forward pass: step inputs in, logits out; knows no request and no schedule."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from umbel.kernels import ArraySender

from ..kv_cache.kv_pool import KVPool
from ..models import CausalLM
from ..models.forward_batch import ForwardBatch, PassRows
from .decode_graphs import DecodeGraphs
from .inputs import StepInputs
from .pass_graphs import PassGraphs

#: rows whose logits are held at once where they are only scored: 64 rows of a vocabulary of 152k
#: are 39 MB in float32, while a prompt of 4,000 rows would be 2.4 GB
MAX_SCORED_ROWS = 64


class PassLogits(Protocol):
    """The logits of a pass's wanted rows, made when they are asked for: nobody holds them all.

    They may be asked for until the next pass.
    """

    def rows(self, start: int, end: int) -> Tensor:
        """Return logits [end - start, vocab_size] of `inputs.logits_rows[start:end]`."""
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
        """Write the new rows' KV and return what gives the wanted rows' logits.

        On a device the pass may only be queued.
        """
        ...


class HiddenRows:
    """The last hidden rows of a pass, from which the head makes logits slice by slice."""

    def __init__(self, model: CausalLM, hidden: Tensor) -> None:
        self._model = model
        self._hidden = hidden  # [num_logits, hidden_size]

    @torch.inference_mode()
    def rows(self, start: int, end: int) -> Tensor:
        """Return logits [end - start, vocab_size] of the wanted rows from `start` on."""
        return self._model.logits(self._hidden[start:end])


class MadeLogits:
    """Logits that are there already, or will be when the device comes to it."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits  # [num_logits, vocab_size]

    def rows(self, start: int, end: int) -> Tensor:
        """Return logits [end - start, vocab_size] of the wanted rows from `start` on."""
        return self._logits[start:end]


class ModelRunner:
    """Runs a model over the paged KV pool on a CPU."""

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
        plan = self._model.plan(batch.layout)
        hidden = self._model.hidden(batch.rows, batch.logits_rows, plan, self._pool)
        return HiddenRows(self._model, hidden)


class DeviceRunner:
    """Runs a model over the paged KV pool on a GPU, without waiting for it.

    Passes of decodes alone, and other small ones, are replayed where they were captured; the others
    are launched kernel by kernel.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        decodes: DecodeGraphs | None = None,
        passes: PassGraphs | None = None,
    ) -> None:
        self._model, self._pool = model, pool
        self._decodes, self._passes = decodes, passes
        self._device = pool.k[0].device
        self._sender = ArraySender(torch.int64, self._device)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._model.config.vocab_size

    @property
    def num_slots(self) -> int:
        """KV slots of the pool."""
        return self._pool.num_slots

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> PassLogits:
        """Queue a pass; its logits come in the model's dtype."""
        if self._decodes is not None and self._decodes.fits(inputs):
            logits = self._decodes.run(inputs)
            if logits is not None:
                return MadeLogits(logits)
        if self._passes is not None and self._passes.fits(inputs):
            logits = self._passes.run(inputs)
            if logits is not None:
                return MadeLogits(logits)
        plan = self._model.plan(inputs.layout)
        rows, wanted = self._send(inputs)
        return HiddenRows(self._model, self._model.hidden(rows, wanted, plan, self._pool))

    def _send(self, inputs: StepInputs) -> tuple[PassRows, Tensor]:
        """Copy the pass's rows to the device in one go; return them and the rows wanted."""
        parts = [
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.carried,
            inputs.token_ids[inputs.carried],
            inputs.logits_rows,
        ]
        token_ids, positions, slots, at, drawn, wanted = torch.split(
            self._sender.send(*parts), [len(part) for part in parts]
        )
        if len(inputs.carried):
            assert inputs.samples is not None, "a pass that carries samples is given them"
            token_ids[at] = inputs.samples.index_select(0, drawn)
        # the next pass's rows are sent to where these are, once this pass has read them; what is
        # asked of it later must not look there
        return PassRows(token_ids, positions, slots), wanted
