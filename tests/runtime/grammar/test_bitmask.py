from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.runtime.grammar import TokenBitmask


@given(st.integers(1, 100), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_applying_keeps_exactly_the_set_bits(vocab_size: int, extra: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bitmask = TokenBitmask(4, vocab_size)
    assert bitmask.tensor.shape == (4, (vocab_size + 31) // 32)
    allowed = torch.rand(3, vocab_size, generator=generator) < 0.5
    for i in range(3):
        row = bitmask.row(i)
        row.fill(0)
        for token_id in allowed[i].nonzero().flatten().tolist():
            row.view("uint32")[token_id // 32] |= 1 << (token_id % 32)
    logits = torch.rand(3, vocab_size + extra, generator=generator)
    before = logits.clone()
    bitmask.apply_(logits)
    assert torch.equal(logits[:, :vocab_size] != -torch.inf, allowed)
    assert torch.equal(logits[:, :vocab_size][allowed], before[:, :vocab_size][allowed])
    assert (logits[:, vocab_size:] == -torch.inf).all()


def test_the_views_share_memory_and_a_new_row_allows_all() -> None:
    bitmask = TokenBitmask(2, 40)
    bitmask.row(1).fill(0)
    assert bitmask.tensor.tolist() == [[-1, -1], [0, 0]]
    bitmask.allow_all(1)
    logits = torch.zeros(2, 40)
    bitmask.apply_(logits)
    assert not logits.any()
