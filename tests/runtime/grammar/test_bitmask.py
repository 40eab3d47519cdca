from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.kernels import reference
from umbel.runtime.grammar import TokenBitmask


@given(st.integers(1, 100), st.sets(st.integers(0, 99)))
def test_a_new_row_allows_all_but_the_ids_it_is_forbidden(
    vocab_size: int, forbidden: set[int]
) -> None:
    forbidden = {token_id for token_id in forbidden if token_id < vocab_size}
    bitmask = TokenBitmask(2, vocab_size)
    assert bitmask.tensor.shape == (2, (vocab_size + 31) // 32)
    bitmask.forbid(1, forbidden)
    logits = torch.zeros(2, vocab_size)
    reference.apply_token_bitmask_(logits, bitmask.tensor)
    assert not logits[0].any()
    assert set(np.flatnonzero(np.isneginf(logits[1].numpy())).tolist()) == forbidden


def test_the_views_share_memory() -> None:
    bitmask = TokenBitmask(2, 40)
    bitmask.row(1).fill(0)
    assert bitmask.tensor.tolist() == [[-1, -1], [0, 0]]
    assert bitmask.row(1) is bitmask.row(1)  # so that what was found out about it can be kept
