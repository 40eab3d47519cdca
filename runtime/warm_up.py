"""Passes and samples of every kind, run once at load, so that no request waits for a kernel.

Knows runners and samplers by their interfaces; nothing of requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from umbel.lang.sampling_params import SamplingParams

from .model_runner.inputs import StepInputs
from .model_runner.runner import Runner
from .sampling import SamplingRow
from .sampling.device_sampler import TokenSampler

#: rows of the sequences of a pass, one tuple a pass: kernels and tiles are chosen by such lengths
_PASSES = ((1,), (2,), (40, 3), (1, 1, 5), (300, 1, 1, 17))

#: the same for passes that are too large to be captured, of few long and of many short sequences
_LARGE_PASSES = ((1100, 1, 17), (5,) * 210)

#: the most slots that one of them takes
NUM_SLOTS = max(map(sum, _PASSES + _LARGE_PASSES))

#: kernels are compiled for greedy rows, drawn ones, and those with filters; and for float32, which
#: the logits of penalised rows become
_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
)
_PENALISED: dict[str, Any] = {"presence_penalty": 0.5}
_LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}


def warm_up(
    runner: Runner, sampler: TokenSampler, bitmask: torch.Tensor, *, is_dry: bool = False
) -> None:
    """Run what a scheduler may ask for, on slots that nobody owns yet. `bitmask` is the sampler's.

    What is written to the pool is overwritten by whoever takes the slots. In a dry run nothing is
    sampled, so nothing is looked up by what was: sampled ids have no log-probabilities.
    """
    additions: Sequence[dict[str, Any]] = ({}, _PENALISED if is_dry else _PENALISED | _LOGPROBS)
    most = min(runner.num_slots, len(sampler.samples))
    sampled: set[int] = set()  # a sampler sees of a pass how many rows it has
    for lens, has_tree in itertools.product(_PASSES + _LARGE_PASSES, (False, True)):
        if sum(lens) <= runner.num_slots and len(lens) <= most:
            logits = runner.forward(whole_rows(lens, has_tree)).rows(0, len(lens))
            if lens in _PASSES and len(lens) not in sampled:
                sampled.add(len(lens))
                _sample(sampler, logits, bitmask, additions)


def whole_rows(lens: Sequence[int], has_tree: bool = False) -> StepInputs:
    """Return a pass of whole sequences, the longest of them a select's tree if one is wanted.

    The logits wanted are those of their last tokens.
    """
    ends = np.cumsum(lens)
    starts = ends - lens
    masks = {}
    if has_tree:
        longest = int(np.argmax(lens))
        masks[longest] = np.tril(np.ones((lens[longest], lens[longest]), np.bool_))
    return StepInputs(
        token_ids=np.zeros(ends[-1], np.int64),
        positions=np.concatenate([np.arange(length) for length in lens]),
        slot_mapping=np.arange(ends[-1]),
        query_indptr=np.asarray([0, *ends], np.int64),
        kv_indptr=np.asarray([0, *ends], np.int64),
        kv_slots=tuple(np.arange(start, end) for start, end in zip(starts, ends, strict=True)),
        logits_rows=ends - 1,
        tree_masks=masks,
    )


def _sample(
    sampler: TokenSampler,
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    additions: Sequence[dict[str, Any]],
) -> None:
    for how, more in itertools.product(_WAYS, additions):
        rows = [SamplingRow(SamplingParams(**how, **more)) for _ in range(len(logits))]
        rows[0].append(0)
        rows[-1].bitmask = bitmask[0].numpy()
        sampler.sample(logits.clone(), rows, bitmask).wait()
        rows[-1].bitmask = None
        sampler.sample(logits.clone(), rows, bitmask).wait()
        if sampler.arena is not None:
            rows[-1].state = -1  # where the first row was, which is free
            sampler.sample(logits.clone(), rows, bitmask).wait()
    one = np.zeros(1, np.int64)
    sampler.logprobs(logits, one, one).wait()
