from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import fake_flashinfer
from tests.runtime.model_runner.graph_cases import (
    MAX_SEQS,
    VOCAB,
    Sequences,
    decode_runner,
    launched_runner,
    make_model,
)

from umbel.kernels import decode_plan
from umbel.runtime.model_runner.decode_graphs import NewDecodePlan, batch_sizes


@pytest.fixture(params=["triton", "flashinfer"])
def new_plan(request: pytest.FixtureRequest) -> Iterator[NewDecodePlan]:
    """What plans decodes: ours, or FlashInfer, for which stands what defines it."""
    if request.param == "triton":
        yield decode_plan
        return
    with fake_flashinfer.installed() as module:
        yield module.FlashInferDecode


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_captured_decodes_give_the_logits_of_launched_ones(
    architecture: str, new_plan: NewDecodePlan
) -> None:
    rng = np.random.default_rng(0)
    model = make_model(architecture)
    samples = torch.from_numpy(rng.integers(0, VOCAB, MAX_SEQS))
    captured, launched = decode_runner(model, samples, new_plan), launched_runner(model)
    both = Sequences([7, 3, 12, 1], rng), Sequences([7, 3, 12, 1], np.random.default_rng(0))
    for sequences in both:
        sequences.tokens = [list(tokens) for tokens in both[0].tokens]
    every = [0, 1, 2, 3]
    for runner, sequences in zip((captured, launched), both, strict=True):
        runner.forward(sequences.prefill(every))
    # the batch changes, stays, and carries what the host does not know yet
    batches = [every, every, [2, 0, 3], [2, 0, 3], [1], every, every]
    for step, which in enumerate(batches):
        places = rng.integers(0, MAX_SEQS if step % 2 else VOCAB, len(which)).tolist()
        known = None if step % 2 == 0 else samples
        n = len(which)
        logits = captured.forward(both[0].decode(which, places, known)).rows(0, n).clone()
        expected = launched.forward(both[1].decode(which, places, known)).rows(0, n)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_pass_that_fails_is_planned_anew(new_plan: NewDecodePlan) -> None:
    rng = np.random.default_rng(1)
    model = make_model("llama")
    samples = torch.zeros(MAX_SEQS, dtype=torch.int64)
    runner, launched = decode_runner(model, samples, new_plan), launched_runner(model)
    sequences = Sequences([6, 5], rng)
    prefill = sequences.prefill([0, 1])
    runner.forward(prefill)
    launched.forward(prefill)
    first = sequences.decode([0, 1], [3, 4])
    runner.forward(first)
    launched.forward(first)
    second = sequences.decode([0, 1], [5, 6])
    broken = sequences.decode([0, 1], [7, 8])
    with pytest.raises(IndexError):
        runner.forward(replace(broken, carried=np.asarray([99])))
    launched.forward(second)
    expected = launched.forward(broken).rows(0, 2)
    runner.forward(second)
    logits = runner.forward(broken).rows(0, 2)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_sizes_hold_every_batch_and_are_fine_where_steps_are_short() -> None:
    for most in (1, 3, 64, 100, 512):
        sizes = batch_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
    assert batch_sizes(64)[:5] == [1, 2, 4, 8, 16]
