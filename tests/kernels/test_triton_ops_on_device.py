"""Every Triton op on 200 random shapes each, of the sizes of models, compiled on a GPU in bfloat16.

Sizes that a kernel is compiled for come from short lists: compiling takes longer than running.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.kernels.sampling_cases import DEVICE, tensors
from torch import Tensor

from umbel.kernels import RowMasks, reference
from umbel.kernels import triton as ops
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.sampling import Sampler, SamplingRow, sampler
from umbel.runtime.sampling.random_numbers import uniform

pytestmark = pytest.mark.gpu

NUM_SHAPES = 200
LIMIT = 4e-3
HIDDEN = (64, 576, 896, 2048, 4096, 8192)
HEADS = ((32, 8, 128), (9, 3, 64), (14, 2, 64), (16, 8, 128), (8, 8, 80))
VOCABULARIES = (288, 4096, 49152, 128256)


def generators() -> Iterator[np.random.Generator]:
    for seed in range(NUM_SHAPES):
        torch.manual_seed(seed)
        yield np.random.default_rng(seed)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    wide = expected.double()
    return float((actual.double() - wide).norm() / wide.norm())


def num_tokens(rng: np.random.Generator) -> int:
    return int(rng.choice(np.asarray([1, 2, 7, 64, int(rng.integers(1, 600))])))


def test_rms_norm() -> None:
    for rng in generators():
        n = int(rng.choice(HIDDEN))
        x, weight = randn(num_tokens(rng), n), randn(n)
        expected = reference.rms_norm(x, weight, 1e-5)
        assert relative_error(ops.rms_norm(x, weight, 1e-5), expected) < LIMIT


def test_fused_add_rms_norm() -> None:
    for rng in generators():
        n, tokens = int(rng.choice(HIDDEN)), num_tokens(rng)
        x, weight, ours = randn(tokens, n), randn(n), randn(tokens, n)
        theirs = ours.clone()
        out = ops.fused_add_rms_norm_(x, ours, weight, 1e-5)
        expected = reference.fused_add_rms_norm_(x, theirs, weight, 1e-5)
        assert relative_error(out, expected) < LIMIT
        assert relative_error(ours, theirs) < LIMIT


def test_silu_and_mul() -> None:
    for rng in generators():
        x = randn(num_tokens(rng), 2 * int(rng.integers(64, 16000))) * 4
        assert relative_error(ops.silu_and_mul(x), reference.silu_and_mul(x)) < LIMIT


def test_rope_and_cache() -> None:
    for seed, rng in enumerate(generators()):
        heads, kv_heads, dim = HEADS[seed % len(HEADS)]
        tokens, num_slots = num_tokens(rng), 1000
        merged = randn(tokens, heads + 2 * kv_heads, dim)
        angles = torch.rand(tokens, 1, dim // 2, device=DEVICE) * 7
        turns = angles.cos().to(merged.dtype), angles.sin().to(merged.dtype)
        weights = randn(2, dim).repeat_interleave(torch.tensor([heads, kv_heads], device=DEVICE), 0)
        norms = (weights, 1e-6) if seed % 2 else None
        slots = torch.randperm(num_slots, device=DEVICE)[:tokens]
        caches = torch.zeros(2, num_slots, kv_heads, dim, dtype=merged.dtype, device=DEVICE)
        results = []
        for op in (ops.rope_and_cache_, reference.rope_and_cache_):
            k_cache, v_cache = caches.clone()
            q = op(merged.clone(), heads, norms, turns, (k_cache, v_cache, slots))
            results.append((q, k_cache, v_cache))
        for ours, theirs in zip(*results, strict=True):
            assert relative_error(ours, theirs) < LIMIT


def test_row_product() -> None:
    for seed, rng in enumerate(generators()):
        size, out = [(576, 1536), (2048, 512), (4096, 1024)][seed % 3]
        after = ["", "adds", "gates"][int(rng.integers(3))]
        weight = randn(out * (2 if after == "gates" else 1), size) / size**0.5
        x, stream = randn(1, size), randn(1, out)
        norm = (randn(size), 1e-5) if rng.integers(2) else None
        results = []
        for op in (ops.row_product, reference.row_product):
            add_to = stream.clone() if after == "adds" else None
            results.append(op(x, weight, None, norm=norm, add_to=add_to, gates=after == "gates"))
        assert relative_error(*results) < LIMIT


def test_gather_logprobs() -> None:
    for rng in generators():
        vocab_size, rows = int(rng.choice(VOCABULARIES)), int(rng.integers(1, 65))
        logits = randn(rows, vocab_size) * 4
        ids = torch.randint(vocab_size, (rows,), device=DEVICE)
        expected = reference.gather_logprobs(logits, ids)
        assert relative_error(ops.gather_logprobs(logits, ids), expected) < LIMIT


def test_token_bitmask() -> None:
    for rng in generators():
        vocab_size, rows = int(rng.integers(32, 150_000)), int(rng.integers(1, 65))
        ours = randn(rows, vocab_size)
        theirs = ours.clone()
        words = rng.integers(-(2**31), 2**31, (rows, -(-vocab_size // 32)), dtype=np.int64)
        bitmask = torch.from_numpy(words.astype(np.int32)).to(DEVICE)
        ops.apply_token_bitmask_(ours, bitmask)
        reference.apply_token_bitmask_(theirs, bitmask)
        assert torch.equal(ours, theirs)


def test_greedy() -> None:
    for rng in generators():
        vocab_size, rows = int(rng.choice(VOCABULARIES)), int(rng.integers(1, 65))
        logits = (randn(rows, vocab_size) * 4).round()  # with ties
        words = rng.integers(-(2**31), 2**31, (3, -(-vocab_size // 128) * 4), dtype=np.int64)
        table = torch.from_numpy(words.astype(np.int32)).to(DEVICE)
        states = torch.from_numpy(rng.integers(0, 3, rows).astype(np.int32)).to(DEVICE)
        masked = logits.clone()
        reference.apply_token_bitmask_(masked, table[states.long(), : -(-vocab_size // 32)])
        assert torch.equal(ops.greedy(logits), first_of_highest(logits))
        assert torch.equal(ops.greedy(logits, RowMasks(table, states)), first_of_highest(masked))


def first_of_highest(logits: Tensor) -> Tensor:
    """Return each row's lowest id of the highest logit: argmax names any of them on a GPU."""
    is_top = logits == logits.max(-1, keepdim=True).values
    return is_top.to(torch.uint8).cpu().argmax(-1).to(logits.device)


def test_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's own sampler on the host draws the same ids from the same numbers.

    Or from ones that differ by a few roundings: weights are added up in another order.
    """
    for rng in generators():
        vocab_size, num_rows = int(rng.choice(VOCABULARIES[:3])), int(rng.integers(1, 9))
        rows = [random_row(rng) for _ in range(num_rows)]
        logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
        drawn = []
        for by in (0.0, -3e-6, 3e-6):
            monkeypatch.setattr(sampler, "uniform", lambda *key, by=by: uniform(*key) + by)
            drawn.append(Sampler(vocab_size).sample(logits, rows).token_ids)
        found = ops.sample(logits.to(DEVICE), tensors(rows)).tolist()
        for token_id, near in zip(found, zip(*drawn, strict=True), strict=True):
            assert token_id in near


def random_row(rng: np.random.Generator) -> SamplingRow:
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=int(rng.choice([0, 0, 1, 5, 40, 1000])),
        top_p=float(rng.choice([1.0, 1.0, 0.0517, 0.4871, 0.9931])),
        min_p=float(rng.choice([0.0, 0.0, 0.0113, 0.6137])),
    )
    return SamplingRow(params, int(rng.integers(2**62)), int(rng.integers(2**40)))
