"""Every family equals transformers at every position, however the rows are cut into passes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tests.runtime.models.tiny_models import (
    CPU,
    MAX_CONTEXT,
    NUM_SLOTS,
    VARIANTS,
    VOCAB_SIZE,
    load,
    make_oracle,
    make_pool,
    oracle_logits,
    run_pass,
)
from transformers import PreTrainedModel

from umbel.runtime.model_runner.inputs import build_inputs
from umbel.runtime.models import CausalLM, ForwardBatch, load_model
from umbel.runtime.request import Request
from umbel.runtime.scheduler.batch import Batch, ScheduledRequest

TOLERANCE = 1e-4


class Pair(NamedTuple):
    ours: CausalLM
    oracle: PreTrainedModel


GetPair = Callable[[str], Pair]


@pytest.fixture(scope="module")
def get_pair(tmp_path_factory: pytest.TempPathFactory) -> GetPair:
    @cache
    def get(variant: str) -> Pair:
        folder = tmp_path_factory.mktemp(variant)
        oracle = make_oracle(variant)
        oracle.save_pretrained(folder)
        return Pair(load(folder), oracle)

    return get


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def request(token_ids: list[int], slots: list[int]) -> Request:
    return Request(0, 0, 0, token_ids, limit=MAX_CONTEXT, slots=array("q", slots))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [MAX_CONTEXT, 7, 1], ids=["whole", "chunked", "one by one"])
def test_logits_equal_transformers(get_pair: GetPair, variant: str, chunk: int) -> None:
    pair = get_pair(variant)
    token_ids = random_ids(random.Random(variant), MAX_CONTEXT)
    row = request(token_ids, random.Random(1).sample(range(NUM_SLOTS), MAX_CONTEXT))
    pool = make_pool(pair.ours)
    logits = [
        run_pass(pair.ours, pool, [(row, start, min(start + chunk, MAX_CONTEXT))])
        for start in range(0, MAX_CONTEXT, chunk)
    ]
    assert logits[0].dtype == torch.float32
    assert_close(torch.cat(logits), oracle_logits(pair.oracle, token_ids))


class Shared(NamedTuple):
    """A row, and the row whose first slots it borrows."""

    row: Request
    parent: int | None
    num_shared: int


def sharing_rows(rng: random.Random) -> list[Shared]:
    """Make rows of which most start with rows of an earlier one, reading the same slots."""
    free = rng.sample(range(NUM_SLOTS), NUM_SLOTS)
    rows: list[Shared] = []
    for i in range(rng.randint(2, 6)):
        parent = rng.randrange(i) if i and rng.random() < 0.8 else None
        base = rows[parent].row if parent is not None else request([], [])
        num_shared = rng.randint(0, len(base.token_ids))
        own = rng.randint(1, 20)
        if num_shared + own > MAX_CONTEXT:
            continue
        rows.append(
            Shared(
                request(
                    base.token_ids[:num_shared] + random_ids(rng, own),
                    base.slots[:num_shared].tolist() + [free.pop() for _ in range(own)],
                ),
                parent if num_shared else None,
                num_shared,
            )
        )
    return rows


def is_ready(rows: list[Shared], done: list[int], i: int) -> bool:
    """Whether what row i borrows is computed: before this pass, or earlier in it."""
    parent = rows[i].parent
    if parent is None:
        return True
    return rows[i].num_shared <= done[parent] and is_ready(rows, done, parent)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("variant", ["llama-tied", "llama-yarn", "qwen2", "qwen3"])
def test_any_schedule_of_rows_that_share_slots_equals_each_row_alone(
    get_pair: GetPair, variant: str, seed: int
) -> None:
    pair = get_pair(variant)
    rng = random.Random(seed)
    rows = sharing_rows(rng)
    pool = make_pool(pair.ours)
    done = [shared.num_shared for shared in rows]
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    while any(done[i] < len(shared.row.token_ids) for i, shared in enumerate(rows)):
        pieces: list[tuple[Request, int, int]] = []
        members: list[int] = []
        for i, shared in enumerate(rows):
            end = min(len(shared.row.token_ids), done[i] + rng.choice((0, 1, 1, 3, 30)))
            if end > done[i] and is_ready(rows, done, i):
                pieces.append((shared.row, done[i], end))
                members.append(i)
                done[i] = end
        if not pieces:
            continue
        order = rng.sample(range(len(pieces)), len(pieces))
        found = run_pass(pair.ours, pool, [pieces[j] for j in order])
        sizes = [pieces[j][2] - pieces[j][1] for j in order]
        for j, part in zip(order, torch.split(found, sizes), strict=True):
            logits[members[j]].append(part)
    for shared, parts in zip(rows, logits, strict=True):
        expected = oracle_logits(pair.oracle, shared.row.token_ids)
        assert_close(torch.cat(parts), expected[shared.num_shared :])


@pytest.mark.parametrize("num_context", [0, 1, 20])
@pytest.mark.parametrize("variant", ["llama", "llama-mqa", "qwen3"])
def test_a_token_tree_equals_each_branch_alone(
    get_pair: GetPair, variant: str, num_context: int
) -> None:
    pair = get_pair(variant)
    rng = random.Random(num_context)
    context = random_ids(rng, num_context)
    # two roots; the parent of each later tree row is any earlier one
    parents = [num_context - 1] * 2 + [num_context + rng.randrange(i) for i in range(2, 12)]
    tree = random_ids(rng, len(parents))
    slots = rng.sample(range(NUM_SLOTS), num_context + len(tree))
    row = request(context + tree, slots)
    row.tree_parents, row.num_context = parents, num_context
    bystander = request(random_ids(rng, 9), [s for s in range(NUM_SLOTS) if s not in slots][:9])

    pool = make_pool(pair.ours)
    cached = num_context // 2
    if cached:
        run_pass(pair.ours, pool, [(row, 0, cached)])
    found = run_pass(pair.ours, pool, [(bystander, 0, 9), (row, cached, len(row.token_ids))])

    assert_close(found[:9], oracle_logits(pair.oracle, bystander.token_ids))
    if num_context:
        expected = oracle_logits(pair.oracle, context)[cached:]
        assert_close(found[9 : 9 + num_context - cached], expected)
    for i in range(len(tree)):
        branch, at = [tree[i]], parents[i]
        while at >= num_context:
            branch.insert(0, tree[at - num_context])
            at = parents[at - num_context]
        expected = oracle_logits(pair.oracle, context + branch)[-1]
        assert_close(found[9 + num_context - cached + i], expected)


def test_only_the_wanted_rows_have_logits(get_pair: GetPair) -> None:
    pair = get_pair("llama")
    row = request(random_ids(random.Random(0), 10), list(range(10)))
    batch = Batch((ScheduledRequest(row, 0, 10),), 0)
    whole = run_pass(pair.ours, make_pool(pair.ours), [(row, 0, 10)])
    for rows in ([9], [3, 0], []):
        inputs = build_inputs(batch, rows)
        found = pair.ours.forward(ForwardBatch.from_inputs(inputs, CPU), make_pool(pair.ours))
        assert found.shape == (len(rows), VOCAB_SIZE)
        assert_close(found, whole[rows])


@pytest.mark.parametrize("variant", ["llama-tied", "llama-yarn", "qwen2", "qwen3"])
def test_bfloat16_is_close_to_float32(tmp_path: Path, variant: str) -> None:
    oracle = make_oracle(variant)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, device=CPU)
    token_ids = random_ids(random.Random(0), MAX_CONTEXT)
    row = request(token_ids, list(range(MAX_CONTEXT)))
    pool = make_pool(model, torch.bfloat16)
    found = [run_pass(model, pool, [(row, at, at + 8)]) for at in range(0, MAX_CONTEXT, 8)]
    expected = oracle_logits(oracle, token_ids)
    assert found[0].dtype == torch.float32
    assert (torch.cat(found) - expected).norm() < 0.05 * expected.norm()
