"""Scores of rows of logits: by the definition, ties by lower id, the same alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbel.runtime.sampling import RowScores, row_scores, score_rows

VOCAB_SIZE = 40
# few different values: ties are the rule
ROWS = st.lists(
    st.lists(
        st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0, 30.0]),
        min_size=VOCAB_SIZE,
        max_size=VOCAB_SIZE,
    ),
    min_size=1,
    max_size=5,
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def score(logits: torch.Tensor, at: list[int], ids: list[int], num_top: int) -> RowScores:
    return score_rows(logits, np.asarray(at, np.int64), np.asarray(ids, np.int64), num_top)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_and_alternatives_have_their_log_softmax(device: str) -> None:
    @given(ROWS, st.data(), st.sampled_from([0, 1, 7, VOCAB_SIZE + 3]))
    def check(rows: list[list[float]], data: st.DataObject, num_top: int) -> None:
        logits = torch.tensor(rows, device=device)
        at = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9))
        ids = [data.draw(st.integers(0, VOCAB_SIZE - 1)) for _ in at]
        found = score(logits, at, ids, num_top)
        wanted = logits.double().log_softmax(-1).cpu().numpy()
        assert found.logprobs.dtype == np.float32
        np.testing.assert_allclose(found.logprobs, wanted[at, ids], atol=1e-5)
        assert len(found.top) == (len(rows) if num_top else 0)
        for row, values, top in zip(rows, wanted, found.top, strict=False):
            best = sorted(range(VOCAB_SIZE), key=lambda i: (-row[i], i))[:num_top]
            assert top["token_id"].tolist() == best
            np.testing.assert_allclose(top["logprob"], values[best], atol=1e-5)

    check()


def test_what_a_device_does_equals_the_cpu() -> None:
    """The device's way, in torch's own arithmetic, so that it is tested without a device."""

    @given(ROWS, st.integers(0, VOCAB_SIZE - 1), st.sampled_from([0, 1, 7, VOCAB_SIZE]))
    def check(rows: list[list[float]], token_id: int, num_top: int) -> None:
        logits = torch.tensor(rows)
        at = np.arange(len(rows))
        ids = np.full(len(rows), token_id, np.int64)
        one = score_rows(logits, at, ids, num_top)
        two = row_scores.on_device(logits, at, ids, num_top)
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-5)
        for a, b in zip(one.top, two.top, strict=True):
            assert a["token_id"].tolist() == b["token_id"].tolist()
            np.testing.assert_allclose(a["logprob"], b["logprob"], atol=1e-5)

    check()


@given(ROWS)
def test_a_row_is_scored_alone_as_in_a_batch(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    ids = [3] * len(rows)
    together = score(logits, list(range(len(rows))), ids, 4)
    for i in range(len(rows)):
        alone = score(logits[i : i + 1], [0], [3], 4)
        assert alone.logprobs[0] == together.logprobs[i]
        assert alone.top[0].tolist() == together.top[i].tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_is_no_distribution_is_nan_and_no_other(device: str) -> None:
    logits = torch.zeros(3, VOCAB_SIZE, device=device)
    logits[1, 5] = torch.nan
    found = score(logits, [0, 1, 2], [0, 0, 0], 2)
    assert np.isnan(found.logprobs).tolist() == [False, True, False]
    assert len(found.top) == 3
