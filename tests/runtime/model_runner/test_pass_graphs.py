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
    make_pool,
    pass_runner,
    run_again,
)

from umbel.kernels import extend_plan
from umbel.runtime.model_runner import pass_graphs
from umbel.runtime.model_runner.inputs import StepInputs
from umbel.runtime.model_runner.pass_graphs import PassGraphs


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


def test_a_large_pass_that_gives_many_logits_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of all its rows would take memory that nearly no pass needs."""
    monkeypatch.setattr(pass_graphs, "_FEW_LOGITS", 3)
    monkeypatch.setattr(pass_graphs, "_ALL_LOGITS", 4)
    model, samples = make_model("llama"), torch.zeros(MAX_SEQS, dtype=torch.int64)
    graphs = PassGraphs(model, make_pool(), samples, extend_plan, sizes=[4, 8])
    graphs.capture(run_again)
    whole = Sequences([5, 3], np.random.default_rng(2)).prefill([0, 1])
    small = Sequences([4], np.random.default_rng(2)).prefill([0])
    for inputs, num_wanted, fits in ((whole, 3, True), (whole, 4, False), (small, 4, True)):
        wanted = replace(inputs, logits_rows=np.arange(num_wanted))
        assert graphs.fits(wanted) == fits
        logits = graphs.run(wanted) if fits else None
        assert logits is None or logits.shape == (num_wanted, VOCAB)
