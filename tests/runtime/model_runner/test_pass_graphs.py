from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.runtime.model_runner.graph_cases import (
    MAX_SEQS,
    VOCAB,
    Sequences,
    launched_runner,
    make_model,
    pass_runner,
)

from umbel.runtime.model_runner import pass_graphs
from umbel.runtime.model_runner.inputs import StepInputs


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_captured_passes_give_the_logits_of_launched_ones(architecture: str) -> None:
    rng = np.random.default_rng(0)
    model = make_model(architecture)
    samples = torch.from_numpy(rng.integers(0, VOCAB, MAX_SEQS))
    captured = pass_runner(model, samples, max_tokens=32)
    launched = launched_runner(model)
    sequences = Sequences([7, 3, 12, 1], rng)

    def check(inputs: StepInputs) -> None:
        n = len(inputs.logits_rows)
        ours = captured.forward(inputs).rows(0, n).clone()
        torch.testing.assert_close(ours, launched.forward(inputs).rows(0, n), rtol=1e-4, atol=1e-4)

    check(sequences.prefill([0, 1, 2, 3]))
    check(sequences.extend([2, 0], [[5, 6, 7], [9]]))  # a jump beside a decode
    check(sequences.decode([1, 3], [2, 4], samples))
    some = sequences.extend([0, 1], [[1, 2], [3, 4, 5, 6, 7]])
    check(replace(some, logits_rows=np.asarray([4])))
    none = sequences.extend([3], [[8, 8]])
    check(replace(none, logits_rows=np.zeros(0, np.int64)))
    tree = sequences.extend([2], [[1, 2, 3, 4]])
    mask = np.tril(np.ones((4, int(tree.kv_indptr[-1])), np.bool_), int(tree.kv_indptr[-1]) - 4)
    mask[2, -3] = mask[3, -3] = False  # the last two rows stand beside the second
    check(replace(tree, tree_masks={0: mask}, logits_rows=np.arange(4)))


def test_a_pass_that_is_too_large_is_launched() -> None:
    model = make_model("llama")
    samples = torch.zeros(MAX_SEQS, dtype=torch.int64)
    runner, launched = pass_runner(model, samples, max_tokens=8), launched_runner(model)
    inputs = Sequences([7, 3], np.random.default_rng(2)).prefill([0, 1])
    logits = runner.forward(inputs).rows(0, 2)
    torch.testing.assert_close(logits, launched.forward(inputs).rows(0, 2))


@pytest.mark.parametrize("num_wanted", [2, 3, 4, 8])
def test_few_rows_or_all_give_logits(num_wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_graphs, "_FEW_LOGITS", 3)
    model = make_model("llama")
    samples = torch.zeros(MAX_SEQS, dtype=torch.int64)
    runner, launched = pass_runner(model, samples, max_tokens=8), launched_runner(model)
    whole = Sequences([5, 3], np.random.default_rng(2)).prefill([0, 1])
    inputs = replace(whole, logits_rows=np.arange(8)[-num_wanted:])
    logits = runner.forward(inputs).rows(0, num_wanted)
    assert logits.shape == (num_wanted, VOCAB)
    torch.testing.assert_close(logits, launched.forward(inputs).rows(0, num_wanted))
