"""Decode steps captured once per batch size and replayed by one launch.

A step of decodes alone runs the smallest captured size that holds it, its other rows on a slot that
nobody owns. All sizes share one attention plan, which a replay moves on by a slot per sequence, so
the host plans only when the batch changes. Knows no request.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from umbel.kernels import AttentionLayout, AttentionShape, DecodePlan

from ..kv_cache.kv_pool import KVPool
from ..models import CausalLM
from .graph_rows import GraphRows
from .inputs import StepInputs

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]

_ROOM = 32  # steps that a plan lasts while the batch stays the same

#: makes a plan for passes of these numbers of rows, over up to so many slots
NewDecodePlan = Callable[[AttentionShape, Sequence[int], int], DecodePlan]


def batch_sizes(most: int) -> list[int]:
    """Return the sizes to capture for up to `most` rows: fine where a step is short."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, most + 1, 32)]
    return [*(size for size in sizes if size < most), most]


#: records a pass that was run once before, and returns what replays it and gives its logits
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the collector, which may free memory of other graphs, from running in between.

    Collecting before each capture instead took longer than the captures.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def cuda_capture() -> Capture:
    """Return a capture whose graphs share one memory: the largest should be captured first."""
    memory = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=memory):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    return capture


class DecodeGraphs:
    """Captured decode passes of one model over one pool, of `sizes` rows each, which rise.

    Sampled ids are read from `samples` [max_samples], where the sampler of the pass before left
    them. The logits of a pass are overwritten by the next one.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        samples: Tensor,
        new_plan: NewDecodePlan,
        *,
        sizes: Sequence[int],
        max_seq_len: int,
    ) -> None:
        self._model, self._pool = model, pool
        self._sizes, max_seqs = sizes, sizes[-1]
        # room for every slot once and as much again for shared ones that are read apart
        max_slots = min(max_seqs * max_seq_len, 2 * pool.num_slots) + max_seqs * _ROOM
        self._plan = new_plan(model.attention_shape, self._sizes, max_slots)
        self._rows = GraphRows(max_seqs, samples, pool.spare_slot)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._keys: Sequence[tuple[int, int]] = ()  # of the sequences that are planned
        self._kv_lens: IntArray = np.zeros(0, np.int64)  # that the plan has reached

    def capture(self, capture: Capture) -> None:
        """Capture all sizes; what they need and is not compiled yet is, on the way."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self._rows.send(size)
                indptr, spare = np.arange(size + 1), np.full(size, self._pool.spare_slot)
                self._plan.plan(AttentionLayout(indptr, indptr, spare, {}), room=_ROOM)
                run = partial(self._pass, size)
                run()  # compiles, which can't be captured
                self._replays[size] = capture(run)

    def fits(self, inputs: StepInputs) -> bool:
        """Whether a pass is decodes alone, each with something behind it, and not too large."""
        num_seqs = len(inputs.kv_indptr) - 1
        return (
            len(inputs.token_ids) == num_seqs <= self._sizes[-1]
            and not inputs.tree_masks
            and int(np.diff(inputs.kv_indptr).min()) >= 2
        )

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Queue a pass that `fits`; return the logits of all its rows, in the model's dtype.

        None, and nothing queued, where its sequences read more slots than a plan has room for.
        """
        num_seqs = len(inputs.token_ids)
        size = next(size for size in self._sizes if size >= num_seqs)
        kv_lens = np.diff(inputs.kv_indptr)
        keys, self._keys = self._keys, ()  # if anything below fails, the next pass plans anew
        same = keys == inputs.keys and bool((kv_lens == self._kv_lens + 1).all())
        if not same or self._plan.room == 0:
            try:
                self._plan.plan(inputs.layout, room=_ROOM, num_new=1)
            except ValueError as error:
                logger.info("a step of %d decodes runs without a graph: %s", num_seqs, error)
                return None
        self._rows.send(size, inputs=inputs)
        logits = self._replays[size]()
        self._plan.advanced()
        self._keys, self._kv_lens = inputs.keys, kv_lens
        return logits[:num_seqs]

    def _pass(self, size: int) -> Tensor:
        """Queue the pass that is captured."""
        rows = self._rows.rows(size)
        self._plan.advance(rows.slot_mapping)
        return self._model.logits(self._model.hidden(rows, None, self._plan, self._pool))
