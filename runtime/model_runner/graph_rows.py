"""The rows of captured passes: where a graph reads them, and what fills it up to its size.

Knows step inputs and the last pass's samples; nothing of attention or models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from umbel.kernels import Staging

from ..models.forward_batch import PassRows
from .inputs import IntArray, StepInputs

_FIELDS = 4  # token, position, slot, place among the last pass's samples (-1: the token is given)


class GraphRows:
    """Rows of passes of up to `most` tokens, sent in one copy and read at fixed addresses.

    A pass of `size` tokens is filled up with rows on the spare slot, which nobody owns. It may also
    have up to `max_logits` places for the rows whose logits are wanted; those left name row 0.
    """

    def __init__(self, most: int, samples: Tensor, spare_slot: int, max_logits: int = 0) -> None:
        self._samples, self._spare_slot = samples, spare_slot
        items = _FIELDS * most + max_logits
        self._memory = torch.zeros(items, dtype=torch.int64, device=samples.device)
        self._staging = Staging(self._memory)

    def send(
        self,
        size: int,
        num_logits: int = 0,
        inputs: StepInputs | None = None,
        at: IntArray | None = None,
    ) -> None:
        """Queue the copy of a pass's rows for a graph of `size`; without inputs, of padding.

        Row i of the pass becomes row at[i] of the graph, without `at` row i.
        """
        num_items = _FIELDS * size + num_logits
        memory = self._staging.take(num_items)
        token_ids, positions, slots, places = memory[: _FIELDS * size].reshape(_FIELDS, size)
        wanted = memory[_FIELDS * size :]
        token_ids[:], positions[:], slots[:], places[:] = 0, 0, self._spare_slot, -1
        wanted[:] = 0
        if inputs is not None:
            to = slice(len(inputs.token_ids)) if at is None else at
            token_ids[to], positions[to] = inputs.token_ids, inputs.positions
            slots[to] = inputs.slot_mapping
            carried = inputs.carried if at is None else at[inputs.carried]
            places[carried] = inputs.token_ids[inputs.carried]
            if num_logits:
                rows = inputs.logits_rows if at is None else at[inputs.logits_rows]
                wanted[: len(rows)] = rows
        self._staging.send(num_items)

    def rows(self, size: int) -> PassRows:
        """Queue what reads the rows, the sampled ids from where they lie."""
        fields = self._memory[: _FIELDS * size].view(_FIELDS, size)
        token_ids, positions, slots, places = fields
        sampled = self._samples.index_select(0, places.clamp(min=0))
        return PassRows(torch.where(places < 0, token_ids, sampled), positions, slots)

    def wanted(self, size: int, num_logits: int) -> Tensor:
        """Return where the rows stand whose logits are wanted, [num_logits]."""
        start = _FIELDS * size
        return self._memory[start : start + num_logits]
