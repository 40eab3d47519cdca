from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from umbel.kernels import decode_plan
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.decode_graphs import DecodeGraphs, batch_sizes
from umbel.runtime.model_runner.inputs import StepInputs
from umbel.runtime.model_runner.runner import DeviceRunner
from umbel.runtime.models import CausalLM, ModelConfig, load_dummy_model
from umbel.runtime.models.rope import Rope

CPU = torch.device("cpu")
VOCAB = 80
NUM_SLOTS = 256
MAX_SEQS = 5


def make_model(architecture: str) -> CausalLM:
    config = ModelConfig(
        architecture=architecture,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=Rope(),
        max_position_embeddings=64,
        tied_embeddings=True,
    )
    return load_dummy_model(config, dtype=torch.float32, device=CPU)


def make_pool() -> KVPool:
    return KVPool(
        num_layers=2,
        num_slots=NUM_SLOTS,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
        device=CPU,
    )


def run_again(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stand in for a capture where there is no device: a replay runs the pass again."""
    return run


def make_runner(model: CausalLM, *, captured: bool, samples: Tensor) -> DeviceRunner:
    pool, graphs = make_pool(), None
    if captured:
        graphs = DecodeGraphs(model, pool, samples, decode_plan, max_seqs=MAX_SEQS, max_seq_len=64)
        graphs.capture(run_again)
    return DeviceRunner(model, pool, graphs)


class Sequences:
    """Rows of slots that grow by a token per decode; each pass can be given to any runner."""

    def __init__(self, lens: list[int], rng: np.random.Generator) -> None:
        self.slots = [list(range(40 * i, 40 * i + length)) for i, length in enumerate(lens)]
        self.tokens = [rng.integers(0, VOCAB, length).tolist() for length in lens]

    def prefill(self, which: list[int]) -> StepInputs:
        return self._inputs(which, dict.fromkeys(which, 0))

    def decode(
        self, which: list[int], tokens: list[int], samples: Tensor | None = None
    ) -> StepInputs:
        """Add a token to each; with `samples` the tokens are places in it."""
        for seq, token in zip(which, tokens, strict=True):
            self.slots[seq].append(self.slots[seq][-1] + 1)
            self.tokens[seq].append(token)
        inputs = self._inputs(which, {seq: len(self.slots[seq]) - 1 for seq in which})
        if samples is None:
            return inputs
        for seq, token in zip(which, tokens, strict=True):
            self.tokens[seq][-1] = int(samples[token])
        carried = np.arange(len(which))
        return StepInputs(
            **{
                name: getattr(inputs, name)
                for name in StepInputs.__dataclass_fields__
                if name not in ("carried", "samples")
            },
            carried=carried,
            samples=samples,
        )

    def _inputs(self, which: list[int], starts: dict[int, int]) -> StepInputs:
        rows = [(seq, row) for seq in which for row in range(starts[seq], len(self.slots[seq]))]
        query = np.cumsum([0, *(len(self.slots[seq]) - starts[seq] for seq in which)])
        return StepInputs(
            token_ids=np.asarray([self.tokens[seq][row] for seq, row in rows]),
            positions=np.asarray([row for _, row in rows]),
            slot_mapping=np.asarray([self.slots[seq][row] for seq, row in rows]),
            query_indptr=query,
            kv_indptr=np.cumsum([0, *(len(self.slots[seq]) for seq in which)]),
            kv_slots=tuple(np.asarray(self.slots[seq]) for seq in which),
            logits_rows=query[1:] - 1,
            tree_masks={},
            keys=tuple((seq, 0) for seq in which),
        )


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_captured_decodes_give_the_logits_of_launched_ones(architecture: str) -> None:
    rng = np.random.default_rng(0)
    model = make_model(architecture)
    samples = torch.from_numpy(rng.integers(0, VOCAB, MAX_SEQS))
    captured = make_runner(model, captured=True, samples=samples)
    launched = make_runner(model, captured=False, samples=samples)
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


def test_a_pass_that_fails_is_planned_anew() -> None:
    rng = np.random.default_rng(1)
    model = make_model("llama")
    samples = torch.zeros(MAX_SEQS, dtype=torch.int64)
    runner = make_runner(model, captured=True, samples=samples)
    launched = make_runner(model, captured=False, samples=samples)
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
        runner.forward(
            StepInputs(
                **{
                    name: getattr(broken, name)
                    for name in StepInputs.__dataclass_fields__
                    if name != "carried"
                },
                carried=np.asarray([99]),
            )
        )
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
