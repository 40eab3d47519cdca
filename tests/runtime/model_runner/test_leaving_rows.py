"""Captured decodes whose rows end one after the other: the plan lasts, no row sees the holes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels import fake_flashinfer
from tests.runtime.model_runner.graph_cases import (
    VOCAB,
    Sequences,
    make_model,
    make_pool,
)
from torch import Tensor

from umbel.kernels import AttentionLayout, AttentionShape, DecodePlan, decode_plan
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.decode_graphs import DecodeGraphs, NewDecodePlan
from umbel.runtime.model_runner.inputs import StepInputs
from umbel.runtime.model_runner.runner import DeviceRunner
from umbel.runtime.models import CausalLM

SIZES = [8, 16, 24]
NUM_ROWS = 24
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
NUM_STEPS = 12
#: how often a batch changes between two steps, and how
CHANGES = {"nothing": 0.4, "leave": 0.3, "join": 0.1, "retract": 0.1, "reorder": 0.1}


class BlankPlan:
    """A plan that computes nothing: for tests of when plans are made."""

    def __init__(self, shape: AttentionShape, sizes: Sequence[int], max_slots: int) -> None:
        self.room = 0

    def plan(self, layout: AttentionLayout, *, room: int = 0, num_new: int = 0) -> None:
        self.room = room

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return torch.zeros_like(q)

    def advance(self, slots: Tensor) -> None:
        pass

    def advanced(self) -> None:
        self.room -= 1


def tree_plan(shape: AttentionShape, sizes: Sequence[int], max_slots: int) -> DecodePlan:
    """Return a plan that reads together whatever is shared."""
    from umbel.kernels.triton import DecodeAttention
    from umbel.kernels.triton.kv_nodes import TileCosts

    costs = TileCosts(small_tile=0.01, big_tile=0.01, partial=0.001)
    return DecodeAttention(shape, max(sizes), max_slots, costs=costs)


class Decoder:
    """A runner of captured decodes that counts its plans and keeps all rows of the last pass."""

    def __init__(
        self,
        new_plan: NewDecodePlan,
        model: CausalLM | None = None,
        samples: Tensor | None = None,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        model = model or make_model("llama")
        samples = torch.zeros(SIZES[-1], dtype=torch.int64) if samples is None else samples
        self._new_plan = new_plan
        self.num_plans = 0
        self.pool = make_pool(40 * NUM_ROWS)
        graphs = DecodeGraphs(model, self.pool, samples, self._plan, sizes=sizes, max_seq_len=64)
        graphs.capture(self._keeping)
        self.runner = DeviceRunner(model, self.pool, graphs)

    def _plan(self, shape: AttentionShape, sizes: Sequence[int], max_slots: int) -> DecodePlan:
        plan: Any = self._new_plan(shape, sizes, max_slots)
        plans = plan.plan

        def counted(*args: Any, **options: Any) -> None:
            self.num_plans += 1
            plans(*args, **options)

        plan.plan = counted
        return plan  # type: ignore[no-any-return]

    def _keeping(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def keep() -> Tensor:
            self.all_rows = run()
            return self.all_rows

        return keep

    def forward(self, inputs: StepInputs) -> Tensor:
        return self.runner.forward(inputs).rows(0, len(inputs.logits_rows))

    def plans_for(self, inputs: StepInputs) -> int:
        before = self.num_plans
        self.forward(inputs)
        return self.num_plans - before


class Launched:
    """A runner that captures nothing, and so plans every pass."""

    def __init__(self, model: CausalLM) -> None:
        self.runner = DeviceRunner(model, make_pool(40 * NUM_ROWS))

    def forward(self, inputs: StepInputs) -> Tensor:
        return self.runner.forward(inputs).rows(0, len(inputs.logits_rows))


def poison(pool: KVPool, slots: list[int]) -> None:
    """Write to slots as whoever gets them next might, and worse."""
    for k, v in zip(pool.k, pool.v, strict=True):
        k[slots], v[slots] = torch.nan, torch.nan
        k[slots[::3]], v[slots[::2]] = torch.inf, -torch.inf


def decode(sequences: Sequences, which: list[int]) -> StepInputs:
    return sequences.decode(which, [3] * len(which))


def planner(new_plan: NewDecodePlan = BlankPlan) -> tuple[Decoder, Sequences]:
    """Return a runner, and rows to decode."""
    return Decoder(new_plan), Sequences([5] * NUM_ROWS, np.random.default_rng(0))


def test_a_plan_lasts_while_rows_leave() -> None:
    decoder, sequences = planner()
    batch = list(range(16))
    assert decoder.plans_for(decode(sequences, batch)) == 1
    for left in (None, 7, None, 15, None):
        if left is not None:
            batch.remove(left)
        assert decoder.plans_for(decode(sequences, batch)) == 0


def test_two_rows_may_leave_at_once() -> None:
    decoder, sequences = planner()
    decoder.forward(decode(sequences, list(range(16))))
    assert decoder.plans_for(decode(sequences, list(range(1, 15)))) == 0


REASONS: dict[str, tuple[list[int], list[int]]] = {
    "a row joins": (list(range(14)), list(range(15))),
    "a row joins as one leaves": (list(range(14)), [*range(1, 14), 14]),
    "rows are in another order": (list(range(16)), [1, 0, *range(2, 16)]),
    "rows that stay are in another order": (list(range(16)), [2, 0, *range(3, 16)]),
    "the others fit a smaller size": (list(range(9)), list(range(8))),
    "more than one in eight has left": (list(range(24)), list(range(20))),
}


@pytest.mark.parametrize("reason", REASONS)
def test_other_batches_are_planned_anew(reason: str) -> None:
    decoder, sequences = planner()
    before, after = REASONS[reason]
    assert decoder.plans_for(decode(sequences, before)) == 1
    assert decoder.plans_for(decode(sequences, before)) == 0
    assert decoder.plans_for(decode(sequences, after)) == 1
    assert decoder.plans_for(decode(sequences, after)) == 0


def test_a_row_that_comes_back_is_planned_anew() -> None:
    decoder, sequences = planner()
    every, others = list(range(16)), list(range(1, 16))
    decoder.forward(decode(sequences, every))
    assert decoder.plans_for(decode(sequences, others)) == 0
    assert decoder.plans_for(decode(sequences, every)) == 1


def test_a_row_that_is_retracted_or_grows_elsewhere_is_planned_anew() -> None:
    decoder, sequences = planner()
    batch = list(range(16))
    decoder.forward(decode(sequences, batch))
    sequences.num_retractions[4] += 1
    assert decoder.plans_for(decode(sequences, batch)) == 1
    sequences.extend([3], [[1]])
    assert decoder.plans_for(decode(sequences, batch[1:])) == 1
    assert decoder.plans_for(decode(sequences, batch[1:])) == 0


def test_a_plan_ends_with_its_room() -> None:
    decoder, sequences = planner()
    batch = list(range(16))
    counts = []
    for step in range(34):
        if step == 20:
            batch.remove(3)
        counts.append(decoder.plans_for(decode(sequences, batch)))
    assert [step for step, count in enumerate(counts) if count] == [0, 32]


def test_flashinfer_plans_every_step() -> None:
    with fake_flashinfer.installed() as module:
        decoder, sequences = planner(module.FlashInferDecode)
        for batch in (range(16), range(16), range(15)):
            assert decoder.plans_for(decode(sequences, list(batch))) == 1


LEAVING: dict[str, tuple[NewDecodePlan, list[int]]] = {
    "alone": (decode_plan, [4, 13]),
    "from a shared tile": (tree_plan, [4, 9]),
    "with the whole of a shared tile": (tree_plan, [13, 14]),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of products with infinities
@pytest.mark.parametrize("how", LEAVING)
def test_what_rows_that_left_see_reaches_no_other(how: str) -> None:
    model, batch = make_model("qwen3"), list(range(16))
    new_plan, left = LEAVING[how]
    ours, launched = Decoder(new_plan, model, sizes=[16]), Launched(model)
    sequences = Sequences([12] * 16, np.random.default_rng(3))
    if new_plan is tree_plan:
        sequences.share(batch[:13], 9)
        sequences.share([13, 14], 9)
    for inputs in (sequences.prefill(batch), decode(sequences, batch)):
        ours.forward(inputs)
        launched.forward(inputs)
    num_plans = ours.num_plans
    batch = [seq for seq in batch if seq not in left]
    poison(ours.pool, sequences.held_only_by(left))
    for _ in range(2):
        inputs = decode(sequences, batch)
        torch.testing.assert_close(ours.forward(inputs), launched.forward(inputs), **CLOSE)
        assert ours.all_rows[left].isnan().any(dim=1).all()  # it was there to be seen
    assert ours.num_plans == num_plans


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of products with infinities
@pytest.mark.parametrize("num_shared", [0, 9])
def test_any_batches_give_what_launched_ones_give(num_shared: int) -> None:
    rng = np.random.default_rng(5 + num_shared)
    model = make_model("llama")
    samples = torch.from_numpy(rng.integers(0, VOCAB, SIZES[-1]))
    ours, launched = Decoder(tree_plan, model, samples, [4, 12]), Launched(model)
    sequences = Sequences(rng.integers(10, 16, 14).tolist(), rng)
    sequences.share(list(range(0, 14, 2)), num_shared)
    sequences.share(list(range(1, 14, 2)), num_shared)
    batch: list[int] = []
    planned = 0
    num_lasting = [0, 0]  # steps without a plan where a row had left: of known tokens, and carried
    for step in range(NUM_STEPS):
        batch, joining = changed(batch, step, rng)
        for seq in joining:
            sequences.num_retractions[seq] += 1
        absent = [seq for seq in range(14) if seq not in batch or seq in joining]
        poison(ours.pool, sequences.held_only_by(absent))
        if joining:
            ours.forward(sequences.prefill(joining))
            launched.forward(sequences.prefill(joining))
        # what the host does not know yet is carried, by some rows or all; not all logits are wanted
        known = samples if step % 2 else None
        tokens = rng.integers(0, SIZES[-1] if step % 2 else VOCAB, len(batch)).tolist()
        inputs = sequences.decode(batch, tokens, known)
        some = np.sort(rng.choice(len(batch), len(batch) // 2, replace=False))
        if step % 4 == 1:
            inputs = replace(inputs, carried=some)
        if step % 3 == 2:
            inputs = replace(inputs, logits_rows=some)
        num_plans = ours.num_plans
        torch.testing.assert_close(ours.forward(inputs), launched.forward(inputs), **CLOSE)
        planned = len(batch) if ours.num_plans > num_plans else planned
        num_lasting[step % 2] += planned > len(batch)
    assert min(num_lasting) > 0


def changed(batch: list[int], step: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Return the batch of up to 12 of 14 rows after a step, and which of them are new to it."""
    what = "join" if step == 0 else rng.choice(list(CHANGES), p=list(CHANGES.values()))
    joining: list[int] = []
    leaving: list[int] = []
    if what == "join":
        joining = [seq for seq in range(14) if seq not in batch][: 12 - len(batch)]
    elif what == "retract":
        joining = leaving = [int(rng.choice(batch))]
    elif what == "leave":
        leaving = rng.choice(batch, 1 + step % 3 // 2, replace=False).tolist()
    batch = [*(seq for seq in batch if seq not in leaving), *joining]
    return [batch[1], batch[0], *batch[2:]] if what == "reorder" else batch, joining
