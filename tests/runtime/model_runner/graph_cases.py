"""Tiny models, pools and passes to compare captured runners with launched ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from tests.support.tiny_config import tiny_config
from torch import Tensor

from umbel.kernels import decode_plan, extend_plan
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.decode_graphs import DecodeGraphs, NewDecodePlan, batch_sizes
from umbel.runtime.model_runner.inputs import StepInputs
from umbel.runtime.model_runner.pass_graphs import PassGraphs, pass_sizes
from umbel.runtime.model_runner.runner import DeviceRunner
from umbel.runtime.models import CausalLM, load_dummy_model

CPU = torch.device("cpu")
VOCAB = 80
NUM_SLOTS = 256
MAX_SEQS = 5


def make_model(architecture: str) -> CausalLM:
    config = tiny_config(architecture, VOCAB)
    return load_dummy_model(config, dtype=torch.float32, device=CPU)


def make_pool(num_slots: int = NUM_SLOTS) -> KVPool:
    return KVPool(
        num_layers=2,
        num_slots=num_slots,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
        device=CPU,
    )


def run_again(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stand in for a capture where there is no device: a replay runs the pass again."""
    return run


def decode_runner(
    model: CausalLM, samples: Tensor, new_plan: NewDecodePlan = decode_plan
) -> DeviceRunner:
    pool = make_pool()
    sizes = batch_sizes(MAX_SEQS)
    graphs = DecodeGraphs(model, pool, samples, new_plan, sizes=sizes, max_seq_len=64)
    graphs.capture(run_again)
    return DeviceRunner(model, pool, graphs)


def pass_runner(model: CausalLM, samples: Tensor, max_tokens: int) -> DeviceRunner:
    pool = make_pool()
    graphs = PassGraphs(model, pool, samples, extend_plan, sizes=pass_sizes(max_tokens))
    graphs.capture(run_again)
    return DeviceRunner(model, pool, None, graphs)


def launched_runner(model: CausalLM) -> DeviceRunner:
    return DeviceRunner(model, make_pool())


class Sequences:
    """Rows of slots that grow pass by pass; each pass can be given to any runner."""

    def __init__(self, lens: list[int], rng: np.random.Generator) -> None:
        self.slots = [list(range(40 * i, 40 * i + length)) for i, length in enumerate(lens)]
        self.tokens = [rng.integers(0, VOCAB, length).tolist() for length in lens]
        self.num_retractions = [0] * len(lens)

    def share(self, which: list[int], num_tokens: int) -> None:
        """Let the first tokens of the first of these be those of all, in the same slots."""
        for seq in which[1:]:
            self.slots[seq][:num_tokens] = self.slots[which[0]][:num_tokens]
            self.tokens[seq][:num_tokens] = self.tokens[which[0]][:num_tokens]

    def held_only_by(self, which: list[int]) -> list[int]:
        """Return the slots that none of the others has."""
        others = {slot for seq, row in enumerate(self.slots) if seq not in which for slot in row}
        return sorted({slot for seq in which for slot in self.slots[seq]} - others)

    def prefill(self, which: list[int]) -> StepInputs:
        return self._inputs(which, dict.fromkeys(which, 0))

    def extend(self, which: list[int], tokens: list[list[int]]) -> StepInputs:
        """Add tokens to each."""
        starts = {}
        for seq, new in zip(which, tokens, strict=True):
            starts[seq] = len(self.slots[seq])
            self.slots[seq] += [self.slots[seq][-1] + 1 + i for i in range(len(new))]
            self.tokens[seq] += new
        return self._inputs(which, starts)

    def decode(
        self, which: list[int], tokens: list[int], samples: Tensor | None = None
    ) -> StepInputs:
        """Add a token to each; with `samples` the tokens are places in it."""
        inputs = self.extend(which, [[token] for token in tokens])
        if samples is None:
            return inputs
        for seq, token in zip(which, tokens, strict=True):
            self.tokens[seq][-1] = int(samples[token])
        return replace(inputs, carried=np.arange(len(which)), samples=samples)

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
            keys=tuple((seq, self.num_retractions[seq]) for seq in which),
        )
