"""What one forward pass is given, as plain arrays built from the scheduler's batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np
import numpy.typing as npt
from torch import Tensor

from umbel.kernels import AttentionLayout

from ..request import UNKNOWN_TOKEN, Request
from ..scheduler.batch import Batch

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
SlotRow = Union["array[int]", IntArray]  # array takes no subscript at run time before 3.12


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One pass over `num_tokens` rows of `num_seqs` sequences.

    Sequence i reads the KV of the first kv_len = kv_indptr[i+1] - kv_indptr[i] of `kv_slots[i]`
    (slots in row order, the new rows last), where new row j of q sees the first kv_len - q_len + j
    + 1 of them, unless `tree_masks[i]` says otherwise. All new K and V are written before any is
    read, in each layer: sequences of one pass may read each other's new slots.
    """

    token_ids: IntArray  # [num_tokens]
    positions: IntArray  # [num_tokens]
    slot_mapping: IntArray  # [num_tokens] slot that takes the row's K and V
    query_indptr: IntArray  # [num_seqs + 1]
    kv_indptr: IntArray  # [num_seqs + 1]
    kv_slots: tuple[SlotRow, ...]  # [num_seqs] slots of each sequence, at least kv_len of them
    logits_rows: IntArray  # [num_logits] rows whose logits are wanted
    tree_masks: dict[int, BoolArray]  # sequence -> [q_len, kv_len], True where q sees kv
    # Rows whose token was sampled in the last pass and is not known to the host yet; their entry in
    # token_ids is its place among that pass's samples.
    carried: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))  # [num_carried]
    samples: Tensor | None = None  # int64 [max_rows], those samples, where the sampler keeps them
    # What a sequence is to the runner: while a key stays in the batch, its slots only grow.
    keys: tuple[tuple[int, int], ...] = ()  # [num_seqs]

    @property
    def kv_indices(self) -> IntArray:
        """[kv_indptr[-1]], put together when it is asked for: a pass that goes on as the last one
        did needs no plan, and so none of it.
        """
        lens = np.diff(self.kv_indptr).tolist()
        # no view of a row's slots is made: while one lived, in a traceback or a profiler's frame,
        # they could not grow
        rows: list[Any] = [  # buffers, for which there is no type before 3.12
            slots if len(slots) == kv_len else slots[:kv_len]
            for slots, kv_len in zip(self.kv_slots, lens, strict=True)
        ]
        return np.frombuffer(bytearray().join(rows), np.int64)

    @property
    def layout(self) -> AttentionLayout:
        """What attention is planned from."""
        return AttentionLayout(self.query_indptr, self.kv_indptr, self.kv_indices, self.tree_masks)

    def known_token_ids(self) -> IntArray:
        """Return the tokens of all rows; waits for the last pass's samples if some are carried."""
        if not len(self.carried):
            return self.token_ids
        assert self.samples is not None, "a pass that carries samples is given them"
        token_ids = self.token_ids.copy()
        token_ids[self.carried] = self.samples.cpu().numpy()[token_ids[self.carried]]
        return token_ids


def build_inputs(
    batch: Batch, logits_rows: Sequence[int] | IntArray, samples: Tensor | None = None
) -> StepInputs:
    """Lay out a batch's rows one request after the other, in the batch's order."""
    # the decodes come first, a row each: written as what is one for each
    decodes = batch.requests[: batch.num_decodes]
    rows = [scheduled.request for scheduled in decodes]
    positions = [scheduled.start for scheduled in decodes]
    token_ids = [request.token_ids[-1] for request in rows]
    carried = [i for i, token_id in enumerate(token_ids) if token_id == UNKNOWN_TOKEN]
    for i in carried:
        token_ids[i] = rows[i].sampled_at
    kv_slots: list[SlotRow] = [request.slots for request in rows]
    slot_mapping = [request.slots[-1] for request in rows]
    query_ends: list[int] = []  # of the others
    masks: dict[int, BoolArray] = {}
    for i, scheduled in enumerate(batch.requests[len(rows) :], len(rows)):
        request, start, end = scheduled.request, scheduled.start, scheduled.end
        token_ids += request.token_ids[start:end]
        if token_ids[-1] == UNKNOWN_TOKEN:
            carried.append(len(token_ids) - 1)
            token_ids[-1] = request.sampled_at
        slot_mapping += request.slots[start:end]
        kv_slots.append(request.slots)
        if request.tree_parents:
            positions += tree_positions(request, start, end)
            if end > request.num_context:
                masks[i] = tree_mask(request, start, end)
        else:
            positions += range(start, end)
        query_ends.append(len(token_ids))
    kv_lens = [scheduled.end for scheduled in batch.requests]
    return StepInputs(
        token_ids=np.asarray(token_ids, np.int64),
        positions=np.asarray(positions, np.int64),
        slot_mapping=np.asarray(slot_mapping, np.int64),
        query_indptr=np.concatenate([np.arange(len(rows) + 1), np.asarray(query_ends, np.int64)]),
        kv_indptr=np.cumsum([0, *kv_lens], dtype=np.int64),
        kv_slots=tuple(kv_slots),
        logits_rows=np.asarray(logits_rows, np.int64),
        tree_masks=masks,
        carried=np.asarray(carried, np.int64),
        samples=samples,
        keys=tuple([scheduled.request.slots_key for scheduled in batch.requests]),
    )


def tree_positions(request: Request, start: int, end: int) -> list[int]:
    """Return the positions of a select's rows [start, end): in the tree, one below the parent's."""
    context = request.num_context
    below: list[int] = []  # of the tree's rows, from the first
    for parent in request.tree_parents[: max(0, end - context)]:
        below.append(1 + (parent if parent < context else below[parent - context]))
    return [*range(start, min(end, context)), *below[max(0, start - context) :]]


def tree_mask(request: Request, start: int, end: int) -> BoolArray:
    """Return what rows [start, end) of a select see: the context, their ancestors, themselves."""
    context, parents = request.num_context, request.tree_parents
    mask = np.zeros((end - start, end), np.bool_)
    for i, row in enumerate(range(start, end)):
        parent = row - 1 if row < context else parents[row - context]
        if parent >= start:  # it sees what its parent sees
            mask[i] = mask[parent - start]
        else:
            while parent >= context:
                mask[i, parent] = True
                parent = parents[parent - context]
            mask[i, : parent + 1] = True
        mask[i, row] = True
    return mask
