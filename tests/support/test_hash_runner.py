from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.hash_runner import HashRunner, WrongSlotError

from umbel.runtime.model_runner.inputs import StepInputs, build_inputs
from umbel.runtime.request import Request
from umbel.runtime.scheduler.batch import Batch, ScheduledRequest

TOKENS = st.lists(st.integers(0, 63), min_size=2, max_size=12)


def make_request(token_ids: list[int], slots: list[int], tree: list[int] | None = None) -> Request:
    request = Request(0, 0, 0, token_ids, limit=100, slots=array("q", slots))
    if tree:
        request.tree_parents = tree
        request.num_context = len(token_ids) - len(tree)
    return request


def step(*pieces: tuple[Request, int, int]) -> StepInputs:
    """One pass over rows [start, end) of each request, logits wanted for every row."""
    batch = Batch(tuple(ScheduledRequest(*piece) for piece in pieces), 0)
    return build_inputs(batch, list(range(batch.num_tokens)))


def test_slots_and_chunks_do_not_change_the_logits() -> None:
    @given(TOKENS, st.integers(1, 11), st.permutations(range(20)))
    def check(token_ids: list[int], cut: int, slots: list[int]) -> None:
        cut = min(cut, len(token_ids) - 1)
        request = make_request(token_ids, slots[: len(token_ids)])
        runner = HashRunner(num_slots=20)
        chunks = [
            runner.forward(step((request, 0, cut))).all(),
            runner.forward(step((request, cut, len(token_ids)))).all(),
        ]
        rows = torch.cat(chunks)
        for i in range(len(token_ids)):
            np.testing.assert_array_equal(rows[i], runner.logits_of(token_ids[: i + 1]))
        assert runner.num_tokens == len(token_ids)
        assert runner.num_passes == 2

    check()


def test_prefixes_that_differ_in_order_seed_or_length_have_other_logits() -> None:
    runner = HashRunner()
    seen = [
        runner.logits_of([1, 2, 3]),
        runner.logits_of([2, 1, 3]),
        runner.logits_of([1, 2]),
        HashRunner(seed=1).logits_of([1, 2, 3]),
    ]
    for i, a in enumerate(seen):
        for b in seen[i + 1 :]:
            assert (a != b).mean() > 0.9


def test_a_sibling_may_read_slots_written_in_the_same_pass() -> None:
    runner = HashRunner()
    first = make_request([5, 6, 7], [0, 1, 2])
    second = make_request([5, 6, 8], [0, 1, 9])
    logits = runner.forward(step((second, 2, 3), (first, 0, 3))).all()
    np.testing.assert_array_equal(logits[0], runner.logits_of([5, 6, 8]))


def test_a_token_tree_gives_each_row_the_logits_of_its_path() -> None:
    runner = HashRunner()
    #    context 4 5; tree rows: 2 = a, 3 = b under a, 4 = c under a, 5 = d at the root
    request = make_request([4, 5, 10, 11, 12, 13], [3, 1, 7, 5, 2, 0], tree=[1, 2, 2, 1])
    runner.forward(step((request, 0, 4)))
    logits = runner.forward(step((request, 4, 6))).all()
    np.testing.assert_array_equal(logits[0], runner.logits_of([4, 5, 10, 12]))
    np.testing.assert_array_equal(logits[1], runner.logits_of([4, 5, 13]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_slots": [1, 0, 2, 3]}, "slot 1 .* is at position 1"),
        ({"kv_slots": [0, 6, 2, 3]}, "slot 6 .* never written"),
        ({"kv_slots": [10, 11, 2, 3]}, "computed after another prefix"),
        ({"positions": [2, 4]}, "slot 3 .* is at position 4"),
        ({"slot_mapping": [2, 4]}, "not the last of its kv_indices"),
        ({"slot_mapping": [2, 2], "kv_slots": [0, 1, 2, 2]}, "write the same slot"),
        ({"token_ids": [3, -1]}, "outside the vocabulary"),
        ({"slot_mapping": [2, 4096], "kv_slots": [0, 1, 2, 4096]}, "outside the pool"),
        ({"logits_rows": [2]}, "logits row"),
        ({"query_indptr": [0, 1]}, "does not end at num_tokens"),
        ({"positions": [2]}, "differ in length"),
    ],
)
def test_wrong_inputs_fail_loudly(change: dict[str, list[int]], message: str) -> None:
    runner = HashRunner()
    request = make_request([1, 2, 3, 4], [0, 1, 2, 3])
    runner.forward(step((request, 0, 2)))
    # slots 10 and 11 hold 9 then 2: slot 11 has the right token and position, the wrong prefix
    other = make_request([9, 2], [12, 11])
    runner.forward(step((other, 0, 2), (make_request([1], [10]), 0, 1)))
    good = step((request, 2, 4))
    arrays: dict[str, Any] = {name: np.asarray(value, np.int64) for name, value in change.items()}
    if "kv_slots" in arrays:
        arrays["kv_slots"] = (arrays["kv_slots"],)
    with pytest.raises(WrongSlotError, match=message):
        runner.forward(dataclasses.replace(good, **arrays))
    runner.forward(good)


def test_a_tree_mask_that_leaves_the_path_fails_loudly() -> None:
    request = make_request([4, 5, 10, 11], [3, 1, 7, 5], tree=[1, 2])
    good = step((request, 0, 4))
    for row, column in [(3, 3), (3, 2), (0, 1)]:
        mask = good.tree_masks[0].copy()
        mask[row, column] ^= True
        with pytest.raises(WrongSlotError):
            HashRunner().forward(dataclasses.replace(good, tree_masks={0: mask}))
    HashRunner().forward(good)


def test_poison_makes_one_row_nan_or_raises() -> None:
    def poison(path: object) -> bool:
        if path == [1, 2, 3]:
            raise RuntimeError("the device is gone")
        return path == [1, 2]

    runner = HashRunner(poison=poison)
    request = make_request([1, 2, 3], [0, 1, 2])
    logits = runner.forward(step((request, 0, 2))).all()
    assert logits.isnan().all(1).tolist() == [False, True]
    with pytest.raises(RuntimeError, match="the device is gone"):
        runner.forward(step((request, 2, 3)))


def test_the_boost_is_added_to_eos_alone() -> None:
    plain, boosted = HashRunner(), HashRunner(eos_id=7, eos_boost=3.0)
    difference = boosted.logits_of([1, 2]) - plain.logits_of([1, 2])
    assert np.flatnonzero(difference).tolist() == [7]
    assert difference[7] == pytest.approx(3.0)
