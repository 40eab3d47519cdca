"""What a model's forward takes: the device tensors of one pass; knows no request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from umbel.kernels import AttentionLayout

IntArray = npt.NDArray[np.int64]


class PassInputs(Protocol):
    """The host arrays of a pass, as `model_runner.inputs.StepInputs` has and describes them."""

    @property
    def positions(self) -> IntArray:
        """[num_tokens]."""
        ...

    @property
    def slot_mapping(self) -> IntArray:
        """[num_tokens]."""
        ...

    @property
    def logits_rows(self) -> IntArray:
        """[num_logits]."""
        ...

    @property
    def layout(self) -> AttentionLayout:
        """What attention is planned from."""
        ...

    def known_token_ids(self) -> IntArray:
        """Return the tokens of all rows, [num_tokens]."""
        ...


@dataclass(frozen=True, slots=True)
class PassRows:
    """The new rows of a pass, on the device."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One pass on the device; `layout` stays on the host, where attention is planned."""

    rows: PassRows
    logits_rows: Tensor  # int64 [num_logits]
    layout: AttentionLayout

    @classmethod
    def from_inputs(cls, inputs: PassInputs, device: torch.device) -> ForwardBatch:
        """Copy the step's arrays to the device."""
        return cls(
            rows=PassRows(
                token_ids=torch.as_tensor(inputs.known_token_ids(), device=device),
                positions=torch.as_tensor(inputs.positions, device=device),
                slot_mapping=torch.as_tensor(inputs.slot_mapping, device=device),
            ),
            logits_rows=torch.as_tensor(inputs.logits_rows, device=device),
            layout=inputs.layout,
        )
