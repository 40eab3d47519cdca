from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.sampling.random_numbers import uniform
from umbel.runtime.sampling.sampler import SampledTokens, Sampler, SamplingRow, token_logprobs

VOCAB = 41  # no multiple of 32: the bitmask has padding bits


def pack(allowed: set[int], vocab_size: int = VOCAB) -> npt.NDArray[np.int32]:
    row = np.zeros(-(-vocab_size // 32), np.uint32)
    for i in allowed:
        row[i // 32] |= np.uint32(1 << (i % 32))
    return row.view(np.int32)


# few distinct values, so that ties are common
logit_rows = st.lists(
    st.integers(-6, 6).map(lambda x: x / 2) | st.floats(-20, 20, width=32),
    min_size=VOCAB,
    max_size=VOCAB,
)
token_ids = st.integers(0, VOCAB - 1)


@st.composite
def sampling_rows(draw: Callable[..., Any]) -> SamplingRow:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 40, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.6])),
        min_tokens=draw(st.sampled_from([0, 3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -0.4])),
        logit_bias=tuple(draw(st.lists(st.tuples(token_ids, st.floats(-5, 5)), max_size=3))),
        logprobs=draw(st.booleans()),
        top_logprobs=draw(st.sampled_from([0, 0, 3])),
    )
    allowed = draw(st.none() | st.sets(token_ids, min_size=3))
    row = SamplingRow(
        params,
        seed=draw(st.integers(0, 2**64 - 1)),
        end_ids=(0, 7),
        bitmask=None if allowed is None else pack(allowed),
        prompt_ids=np.asarray(draw(st.lists(token_ids, max_size=5)), np.int64),
    )
    for token_id in draw(st.lists(token_ids, max_size=6)):
        row.append(token_id)
    return row


batches = st.lists(st.tuples(logit_rows, sampling_rows()), min_size=1, max_size=6)


def reference_sample(logits: list[float], row: SamplingRow) -> tuple[int, float]:
    """One row, step by step on plain lists; also how near the draw came to another id."""
    params = row.params
    x = [np.float32(v) for v in logits]
    for i, bias in params.logit_bias:
        x[i] += np.float32(bias)
    penalty = np.float32(params.repetition_penalty)
    for i in {*row.prompt_ids.tolist(), *row.output_counts} if penalty != 1 else ():
        x[i] = x[i] / penalty if x[i] > 0 else x[i] * penalty
    for i, count in row.output_counts.items():
        x[i] -= np.float32(params.frequency_penalty * count + params.presence_penalty)
    if row.num_sampled < params.min_tokens:
        for i in row.end_ids:
            x[i] = np.float32("-inf")
    if row.bitmask is not None:
        words = row.bitmask.view(np.uint32).tolist()
        for i in range(VOCAB):
            if not words[i // 32] >> (i % 32) & 1:
                x[i] = np.float32("-inf")
    order = sorted(range(VOCAB), key=lambda i: (-x[i], i))
    if params.temperature == 0:
        return order[0], 1.0
    best = float(x[order[0]])
    weight = {i: float(np.exp((float(x[i]) - best) / params.temperature)) for i in range(VOCAB)}
    margin = 1.0
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        needed = params.top_p * sum(weight[i] for i in order)
        mass = np.cumsum([weight[i] for i in order])
        order = order[: int((mass < needed).sum()) + 1]
        margin = float(np.abs(mass - needed).min())
    if params.min_p:
        order = [i for i in order if weight[i] >= params.min_p]
    kept = sorted(order)
    cdf = np.cumsum([weight[i] for i in kept])
    u = float(uniform([row.seed], [row.num_sampled])[0]) * float(cdf[-1])
    margin = min(margin, float(np.abs(cdf - u).min()))
    return kept[int((cdf <= u).sum())], margin


@given(batches)
def test_sampling_is_what_plain_lists_give(batch: list[tuple[list[float], SamplingRow]]) -> None:
    result = sample(batch)
    for i, (logits, row) in enumerate(batch):
        if result.errors[i] is not None:  # the mask and min_tokens can leave nothing
            assert row.bitmask is not None
            assert "no token is allowed" in str(result.errors[i])
            continue
        expected, margin = reference_sample(logits, row)
        if margin > 1e-9:
            assert result.token_ids[i] == expected


@given(batches, st.randoms(use_true_random=False))
def test_a_row_gets_the_same_alone_and_in_any_batch(
    batch: list[tuple[list[float], SamplingRow]], random: Any
) -> None:
    together = sample(batch)
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = sample([batch[i] for i in order])
    for at, i in enumerate(order):
        alone = sample([batch[i]])
        for result, k in [(shuffled, at), (alone, 0)]:
            assert result.token_ids[k] == together.token_ids[i]
            assert result.logprobs[k] == together.logprobs[i]
            assert result.top[k] == together.top[i]
            assert str(result.errors[k]) == str(together.errors[i])


def sample(batch: list[tuple[list[float], SamplingRow]]) -> SampledTokens:
    logits = torch.tensor([logits for logits, _ in batch], dtype=torch.float32)
    before = logits.clone()
    result = Sampler(VOCAB).sample(logits, [row for _, row in batch])
    assert torch.equal(logits, before)
    return result


def test_a_large_vocabulary_row_is_bitwise_the_same_alone_and_batched() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 50_001, generator=generator) * 3
    params = SamplingParams(temperature=0.9, top_p=0.97, logprobs=True, top_logprobs=5)
    rows = [SamplingRow(params, seed=seed) for seed in range(7)]
    sampler = Sampler(50_001)
    together = sampler.sample(logits, rows)
    for i in range(7):
        alone = sampler.sample(logits[i : i + 1].clone(), rows[i : i + 1])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]
        assert alone.top[0] == together.top[i]


def chi_square(params: SamplingParams, probabilities: npt.NDArray[np.float64]) -> float:
    """Statistic of 4,000 draws against `probabilities` (0 must never be drawn)."""
    num_draws = 4000
    logits = torch.tensor([CHI_LOGITS] * num_draws, dtype=torch.float32)
    rows = [SamplingRow(params, seed=99, num_sampled=i) for i in range(num_draws)]
    drawn = Sampler(len(CHI_LOGITS)).sample(logits, rows).token_ids
    counts = np.bincount(drawn, minlength=len(CHI_LOGITS))
    assert not counts[probabilities == 0].any()
    expected = probabilities[probabilities > 0] * num_draws
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


CHI_LOGITS = [0.3, -1.0, 1.2, 0.3, -float("inf"), 2.0, -0.5, 1.0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    p = torch.softmax(torch.tensor(CHI_LOGITS, dtype=torch.float64) / temperature, 0).numpy()
    # 99.99% point of chi-square with 6 degrees of freedom
    assert chi_square(SamplingParams(temperature=temperature), p) < 27.9


def test_draws_follow_the_filtered_softmax() -> None:
    p = torch.softmax(torch.tensor(CHI_LOGITS, dtype=torch.float64), 0).numpy()
    p[np.argsort(-p, kind="stable")[4:]] = 0  # ids 5, 2, 7 and the first of the tied 0 and 3
    assert chi_square(SamplingParams(temperature=1.0, top_k=4), p / p.sum()) < 21.1  # 3 degrees


def test_a_broken_row_fails_alone() -> None:
    good = [0.0, 1.0, 2.0]
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            good,
            [0.0, nan, 1.0],
            good,
            [-inf] * 3,
            good,
            [0.0, inf, 1.0],
            good,
            good,
            [3e38, 0.0, 1.0],
        ]
    )
    params = SamplingParams(logprobs=True)
    rows = [SamplingRow(params) for _ in range(9)]
    rows[6] = SamplingRow(params, bitmask=pack(set(), 3))
    rows[7] = SamplingRow(SamplingParams(logit_bias=((3, 1.0),)))
    small = SamplingParams(repetition_penalty=1e-30)
    rows[8] = SamplingRow(small, prompt_ids=np.zeros(1, np.int64))
    result = Sampler(3).sample(logits, rows)
    messages = {
        1: "highest logit is nan, so",
        3: "highest logit is -inf, so",
        5: "highest logit is inf, so",
        6: "no token is allowed",
        7: "logit_bias names token id 3; the vocabulary has 3 ids",
        8: "highest logit is inf after logit_bias",
    }
    for i in range(9):
        if i in messages:
            assert messages[i] in str(result.errors[i])
            assert (result.token_ids[i], result.logprobs[i]) == (-1, None)
        else:
            assert result.errors[i] is None
            assert result.token_ids[i] == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300])
def test_min_tokens_keeps_end_ids_out_until_then(temperature: float) -> None:
    params = SamplingParams(min_tokens=2, temperature=temperature)
    row = SamplingRow(params, end_ids=frozenset({0, 2}))
    logits = torch.tensor([[200.0, 1.0, 300.0]])
    drawn = []
    for _ in range(3):
        drawn += Sampler(3).sample(logits, [row]).token_ids
        row.append(drawn[-1])
    assert drawn == [1, 1, 2]


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 1.0}, {"presence_penalty": 1.0}, {"repetition_penalty": 2.0}],
)
def test_what_was_sampled_is_penalized(penalty: dict[str, float]) -> None:
    row = SamplingRow(SamplingParams(**penalty))  # type: ignore[arg-type]
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 2.0, 1.5
    drawn = []
    for _ in range(2):
        drawn += Sampler(VOCAB).sample(logits, [row]).token_ids
        row.append(drawn[-1])
    assert drawn == [3, 4]


@given(logit_rows, st.floats(0.001, 1.0), st.integers(0, 2**64 - 1))
def test_top_k_1_is_greedy(logits: list[float], temperature: float, seed: int) -> None:
    row = SamplingRow(SamplingParams(temperature=temperature, top_k=1), seed=seed)
    greedy = SamplingRow(SamplingParams())
    result = sample([(logits, row), (logits, greedy)])
    assert result.token_ids[0] == result.token_ids[1] == logits.index(max(logits))


@given(logit_rows, st.integers(1, 50))
def test_logprobs_are_log_softmax_of_the_raw_logits(logits: list[float], num_top: int) -> None:
    params = SamplingParams(temperature=0.7, logit_bias=((1, 9.0),), top_logprobs=num_top)
    result = sample([(logits, SamplingRow(params))])
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)
    assert result.logprobs[0] == pytest.approx(float(expected[result.token_ids[0]]), abs=1e-5)
    ids = [i for i, _ in result.top[0]]
    assert ids == sorted(range(VOCAB), key=lambda i: (-logits[i], i))[:num_top]
    values = [value for _, value in result.top[0]]
    np.testing.assert_allclose(values, expected[ids].numpy(), atol=1e-5)


def test_no_logprobs_unless_asked_for() -> None:
    result = sample([([0.0] * VOCAB, SamplingRow(SamplingParams()))])
    assert (result.logprobs, result.top) == ([None], [()])


def test_an_empty_batch_samples_nothing() -> None:
    result = Sampler(VOCAB).sample(torch.empty(0, VOCAB), [])
    assert result == SampledTokens([], [], [], [])


@settings(max_examples=30)
@given(
    st.lists(logit_rows, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), token_ids), max_size=12),
)
def test_token_logprobs_gathers_any_pairs(
    rows: list[list[float]], pairs: list[tuple[int, int]]
) -> None:
    logits = torch.tensor(rows, dtype=torch.float32)
    pairs = [(row % len(rows), token) for row, token in pairs]
    got = token_logprobs(logits, [t for _, t in pairs], [r for r, _ in pairs])
    expected = torch.log_softmax(logits.double(), -1)
    np.testing.assert_allclose(got, [float(expected[pair]) for pair in pairs], atol=1e-5)
    first = token_logprobs(logits, [0] * len(rows))
    np.testing.assert_allclose(first, expected[:, 0].numpy(), atol=1e-5)


def test_token_logprobs_of_a_broken_row_are_nan() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 0.0], [-float("inf")] * 2])
    got = token_logprobs(logits, [0, 1, 0])
    assert np.isnan(got).tolist() == [True, False, True]


@pytest.mark.parametrize("share", [0.001, 0.05, 0.4, 0.98])
@pytest.mark.parametrize("vocab_size", [70, 5000])
def test_a_mask_gives_what_logits_of_minus_infinity_give(share: float, vocab_size: int) -> None:
    rng = np.random.default_rng(int(share * 1000) + vocab_size)
    sampler = Sampler(vocab_size)
    options = [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (0.7, 0, 0.8719), (1.0, 40, 0.9931)]
    for seed, (temperature, top_k, top_p) in enumerate(options * 3):
        logits = torch.from_numpy(rng.standard_normal((1, vocab_size)).astype(np.float32) * 3)
        allowed = rng.random(vocab_size) < share
        allowed[rng.integers(vocab_size)] = True
        padded = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
        padded[:vocab_size] = allowed
        padded[vocab_size:] = seed % 2 == 1  # padding must not be drawn
        bitmask = np.packbits(padded, bitorder="little").view(np.int32)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        plain = logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
        expected = sampler.sample(plain, [SamplingRow(params, seed=seed)]).token_ids
        masked = SamplingRow(params, seed=seed, bitmask=bitmask)
        assert sampler.sample(logits, [masked]).token_ids == expected
