"""Decode steps captured once per batch size and replayed by one launch.

A step of decodes alone runs the smallest captured size that holds it, its other rows on a slot that
nobody owns. All sizes share one attention plan, which a replay moves on by a slot per sequence. It
lasts while rows only leave: the others keep their places in it. Knows no request.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from umbel.kernels import AttentionLayout, AttentionShape, DecodePlan

from ..kv_cache.kv_pool import KVPool
from ..models import CausalLM
from .graph_rows import GraphRows
from .inputs import IntArray, StepInputs

logger = logging.getLogger(__name__)

_ROOM = 32  # steps that a plan lasts while no row joins
_PLACES_PER_HOLE = 8  # a plan lasts until more than one in so many of its places have been left

Keys = tuple[tuple[int, int], ...]

#: makes a plan for passes of these numbers of rows, over up to so many slots
NewDecodePlan = Callable[[AttentionShape, Sequence[int], int], DecodePlan]


def batch_sizes(most: int) -> list[int]:
    """Return the sizes to capture for up to `most` rows: fine where a step is short."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, most + 1, 32)]
    return [*(size for size in sizes if size < most), most]


def smallest_size(sizes: Sequence[int], num_rows: int) -> int:
    """Return the first of the rising sizes that holds so many rows."""
    return sizes[bisect_left(sizes, num_rows)]


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


class _Reached(NamedTuple):
    """Where a plan stands after a step: the rows that it still has, and how far they have come.

    The place of a row that has left is padding, like those past the batch's end: it writes to the
    spare slot and sees that as its newest. The slots it saw before may be others' by now, or hold
    anything: what comes out there is nobody's, and stays there. Attention mixes no rows (see
    `DecodePlan`), nor does any other part of a model; no live row sees the spare slot; and slots
    that a row which has left shares with live ones are still held by those.
    """

    num_places: int  # that were planned, those of rows that have left among them
    keys: Keys
    kv_lens: IntArray  # [len(keys)]
    places: IntArray  # [len(keys)] in the plan, rising

    def follow(self, keys: Keys, kv_lens: IntArray) -> _Reached | None:
        """Return where the plan stands after a step of these rows, None if it can't run that.

        It can where they are the rows of the last step, in that order, but for some that left, and
        each has grown by one slot.
        """
        places, last_lens = self.places, self.kv_lens
        if keys != self.keys:
            num_holes = self.num_places - len(keys)
            if num_holes * _PLACES_PER_HOLE > self.num_places:
                return None
            still = _places_among(self.keys, keys)
            if still is None:
                return None
            places, last_lens = places[still], last_lens[still]
        if not bool((kv_lens == last_lens + 1).all()):
            return None
        return _Reached(self.num_places, keys, kv_lens, places)


def _places_among(all_keys: Keys, keys: Keys) -> list[int] | None:
    """Return where `keys` stand among all, None where some don't or in another order."""
    found: list[int] = []
    start = 0
    try:
        for key in keys:
            found.append(all_keys.index(key, start))
            start = found[-1] + 1
    except ValueError:
        return None
    return found


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
        self._rows = GraphRows(max_seqs, samples, pool.spare_slot, max_logits=max_seqs)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._reached: _Reached | None = None

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
        """Queue a pass that `fits`; return the logits wanted of it, in the model's dtype.

        None, and nothing queued, where its sequences read more slots than a plan has room for.
        """
        num_seqs, num_logits = len(inputs.token_ids), len(inputs.logits_rows)
        size = smallest_size(self._sizes, num_seqs)
        kv_lens = np.diff(inputs.kv_indptr)
        # if anything below fails, the next pass plans anew
        last, self._reached = self._reached, None
        reached = None
        if (
            last is not None
            and self._plan.room
            and smallest_size(self._sizes, last.num_places) == size
        ):
            reached = last.follow(inputs.keys, kv_lens)
        if reached is None:
            try:
                self._plan.plan(inputs.layout, room=_ROOM, num_new=1)
            except ValueError as error:
                logger.info("a step of %d decodes runs without a graph: %s", num_seqs, error)
                return None
            reached = _Reached(num_seqs, inputs.keys, kv_lens, np.arange(num_seqs))
        are_first = bool(reached.places[-1] == num_seqs - 1)  # no hole before the last of them
        num_picked = 0 if are_first and num_logits == num_seqs else num_logits
        self._rows.send(size, num_picked, inputs, None if are_first else reached.places)
        logits = self._replays[size]()
        self._plan.advanced()
        self._reached = reached
        if num_picked:
            return logits.index_select(0, self._rows.wanted(size, num_picked))
        return logits[:num_logits]

    def _pass(self, size: int) -> Tensor:
        """Queue the pass that is captured."""
        rows = self._rows.rows(size)
        self._plan.advance(rows.slot_mapping)
        return self._model.logits(self._model.hidden(rows, None, self._plan, self._pool))
