from __future__ import annotations

import sys
from array import array
from types import FrameType
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umbel.runtime.model_runner.inputs import build_inputs, tree_mask, tree_positions
from umbel.runtime.request import UNKNOWN_TOKEN, Request
from umbel.runtime.scheduler.batch import Batch, ScheduledRequest


def make_request(num_rows: int, first_slot: int = 0) -> Request:
    slots = array("q", range(first_slot + num_rows - 1, first_slot - 1, -1))
    return Request(0, 0, 0, list(range(num_rows)), limit=num_rows + 8, slots=slots)


@st.composite
def selects(draw: st.DrawFn) -> Request:
    """A context, perhaps empty, and any tree after it."""
    context = draw(st.integers(0, 4))
    parents: list[int] = []
    for row in range(context, context + draw(st.integers(1, 8))):
        parents.append(draw(st.integers(context - 1, row - 1)))
    request = make_request(context + len(parents))
    request.tree_parents, request.num_context = parents, context
    return request


def ancestors(request: Request, row: int) -> list[int]:
    """Return the rows before `row` on its path, from the nearest to the first."""
    if row < request.num_context:
        return list(range(row - 1, -1, -1))
    parent = request.tree_parents[row - request.num_context]
    return [] if parent < 0 else [parent, *ancestors(request, parent)]


@given(selects(), st.data())
def test_a_selects_rows_see_their_ancestors_however_the_row_is_cut(
    request: Request, data: st.DataObject
) -> None:
    num_rows = len(request.token_ids)
    start = data.draw(st.integers(0, num_rows - 1))
    end = data.draw(st.integers(start + 1, num_rows))
    seen = [ancestors(request, row) for row in range(start, end)]

    assert tree_positions(request, start, end) == [len(rows) for rows in seen]
    mask = tree_mask(request, start, end)
    assert mask.shape == (end - start, end)
    assert [np.flatnonzero(row).tolist() for row in mask] == [
        sorted([*rows, start + i]) for i, rows in enumerate(seen)
    ]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=5))
def test_each_request_reads_the_slots_of_its_rows_so_far_and_writes_the_new_ones(
    pieces: list[tuple[int, int]],
) -> None:
    rows = [
        ScheduledRequest(make_request(start + num + 2, first_slot=100 * i), start, start + num)
        for i, (start, num) in enumerate(pieces)
    ]
    inputs = build_inputs(Batch(tuple(rows), 0), [0])
    for i, (request, start, end) in enumerate((r.request, r.start, r.end) for r in rows):
        new = slice(*inputs.query_indptr[i : i + 2])
        read = inputs.kv_indices[slice(*inputs.kv_indptr[i : i + 2])]
        assert inputs.positions[new].tolist() == list(range(start, end))
        assert inputs.token_ids[new].tolist() == request.token_ids[start:end]
        assert inputs.slot_mapping[new].tolist() == request.slots[start:end].tolist()
        assert read.tolist() == request.slots[:end].tolist()
    assert inputs.query_indptr[-1] == len(inputs.token_ids)
    assert inputs.kv_indptr[-1] == len(inputs.kv_indices)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=5), st.integers(0, 5)
)
def test_decodes_are_laid_out_as_what_else_computes_one_row(
    lens: list[tuple[int, bool]], num_decodes: int
) -> None:
    rows = []
    for i, (length, is_known) in enumerate(lens):
        request = make_request(length + 1, first_slot=100 * i)
        if not is_known:
            request.token_ids[-1], request.sampled_at = UNKNOWN_TOKEN, 40 + i
        rows.append(ScheduledRequest(request, length, length + 1))
    wanted = list(range(len(rows)))
    plain = build_inputs(Batch(tuple(rows), 0), wanted)
    found = build_inputs(Batch(tuple(rows), min(num_decodes, len(rows))), np.asarray(wanted))
    for name in ("token_ids", "positions", "slot_mapping", "query_indptr", "kv_indptr", "carried"):
        ours, theirs = getattr(found, name), getattr(plain, name)
        assert ours.dtype == theirs.dtype == np.int64
        assert ours.tolist() == theirs.tolist(), name
    assert (found.keys, found.logits_rows.tolist()) == (plain.keys, wanted)
    assert plain.carried.tolist() == [i for i, (_, is_known) in enumerate(lens) if not is_known]


def test_a_request_whose_slots_were_taken_back_has_another_key() -> None:
    request = make_request(3)
    batch = Batch((ScheduledRequest(request, 2, 3),), 1)
    before = build_inputs(batch, [0]).keys
    assert build_inputs(batch, [0]).keys == before
    request.retracted()
    assert build_inputs(batch, [0]).keys != before


def test_the_inputs_keep_no_view_of_the_requests_slots() -> None:
    request = make_request(4)
    inputs = build_inputs(Batch((ScheduledRequest(request, 0, 4),), 0), [3])
    read = inputs.kv_indices.tolist()
    request.slots.append(99)  # raises BufferError while a view of the slots lives
    assert inputs.kv_indices.tolist() == read


def test_rows_can_grow_while_somebody_keeps_the_frames_that_read_their_slots() -> None:
    """As tracebacks and profilers do."""
    request = make_request(4)
    batch = Batch((ScheduledRequest(request, 0, 3),), num_decodes=0)
    frames: list[FrameType] = []

    def keep(frame: FrameType, event: str, arg: Any) -> None:
        frames.append(frame)

    sys.setprofile(keep)
    try:
        kv_indices = build_inputs(batch, []).kv_indices
    finally:
        sys.setprofile(None)
    assert frames
    request.slots.append(9)
    assert kv_indices.tolist() == [3, 2, 1]
