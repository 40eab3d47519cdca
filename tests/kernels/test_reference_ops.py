from __future__ import annotations

import numpy as np
import pytest
import torch

from umbel.kernels import ops_for, reference

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("weight_shape", [(16,), (3, 16)], ids=str)
def test_rms_norm_is_its_formula(
    weight_shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    x, weight = normal(5, 3, 16, dtype=dtype), normal(*weight_shape, seed=1, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = reference.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_fused_add_rms_norm_updates_the_residual_and_norms_it() -> None:
    x, residual, weight = normal(4, 16), normal(4, 16, seed=1), normal(16, seed=2)
    total = x + residual
    found = reference.fused_add_rms_norm_(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(found, reference.rms_norm(total, weight, 1e-5))


def angles(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    return positions[:, None, None] * 0.7 ** torch.arange(head_dim // 2)


def test_rope_turns_each_half_split_pair_as_a_complex_number() -> None:
    x, angle = normal(6, 3, 8), angles(torch.arange(6.0), 8)
    expected = torch.polar(torch.ones_like(angle), angle) * torch.complex(x[..., :4], x[..., 4:])
    reference.apply_rope_(x, angle.cos(), angle.sin())
    torch.testing.assert_close(x, torch.cat((expected.real, expected.imag), -1))


def test_rope_works_in_place_on_a_part_of_merged_rows() -> None:
    merged, angle = normal(6, 5, 8), angles(torch.arange(6.0), 8)
    before = merged.clone()
    alone = merged[:, :3].clone()
    reference.apply_rope_(alone, angle.cos(), angle.sin())
    reference.apply_rope_(merged[:, :3], angle.cos(), angle.sin())
    assert torch.equal(merged[:, :3], alone)
    assert torch.equal(merged[:, 3:], before[:, 3:])


def test_rotated_products_depend_on_the_distance_only() -> None:
    q, k = normal(1, 1, 8).expand(9, 1, 8).clone(), normal(1, 1, 8, seed=1).expand(9, 1, 8).clone()
    near, far = angles(torch.arange(9.0), 8), angles(torch.arange(9.0) + 5, 8)
    reference.apply_rope_(q, near.cos(), near.sin())
    reference.apply_rope_(k, far.cos(), far.sin())
    products = (q * k).sum(-1)
    torch.testing.assert_close(products, products[:1].expand(9, 1))


def test_silu_and_mul_gates_the_second_half_by_the_first() -> None:
    x = normal(4, 10)
    gate, up = x[:, :5].double(), x[:, 5:].double()
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(reference.silu_and_mul(x).double(), expected)


def test_write_kv_changes_the_named_slots_and_no_others() -> None:
    k_cache, v_cache = normal(20, 2, 4), normal(20, 2, 4, seed=1)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    rows = normal(3, 6, 4, seed=2)  # K and V as parts of merged rows
    slots = torch.tensor([7, 0, 13])
    reference.write_kv_(k_cache, v_cache, slots, rows[:, 2:4], rows[:, 4:])
    k_before[slots], v_before[slots] = rows[:, 2:4], rows[:, 4:]
    assert torch.equal(k_cache, k_before)
    assert torch.equal(v_cache, v_before)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_a_bitmask_keeps_the_tokens_whose_bits_are_set(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    allowed = rng.random((5, vocab_size)) < 0.5
    padded = np.zeros((5, -(-vocab_size // 32) * 32), np.bool_)
    padded[:, :vocab_size] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    logits = normal(5, vocab_size)
    expected = np.where(allowed, logits.numpy(), -np.inf)
    reference.apply_token_bitmask_(logits, torch.from_numpy(words))
    assert np.array_equal(logits.numpy(), expected)


def test_gathered_logprobs_are_the_log_of_the_softmax() -> None:
    logits, ids = normal(6, 40) * 5, torch.tensor([0, 39, 3, 3, 17, 8])
    expected = logits.double().softmax(-1)[torch.arange(6), ids].log()
    torch.testing.assert_close(reference.gather_logprobs(logits, ids).double(), expected)


@pytest.mark.parametrize("num_rows", [0, 1, 8, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float64, 1e-12)],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "meta"])  # its own kernel, and the reference
def test_a_linear_layer_is_its_product_whatever_becomes_of_the_weight(
    device: str, dtype: torch.dtype, tolerance: float, has_bias: bool, num_rows: int
) -> None:
    weight, x = normal(48, 32, dtype=dtype), normal(num_rows, 64, seed=1, dtype=dtype)[:, ::2]
    bias = normal(48, seed=2, dtype=dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    with torch.inference_mode():
        found = ops_for(torch.device(device)).linear(weight, bias)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
