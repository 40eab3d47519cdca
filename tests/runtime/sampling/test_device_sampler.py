"""The device's sampler gives what the host's gives: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.kernels import sampling_ops
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.sampling import Sampler, SamplingRow, token_logprobs
from umbel.runtime.sampling.device_sampler import DeviceSampler, HostSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, MAX_ROWS = 70, 6
WORDS = (VOCAB + 31) // 32


@st.composite
def sampling_rows(draw: Callable[..., Any]) -> SamplingRow:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])),
        top_k=draw(st.sampled_from([0, 3, 40])),
        top_p=draw(st.sampled_from([1.0, 0.4871])),
        min_p=draw(st.sampled_from([0.0, 0.0113])),
        min_tokens=draw(st.sampled_from([0, 0, 4])),
        max_tokens=16,
        logprobs=draw(st.booleans()),
        top_logprobs=draw(st.sampled_from([0, 0, 3])),
        logit_bias=tuple(draw(st.dictionaries(st.integers(0, VOCAB - 1), BIASES)).items()),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.25])),
    )
    row = SamplingRow(
        params,
        seed=draw(st.integers(0, 2**64 - 1)),
        end_ids=[0, 5],
        prompt_ids=np.asarray(sorted(draw(st.sets(st.integers(0, VOCAB - 1)))), np.int64),
    )
    for token_id in draw(st.lists(st.integers(0, VOCAB - 1), max_size=6)):
        row.append(token_id)
    row.num_before = draw(st.integers(0, row.num_sampled))
    if draw(st.booleans()):
        row.bitmask = np.asarray(draw(st.lists(WORD, min_size=WORDS, max_size=WORDS)), np.int32)
    return row


BIASES = st.sampled_from([-100.0, -1.5, 2.25])
WORD = st.integers(-(2**31), 2**31 - 1)


def new_sampler() -> DeviceSampler:
    return DeviceSampler(sampling_ops(), VOCAB, MAX_ROWS, DEVICE)


def masks(rows: list[SamplingRow]) -> torch.Tensor:
    mask = torch.zeros(MAX_ROWS, WORDS, dtype=torch.int32)  # as an earlier batch may have left it
    for i, row in enumerate(rows):
        if row.bitmask is not None:
            mask[i] = torch.from_numpy(row.bitmask)
    return mask


# numpy warns of NaN in the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@settings(max_examples=60 if DEVICE.type == "cuda" else 10)
@given(st.lists(sampling_rows(), min_size=1, max_size=3), st.integers(0, 2**31))
def test_samples_errors_and_logprobs_are_the_hosts(rows: list[SamplingRow], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
    logits[seed % len(rows), 7] = torch.nan if seed % 5 == 0 else 0.5
    expected = Sampler(VOCAB).sample(logits, rows)
    device = new_sampler()
    found = device.sample(logits.to(DEVICE), rows, masks(rows)).wait()
    assert found.token_ids == expected.token_ids
    assert [error is None for error in found.errors] == [error is None for error in expected.errors]
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours == pytest.approx(theirs, abs=1e-4)
    for ours_top, theirs_top in zip(found.top, expected.top, strict=True):
        assert [i for i, _ in ours_top] == [i for i, _ in theirs_top]
        assert [p for _, p in ours_top] == pytest.approx([p for _, p in theirs_top], abs=1e-4)
    kept = device.samples[: len(rows)].tolist()
    assert kept == [max(0, token_id) for token_id in found.token_ids]


def test_tokens_before_the_value_do_not_count_for_min_tokens() -> None:
    row = SamplingRow(SamplingParams(min_tokens=2), end_ids=[5])
    for token_id in (9, 9, 9):
        row.append(token_id)
    row.num_before = 2
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 8] = 2.0, 1.0
    found = new_sampler().sample(logits.to(DEVICE), [row], masks([row])).wait()
    assert found.token_ids == [8]


def test_rows_are_sampled_the_same_whatever_rows_came_before() -> None:
    """What is known of a batch is kept while its rows stay: as they come, leave and change."""
    generator = torch.Generator().manual_seed(0)
    params = [
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=0.4, min_tokens=3),
        SamplingParams(temperature=2.0, top_p=0.6, frequency_penalty=1.5),
        SamplingParams(logprobs=True, top_logprobs=2),
        SamplingParams(),
    ]
    rows = [SamplingRow(each, seed=i, end_ids=[0, 5]) for i, each in enumerate(params)]
    kept = new_sampler()
    for batch in ([0, 1, 2], [0, 1, 2], [0, 2], [3, 4], [4], [2, 0], [1, 2], [1, 2], [3, 1, 2]):
        some = [rows[i] for i in batch]
        logits = torch.randn(len(some), VOCAB, generator=generator).to(DEVICE)
        expected = sampled(new_sampler(), logits.clone(), some)
        assert sampled(kept, logits.clone(), some) == expected
        for i, row in enumerate(some):
            row.append(int(kept.samples[i]))


def test_some_rows_of_the_logits_are_sampled() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [SamplingRow(SamplingParams(temperature=1.0, logprobs=True), seed=i) for i in range(3)]
    expected = Sampler(VOCAB).sample(logits[[4, 0, 5]], rows)
    for sampler in (new_sampler(), HostSampler(VOCAB, MAX_ROWS)):
        found = sampler.sample(logits.to(DEVICE), rows, masks(rows), [4, 0, 5]).wait()
        assert found.token_ids == expected.token_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_rows_that_are_masked_and_rows_that_are_not_share_a_batch() -> None:
    only_nine = np.zeros(WORDS, np.int32)
    only_nine[0] = 1 << 9
    masked = SamplingRow(SamplingParams(), bitmask=only_nine)
    free = SamplingRow(SamplingParams())
    logits = torch.zeros(2, VOCAB)
    logits[:, 3] = 1.0
    mask = masks([masked, free])
    found = new_sampler().sample(logits.to(DEVICE), [masked, free], mask).wait()
    assert found.token_ids == [9, 3]


def sampled(sampler: DeviceSampler, logits: torch.Tensor, rows: list[SamplingRow]) -> object:
    found = sampler.sample(logits, rows, masks(rows)).wait()
    return found.token_ids, found.logprobs, found.top, [error is None for error in found.errors]


@pytest.mark.parametrize("place", ["sample", "greedy", "apply_token_bitmask_", "gather_logprobs"])
@pytest.mark.parametrize("is_adjusted", [False, True])
def test_rows_that_could_not_be_sampled_can_be_given_again(place: str, is_adjusted: bool) -> None:
    """Masks and penalties are not applied twice, and log-probabilities stay the model's."""
    params = SamplingParams(
        temperature=0.0 if place == "greedy" else 0.7,
        top_logprobs=3,
        presence_penalty=2.0 if is_adjusted else 0.0,
    )
    rows = [SamplingRow(params, seed=5), SamplingRow(params, seed=6)]
    for row in rows:
        row.append(9)
    rows[1].bitmask = np.asarray([0x0F0F0F0F] * WORDS, np.int32)
    values = np.random.default_rng(3).normal(size=(2, VOCAB)).astype(np.float32) * 4
    values[:, 9] = 15.0
    logits = torch.from_numpy(values).to(DEVICE)
    expected = sampled(new_sampler(), logits.clone(), rows)
    ops = sampling_ops()

    def run_out(*args: Any) -> None:
        getattr(ops, place)(*args)  # as late as it can
        raise torch.OutOfMemoryError("CUDA out of memory")

    fault: dict[str, Any] = {place: run_out}
    short = dataclasses.replace(ops, **fault)
    with pytest.raises(torch.OutOfMemoryError):
        sampled(DeviceSampler(short, VOCAB, MAX_ROWS, DEVICE), logits, rows)
    assert sampled(new_sampler(), logits, rows) == expected


# numpy warns of NaN in the interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logprobs_of_rows_that_are_no_distribution_are_nan() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, 9], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    at, ids = np.asarray([0, 0, 1, 1, 2, 2, 3]), np.asarray([3, 9, 3, 9, 3, 9, 3])
    found = new_sampler().logprobs(logits.to(DEVICE), ids, at).wait()
    assert np.isnan(found).tolist() == [False, False, True, True, True, True, True]


@given(st.integers(0, 2**31), st.integers(1, 5))
@settings(max_examples=15 if DEVICE.type == "cuda" else 4)
def test_logprobs_of_given_tokens_are_the_hosts(seed: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(num_rows, VOCAB)).astype(np.float32)) * 4
    at = np.sort(rng.integers(0, num_rows, 7))
    ids = rng.integers(0, VOCAB, 7)
    expected = token_logprobs(logits, ids.tolist(), at.tolist())
    for sampler in (new_sampler(), HostSampler(VOCAB, MAX_ROWS)):
        there = logits.to(DEVICE) if isinstance(sampler, DeviceSampler) else logits
        np.testing.assert_allclose(sampler.logprobs(there, ids, at).wait(), expected, atol=1e-4)
