"""Triton's sampling gives the ids that the runtime's sampler gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.sampling_cases import DEVICE, as_int64, tensors

from umbel.kernels import RowMasks
from umbel.kernels.triton import greedy, sample
from umbel.kernels.triton.sampling import _gather, _Gathered, _uniform
from umbel.kernels.triton.sampling_parts import launch_parts
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.sampling import Sampler, SamplingRow, uniform

WORDS64 = st.integers(0, 2**64 - 1)


@triton.jit
def _uniform_kernel(seed_ptr, counter_ptr, out_ptr):
    i = tl.program_id(0)
    tl.store(out_ptr + i, _uniform(tl.load(seed_ptr + i), tl.load(counter_ptr + i)))


@settings(max_examples=15)
@given(st.lists(st.tuples(WORDS64, st.integers(0, 2**63 - 1)), min_size=1, max_size=8))
def test_random_numbers_are_those_of_the_runtime(pairs: list[tuple[int, int]]) -> None:
    pair_seeds, counters = [seed for seed, _ in pairs], [counter for _, counter in pairs]
    out = torch.empty(len(pairs), dtype=torch.float64, device=DEVICE)
    _uniform_kernel[(len(pairs),)](as_int64(pair_seeds), as_int64(counters), out)
    assert out.tolist() == uniform(pair_seeds, counters).tolist()


@st.composite
def sampling_rows(draw: Callable[..., Any]) -> SamplingRow:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 40, 1000])),
        # no sum of few equal weights falls on these, where float32 and float64 could part
        top_p=draw(st.sampled_from([1.0, 1.0, 0.0517, 0.4871, 0.9931])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.0113, 0.6137])),
    )
    return SamplingRow(params, draw(WORDS64), draw(st.integers(0, 2**40)))


@settings(max_examples=20)
@given(
    st.sampled_from([1, 2, 41, 100]),
    st.booleans(),
    st.lists(sampling_rows(), min_size=1, max_size=3),
    st.integers(0, 2**31),
)
def test_sampling_is_the_runtimes(
    vocab_size: int, has_ties: bool, rows: list[SamplingRow], seed: int
) -> None:
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    if has_ties:
        logits = logits.round()
        logits[:, 1::4] = -torch.inf
    expected = Sampler(vocab_size).sample(logits, rows).token_ids
    assert sample(logits.to(DEVICE), tensors(rows)).tolist() == expected


def test_sampling_over_several_parts_is_the_runtimes() -> None:
    options = [
        (0, 1.0, 0.0),
        (0, 0.8719, 0.0),
        (7, 0.8719, 0.0217),
        (3000, 0.8719, 0.0),
        (0, 1, 0.3),
    ]
    rows = [
        SamplingRow(SamplingParams(temperature=1.4, top_k=k, top_p=p, min_p=m), seed=17)
        for k, p, m in options * 2
    ]
    logits = torch.randn(10, 4500, generator=torch.Generator().manual_seed(0)) * 2
    logits[5:] = logits[5:].round()  # many ties
    expected = Sampler(4500).sample(logits, rows).token_ids
    assert sample(logits.to(DEVICE), tensors(rows)).tolist() == expected


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.5, 30.0])
def test_top_p_keeps_what_the_runtime_keeps_however_the_logits_lie(spread: float) -> None:
    """All alike, in a range that floats hardly divide, nearly flat, and peaked."""
    shares = (0.0013, 0.3517, 0.9091)
    rows = [SamplingRow(SamplingParams(temperature=0.9, top_p=p), seed=3) for p in shares * 2]
    logits = torch.randn(6, 4500, generator=torch.Generator().manual_seed(1)) * spread + 4
    logits[3:] = logits[3:].bfloat16().float()  # ties at the threshold
    expected = Sampler(4500).sample(logits, rows).token_ids
    assert sample(logits.to(DEVICE), tensors(rows)).tolist() == expected


def test_of_ties_at_the_threshold_the_lowest_ids_are_kept_whatever_part_they_lie_in() -> None:
    logits = torch.randint(2, (1, 8192), generator=torch.Generator().manual_seed(2)).float()
    logits = logits.repeat(6, 1)
    # about a quarter of the zeros is left out: half of those in the second part
    rows = [SamplingRow(SamplingParams(temperature=1.0, top_p=0.9303), seed=i) for i in range(6)]
    expected = Sampler(8192).sample(logits, rows).token_ids
    assert sample(logits.to(DEVICE), tensors(rows)).tolist() == expected


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 100, 9000]), st.integers(0, 4), st.integers(0, 2**31))
def test_greedy_takes_the_lowest_of_the_highest(vocab_size: int, num_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator).round()
    assert greedy(logits.to(DEVICE)).tolist() == logits.argmax(-1).tolist()


# numpy warns of inf - inf in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_broken_row_gives_no_id() -> None:
    logits = torch.zeros(5, 9000)
    logits[1, 8999] = torch.nan
    logits[2] = -torch.inf
    logits[3, 17] = torch.inf
    rows = [SamplingRow(SamplingParams(temperature=t)) for t in (0.0, 1.0, 1.0, 1.0, 1.0)]
    ids = sample(logits.to(DEVICE), tensors(rows)).tolist()
    assert [i == -1 for i in ids] == [False, True, True, True, False]
    assert greedy(logits.to(DEVICE)).tolist() == [0, -1, -1, -1, 0]


def packed(allowed: torch.Tensor, states: torch.Tensor) -> RowMasks:
    """Return masks whose table allows these ids, bool [num_states, vocab_size]."""
    num_states, vocab_size = allowed.shape
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    words = np.zeros((num_states, (vocab_size + 31) // 32 * 4), np.uint8)
    words[:, : bits.shape[1]] = bits
    table = torch.from_numpy(words.view(np.int32))
    return RowMasks(table.to(DEVICE), states.to(DEVICE))


def random_masks(num_rows: int, vocab_size: int, seed: int) -> tuple[RowMasks, torch.Tensor]:
    """Return masks that allow few, half or all ids, in turn; and the ids each row allows."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.05, 0.5, 1.0])[:, None]
    allowed = torch.rand(3, vocab_size, generator=generator) < share
    allowed[:, vocab_size // 2] = True
    states = torch.arange(num_rows, dtype=torch.int32) % 3
    return packed(allowed, states), allowed[states.long()]


def gather(logits: torch.Tensor, rows: list[SamplingRow], masks: RowMasks | None) -> _Gathered:
    """Return what the last launch of sampling is given."""
    batch = tensors(rows)
    return _gather(logits, batch, masks, launch_parts(logits, batch, masks))


@settings(max_examples=20)
@given(
    st.sampled_from([1, 41, 100, 5000]),
    st.lists(sampling_rows(), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_masks_give_what_masked_logits_give(
    vocab_size: int, rows: list[SamplingRow], seed: int
) -> None:
    masks, allowed = random_masks(len(rows), vocab_size, seed)
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    plain = logits.masked_fill(~allowed, -torch.inf).to(DEVICE)
    logits = logits.to(DEVICE)
    assert greedy(logits, masks).tolist() == greedy(plain).tolist()
    assert sample(logits, tensors(rows), masks).tolist() == sample(plain, tensors(rows)).tolist()


def test_top_k_looks_at_what_is_allowed_where_that_is_less() -> None:
    """Forbidden logits are as many as the vocabulary; none is gathered."""
    vocab_size, allowed = 9000, [3, 64, 4500, 8999]
    words = np.zeros(-(-vocab_size // 128) * 4, np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    table = torch.from_numpy(words.view(np.int32)[None]).to(DEVICE)
    masks = RowMasks(table, torch.zeros(6, dtype=torch.int32, device=DEVICE))
    rows = [
        SamplingRow(SamplingParams(temperature=1.0, top_k=50, top_p=p), seed)
        for seed in range(3)
        for p in (1.0, 0.9)
    ]
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))
    hidden = torch.full_like(logits, -torch.inf)
    hidden[:, allowed] = logits[:, allowed]
    expected = Sampler(vocab_size).sample(hidden, rows).token_ids
    assert sample(logits.to(DEVICE), tensors(rows), masks).tolist() == expected
    gathered = gather(logits.to(DEVICE), rows, masks)
    assert gathered.counts is not None
    assert gathered.counts.sum(1).tolist() == [len(allowed)] * 6


# numpy warns of NaN in the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_a_row_is_broken_whatever_its_mask_forbids() -> None:
    logits = torch.zeros(2, 100)
    logits[0, 9] = torch.nan
    table = torch.tensor([[1 << 7, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    masks = RowMasks(table, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    assert greedy(logits.to(DEVICE), masks).tolist() == [-1, 7]


#: temperature, top-k, top-p, min-p
KINDS = (
    (0.0, 0, 1.0, 0.0),
    (1.2, 0, 1.0, 0.0),
    (1.2, 40, 1.0, 0.0),
    (1.2, 0, 0.8719, 0.0),
    (1.2, 0, 1.0, 0.0217),
    (1.2, 40, 0.8719, 0.0217),
)


# numpy warns of NaN, and of inf - inf, in the interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_under_masks_give_what_they_give_on_masked_logits(dtype: torch.dtype) -> None:
    """For rows of all kinds in a batch, and again if they are given again.

    A mask allows few ids of one part, fewer than top-k; most; all; none; or not where a NaN is.
    """
    vocab_size = 4523
    generator = torch.Generator().manual_seed(5)
    allowed = torch.zeros(5, vocab_size, dtype=torch.bool)
    allowed[0, torch.arange(4100, 4523, 23)] = True
    allowed[1] = torch.rand(vocab_size, generator=generator) < 0.8
    allowed[2] = True
    allowed[4] = allowed[1]
    allowed[4, 4200] = False
    kinds = [(state, how) for state in range(5) for how in (KINDS if state < 3 else KINDS[:3])]
    states = torch.tensor([state for state, _ in kinds], dtype=torch.int32)
    rows = [
        SamplingRow(SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m), seed)
        for seed, (_, (t, k, p, m)) in enumerate(kinds)
    ]
    logits = (torch.randn(len(rows), vocab_size, generator=generator) * 2).to(dtype)
    logits[states == 4, 4200] = torch.nan
    plain = logits.masked_fill(~allowed[states.long()] & ~logits.isnan(), -torch.inf)
    expected = sample(plain.to(DEVICE), tensors(rows)).tolist()
    assert expected == Sampler(vocab_size).sample(plain.float(), rows).token_ids
    assert [i == -1 for i in expected] == [state >= 3 for state in states.tolist()]
    given, masks = logits.clone().to(DEVICE), packed(allowed, states)
    for _ in range(2):
        assert sample(given, tensors(rows), masks).tolist() == expected
    hidden = given.cpu() == -torch.inf  # in place, or not
    assert (plain[hidden] == -torch.inf).all()
    torch.testing.assert_close(
        given.cpu()[~hidden], logits[~hidden], rtol=0, atol=0, equal_nan=True
    )


def test_each_part_gives_what_its_range_says_even_if_that_is_nothing() -> None:
    """Parts whose highest logit is below the range are not read: their share is zero."""
    part, num_parts = 4096, 3
    rows = [
        SamplingRow(SamplingParams(temperature=1.2, top_k=k, top_p=p, min_p=m))
        for _, k, p, m in KINDS[2:] * 2
    ]
    logits = torch.randn(len(rows), num_parts * part, generator=torch.Generator().manual_seed(4))
    logits[:, part:] -= 40
    logits[len(rows) // 2 :, part:] = -torch.inf
    logits = logits.to(DEVICE)
    torch.use_deterministic_algorithms(True)  # what is never written is NaN, or a huge count
    try:
        found = gather(logits, rows, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.ranges is not None
    assert found.counts is not None
    assert found.above is not None
    assert found.kept is not None
    x = logits.double().view(len(rows), num_parts, part)
    low, high = found.ranges.double()[:, :, None, None].unbind(1)
    between = (x >= low) & (x < high)
    above = torch.where(x >= high, ((x - x.amax((1, 2), True)) / 1.2).exp(), 0.0)
    min_p = tensors(rows).min_p[:, None, None]
    assert torch.equal(found.counts, between.sum(-1).int())
    torch.testing.assert_close(found.above.double(), above.sum(-1), rtol=1e-5, atol=0)
    kept = torch.where(above >= min_p, above, 0.0).sum(-1)
    torch.testing.assert_close(found.kept, kept, rtol=1e-5, atol=0)
    assert not found.counts[:, 1:].any()
    assert not found.kept[:, 1:].any()
    assert found.counts.any(1).tolist() == [p < 1 or k > 0 for _, k, p, _ in KINDS[2:] * 2]
