"""Every Triton op equals reference.py: compiled on a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from umbel.kernels import reference
from umbel.kernels import triton as ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter cuts float32 to bfloat16 where the hardware rounds
BF16_ERROR = 4e-3 if DEVICE == "cuda" else 1.2e-2

# 15 by default, 200 with --hypothesis-profile=ci
quick = settings(max_examples=min(200, settings().max_examples // 2))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
seeds = st.integers(0, 2**31)


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).norm()
    limit = 1e-5 if actual.dtype == torch.float32 else BF16_ERROR
    if actual.dtype == torch.bfloat16 and actual.numel() < 64:
        limit = 2**-6  # few outputs have nothing to average two last bits out with
    assert error <= limit * expected.double().norm()


@quick
@given(seeds, dtypes, st.integers(0, 5), st.integers(1, 200))
def test_rms_norm(seed: int, dtype: torch.dtype, num_tokens: int, n: int) -> None:
    x = randn(num_tokens, n, seed=seed, dtype=dtype)
    weight = randn(n, seed=seed + 1, dtype=dtype)
    assert_near(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    residual = randn(num_tokens, n, seed=seed + 2, dtype=dtype)
    ours, theirs = residual.clone(), residual.clone()
    assert_near(
        ops.fused_add_rms_norm_(x, ours, weight, 1e-5),
        reference.fused_add_rms_norm_(x, theirs, weight, 1e-5),
    )
    assert_near(ours, theirs)


@pytest.mark.parametrize("per_head", [False, True])
def test_rms_norm_of_heads_inside_a_merged_row(per_head: bool) -> None:
    merged = randn(7, 10, 24, seed=0, dtype=torch.float32)
    x = merged[:, 2:5]
    weight = randn(*([3, 24] if per_head else [24]), seed=1, dtype=torch.float32)
    assert_near(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@quick
@given(seeds, dtypes, st.integers(0, 4), st.integers(1, 1500))
def test_silu_and_mul(seed: int, dtype: torch.dtype, num_tokens: int, n: int) -> None:
    x = randn(num_tokens, 2 * n, seed=seed, dtype=dtype) * 4
    assert_near(ops.silu_and_mul(x), reference.silu_and_mul(x))


@quick
@given(
    seeds,
    dtypes,
    st.integers(0, 5),
    st.sampled_from([(1, 1), (4, 2), (9, 3), (8, 8), (6, 1)]),
    st.sampled_from([2, 16, 20, 64]),
    st.booleans(),
    st.booleans(),
)
def test_the_fused_op_is_norm_rope_and_write(
    seed: int,
    dtype: torch.dtype,
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    has_norms: bool,
    has_rope: bool,
) -> None:
    num_heads, num_kv_heads = heads
    merged = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=seed, dtype=dtype)
    q, k, v = torch.split(merged, [num_heads, num_kv_heads, num_kv_heads], 1)
    cos = randn(num_tokens, 1, head_dim // 2, seed=seed + 1, dtype=dtype)
    sin = randn(num_tokens, 1, head_dim // 2, seed=seed + 2, dtype=dtype)
    q_weight = randn(head_dim, seed=seed + 3, dtype=dtype)
    k_weight = randn(head_dim, seed=seed + 4, dtype=dtype)
    slots = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    slots = slots.to(DEVICE)
    caches = randn(2, 8, num_kv_heads, head_dim, seed=seed + 5, dtype=dtype)

    expected_q, expected_k = q.clone(), k.clone()
    if has_norms:
        expected_q = reference.rms_norm(q, q_weight, 1e-6)
        expected_k = reference.rms_norm(k, k_weight, 1e-6)
    if has_rope:
        reference.apply_rope_(expected_q, cos, sin)
        reference.apply_rope_(expected_k, cos, sin)
    expected = caches.clone()
    reference.write_kv_(expected[0], expected[1], slots, expected_k, v)

    ops.norm_rope_write_kv_(
        q,
        k,
        v,
        (q_weight, k_weight, 1e-6) if has_norms else None,
        (cos, sin) if has_rope else None,
        (caches[0], caches[1], slots),
    )
    assert_near(q, expected_q)
    assert_near(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


@quick
@given(seeds, dtypes, st.integers(0, 5), st.integers(1, 9), st.sampled_from([2, 16, 24]))
def test_rope_and_kv_write_alone(
    seed: int, dtype: torch.dtype, num_tokens: int, num_heads: int, head_dim: int
) -> None:
    x = randn(num_tokens, num_heads, head_dim, seed=seed, dtype=dtype)
    cos = randn(num_tokens, 1, head_dim // 2, seed=seed + 1, dtype=dtype)
    sin = randn(num_tokens, 1, head_dim // 2, seed=seed + 2, dtype=dtype)
    ours, theirs = x.clone(), x.clone()
    ops.apply_rope_(ours, cos, sin)
    reference.apply_rope_(theirs, cos, sin)
    assert_near(ours, theirs)

    caches = randn(2, 6, num_heads, head_dim, seed=seed + 3, dtype=dtype)
    expected = caches.clone()
    slots = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    slots = slots.to(DEVICE)
    ops.write_kv_(caches[0], caches[1], slots, x, ours)
    reference.write_kv_(expected[0], expected[1], slots, x, ours)
    assert torch.equal(caches, expected)


@quick
@given(seeds, dtypes, st.integers(0, 4), st.integers(1, 5000))
def test_token_bitmask(seed: int, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    ours = randn(num_rows, vocab_size, seed=seed, dtype=dtype)
    theirs = ours.clone()
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, -(-vocab_size // 32))
    bitmask = torch.randint(-(2**31), 2**31, shape, generator=generator).int().to(DEVICE)
    ops.apply_token_bitmask_(ours, bitmask)
    reference.apply_token_bitmask_(theirs, bitmask)
    assert torch.equal(ours, theirs)


@quick
@given(seeds, dtypes, st.integers(0, 4), st.integers(1, 9000))
def test_gather_logprobs(seed: int, dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    logits = randn(num_rows, vocab_size, seed=seed, dtype=dtype) * 10
    logits[:, ::3] = -torch.inf
    logits[:, 0] = 0.0
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (num_rows,), generator=generator).to(DEVICE)
    ours = ops.gather_logprobs(logits, ids)
    theirs = reference.gather_logprobs(logits, ids)
    finite = theirs.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    assert_near(ours[finite], theirs[finite])


@quick
@given(
    seeds,
    dtypes,
    st.integers(1, 300),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("", "adds", "gates")),
)
def test_row_product(
    seed: int,
    dtype: torch.dtype,
    in_features: int,
    out_features: int,
    has_bias: bool,
    has_norm: bool,
    after: str,
) -> None:
    num_rows = out_features * (2 if after == "gates" else 1)
    x = randn(1, in_features, seed=seed, dtype=dtype)
    weight = randn(num_rows, in_features, seed=seed + 1, dtype=dtype) / in_features**0.5
    bias = randn(num_rows, seed=seed + 2, dtype=dtype) if has_bias else None
    norm = (randn(in_features, seed=seed + 3, dtype=dtype), 1e-5) if has_norm else None
    stream = randn(1, out_features, seed=seed + 4, dtype=dtype)
    results = []
    for row_product in (ops.row_product, reference.row_product):
        add_to = stream.clone() if after == "adds" else None
        result = row_product(x, weight, bias, norm=norm, add_to=add_to, gates=after == "gates")
        assert add_to is None or result is add_to
        results.append(result)
    # a lone output has nothing to average a last bit out with: sums come in another order, and
    # what the interpreter cuts off after norm, product and gate adds up
    limit = 1e-5 if dtype == torch.float32 else 4 * BF16_ERROR
    error = (results[0].double() - results[1].double()).norm()
    assert error <= limit * max(1.0, float(results[1].double().norm()))


# numpy warns of inf - inf in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_logprobs_of_a_broken_row_are_nan() -> None:
    logits = torch.zeros(3, 70, device=DEVICE)
    logits[0, 69] = torch.nan
    logits[1] = -torch.inf
    got = ops.gather_logprobs(logits, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    assert got.isnan().tolist() == [True, True, False]
