"""Small passes of any kind captured once per number of tokens: forks, literals, selects, jumps.

Launching such a pass kernel by kernel takes the host longer than the device needs for it. Passes
that read much are left to others. Knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from umbel.kernels import AttentionLayout, AttentionShape, ExtendPlan

from ..kv_cache.kv_pool import KVPool
from ..models import CausalLM
from .decode_graphs import Capture, smallest_size
from .graph_rows import GraphRows
from .inputs import StepInputs

logger = logging.getLogger(__name__)

# fine above the batches that run often: a jump or a fork adds a few tokens to a step of decodes
_SIZES = (
    *(8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 288, 320, 384, 512),
    *(640, 768, 896, 1024),  # a prompt; while it runs the host prepares what comes behind it
)
_FEW_LOGITS = 128  # rows that give logits where not each of a pass does
_ALL_LOGITS = 512  # tokens of a pass in which each may: 128 MB with a vocabulary of 128k
_MAX_MASK = 1 << 16  # bytes
#: KV that a pass may read: about as long as launching it would take, at 4 TB/s
_MAX_READ_BYTES = 32 << 30

#: makes a plan for so many tokens, slots and bytes of masks
NewExtendPlan = Callable[[AttentionShape, int, int, int], ExtendPlan]


def pass_sizes(max_tokens: int) -> list[int]:
    """Return the sizes to capture where a pass has up to so many tokens: up to 1,024."""
    return [size for size in _SIZES if size <= max_tokens]


class PassGraphs:
    """Captured passes of any kind of one model over one pool, of `sizes` tokens each, which rise.

    Sampled ids are read from `samples`, and logits overwritten by the next pass, as in
    `DecodeGraphs`.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        samples: Tensor,
        new_plan: NewExtendPlan,
        *,
        sizes: Sequence[int],
    ) -> None:
        self._model, self._pool = model, pool
        self._sizes = sizes
        most = max(sizes, default=0)
        self._max_slots = min(_MAX_READ_BYTES // pool.bytes_per_token, 2 * pool.num_slots) + most
        self._plans = {
            size: new_plan(model.attention_shape, size, self._max_slots, _MAX_MASK)
            for size in self._sizes
        }
        self._rows = GraphRows(most, samples, pool.spare_slot, max_logits=most)
        # by the number of tokens and of rows that give logits
        self._replays: dict[tuple[int, int], Callable[[], Tensor]] = {}

    def capture(self, capture: Capture) -> None:
        """Capture all sizes; what they need and is not compiled yet is, on the way."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                indptr, spare = np.arange(size + 1), np.full(size, self._pool.spare_slot)
                self._plans[size].plan(AttentionLayout(indptr, indptr, spare, {}))
                for num_logits in {_num_logits(size, 0), _num_logits(size, size)}:
                    if num_logits is None:
                        continue
                    self._rows.send(size, num_logits)
                    run = partial(self._pass, size, num_logits)
                    run()  # compiles, which can't be captured
                    self._replays[size, num_logits] = capture(run)

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a pass is small in tokens, in what it reads and in the logits it gives."""
        return (
            bool(self._sizes)
            and len(inputs.token_ids) <= self._sizes[-1]
            and int(inputs.kv_indptr[-1]) <= self._max_slots
            and _num_logits(self._size(inputs), len(inputs.logits_rows)) is not None
        )

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Queue a pass that `fits`; return the logits wanted of it, in the model's dtype.

        None, and nothing queued, where its masks need more room than a plan has.
        """
        size = self._size(inputs)
        num_logits = _num_logits(size, len(inputs.logits_rows))
        assert num_logits is not None, "a pass that does not fit"
        try:
            self._plans[size].plan(inputs.layout)
        except ValueError as error:
            logger.info("a pass of %d tokens runs without a graph: %s", size, error)
            return None
        self._rows.send(size, num_logits, inputs)
        return self._replays[size, num_logits]()[: len(inputs.logits_rows)]

    def _size(self, inputs: StepInputs) -> int:
        return smallest_size(self._sizes, len(inputs.token_ids))

    def _pass(self, size: int, num_logits: int) -> Tensor:
        """Queue the pass that is captured."""
        rows, wanted = self._rows.rows(size), self._rows.wanted(size, num_logits)
        hidden = self._model.hidden(rows, wanted, self._plans[size], self._pool)
        return self._model.logits(hidden)


def _num_logits(size: int, num_wanted: int) -> int | None:
    """Return for how many rows of logits the pass was captured that gives so many, if one was."""
    if num_wanted <= min(size, _FEW_LOGITS):
        return min(size, _FEW_LOGITS)
    return size if size <= _ALL_LOGITS else None
