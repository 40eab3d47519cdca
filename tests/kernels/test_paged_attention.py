from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.kernels import (
    AttentionLayout,
    AttentionShape,
    attention,
    attention_backend,
    reference,
)

NUM_SLOTS, HEAD_DIM = 200, 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    layout: AttentionLayout
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def oracle(self) -> torch.Tensor:
        return reference.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.layout.query_indptr,
            self.layout.kv_indptr,
            self.layout.kv_indices,
            self.layout.masks,
        )

    def run(self) -> torch.Tensor:
        shape = AttentionShape(self.q.shape[1], self.k_cache.shape[1], HEAD_DIM, self.q.dtype, CPU)
        return attention(
            self.q,
            self.k_cache,
            self.v_cache,
            attention_backend("torch", shape).plan(self.layout, shape),
        )


def make_case(
    lengths: list[tuple[int, int]],
    *,
    masked: frozenset[int] = frozenset(),
    heads: tuple[int, int] = (6, 2),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Sequences of (prefix, q_len) over random slots of a pool; the other slots hold NaN."""
    rng = np.random.default_rng(seed)
    q_lens = [q for _, q in lengths]
    kv_lens = [prefix + q for prefix, q in lengths]
    kv_indices = np.concatenate([rng.permutation(NUM_SLOTS)[:n] for n in kv_lens])
    masks = {}
    for i in masked:
        masks[i] = rng.random((q_lens[i], kv_lens[i])) < 0.4
        masks[i][:, kv_lens[i] - q_lens[i] :] |= np.eye(q_lens[i], dtype=np.bool_)
    generator = torch.Generator().manual_seed(seed)
    caches = torch.randn(2, NUM_SLOTS, heads[1], HEAD_DIM, generator=generator).to(dtype)
    unused = np.setdiff1d(np.arange(NUM_SLOTS), kv_indices)
    caches[:, torch.as_tensor(unused)] = torch.nan
    return Case(
        AttentionLayout(
            query_indptr=np.cumsum([0, *q_lens], dtype=np.int64),
            kv_indptr=np.cumsum([0, *kv_lens], dtype=np.int64),
            kv_indices=kv_indices.astype(np.int64),
            masks=masks,
        ),
        torch.randn(sum(q_lens), heads[0], HEAD_DIM, generator=generator).to(dtype),
        caches[0],
        caches[1],
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(
        st.lists(
            st.tuples(st.sampled_from((0, 0, 1, 7, 60, 150)), st.sampled_from((1, 1, 2, 5, 40))),
            min_size=1,
            max_size=7,
        )
    )
    masked = draw(st.sets(st.integers(0, len(lengths) - 1), max_size=2))
    heads = draw(st.sampled_from(((1, 1), (4, 4), (6, 2), (5, 1))))
    return make_case(
        lengths, masked=frozenset(masked), heads=heads, seed=draw(st.integers(0, 1 << 30))
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_batch_attends_as_the_definition_says(case: Case) -> None:
    torch.testing.assert_close(case.run(), case.oracle(), atol=2e-6, rtol=1e-5)


def test_bfloat16_is_close_to_the_definition() -> None:
    case = make_case([(50, 1), (0, 9), (20, 5)], masked=frozenset({2}), dtype=torch.bfloat16)
    error = (case.run().float() - case.oracle().float()).norm() / case.oracle().float().norm()
    assert error < 1e-2


def test_the_oracle_is_causal_attention_where_there_is_one_sequence() -> None:
    case = make_case([(0, 12)], heads=(2, 2))
    slots = torch.as_tensor(case.layout.kv_indices)
    q, k, v = (x.transpose(0, 1) for x in (case.q, case.k_cache[slots], case.v_cache[slots]))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    torch.testing.assert_close(case.oracle(), expected)


@pytest.mark.parametrize("poisoned", [0, 1])
def test_a_nan_in_one_sequence_stays_there(poisoned: int) -> None:
    case = make_case([(30, 1), (20, 1)], seed=3)
    indptr, slots = case.layout.kv_indptr, case.layout.kv_indices
    own, others = np.split(slots, [int(indptr[1])])[:: -1 if poisoned else 1]
    case.k_cache[int(np.setdiff1d(own, others)[0])] = torch.nan
    is_finite = case.run().isfinite().flatten(1)
    assert is_finite[1 - poisoned].all()
    assert not is_finite[poisoned].any()


def count_calls(monkeypatch: pytest.MonkeyPatch, case: Case) -> int:
    calls = []
    real = F.scaled_dot_product_attention

    def counted(*args: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(args)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    case.run()
    return len(calls)


def test_decodes_of_like_lengths_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(100 + i, 1) for i in range(32)])
    assert count_calls(monkeypatch, case) == 1


def test_siblings_of_like_lengths_are_one_call_with_their_own_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case([(100, 5), (100, 7), (90, 6)], masked=frozenset({1}))
    assert count_calls(monkeypatch, case) == 1


def test_a_long_prefill_does_not_pad_the_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(0, 150), *[(20 + i, 1) for i in range(8)]])
    assert count_calls(monkeypatch, case) == 2


def test_a_part_of_a_pass_is_a_pass_of_its_own() -> None:
    case = make_case([(3, 1), (0, 9), (20, 5), (7, 2)], masked=frozenset({0, 2}))
    members = np.asarray([2, 0, 3])
    part = case.layout.select(members)
    rows = np.concatenate([np.arange(*case.layout.query_indptr[i : i + 2]) for i in members])
    alone = Case(part, case.q[rows], case.k_cache, case.v_cache)
    assert torch.equal(alone.oracle(), case.oracle()[rows])
    assert sorted(part.masks) == [0, 1]


def test_an_unknown_backend_is_named_with_those_there_are() -> None:
    shape = AttentionShape(1, 1, HEAD_DIM, torch.float32, CPU)
    known = r"\['flashinfer', 'torch', 'triton'\]"
    with pytest.raises(ValueError, match=f"no attention backend 'none'; there are {known}"):
        attention_backend("none", shape)
