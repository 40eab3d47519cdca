"""Log-probabilities of given tokens, and of the likeliest ones, from a few rows of logits.

What comes out is rounded to float32: that is how it is kept beside the KV, and a value that was
kept must equal one that was just computed. Knows no request and no slot.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from umbel.kernels import ops_for

from .sampler import Float32Array, IntArray, log_normalizer, ranked_ids

#: a token and its log-probability
RANKED = np.dtype([("token_id", np.int32), ("logprob", np.float32)])
RankedArray = npt.NDArray[np.void]


class RowScores(NamedTuple):
    """What a few rows of logits say."""

    logprobs: Float32Array  # [num_tokens] of the given tokens; NaN where a row is no distribution
    top: list[RankedArray]  # each row's likeliest tokens, ties by lower id; empty if none wanted


def score_rows(logits: torch.Tensor, at: IntArray, token_ids: IntArray, num_top: int) -> RowScores:
    """Return the log-probability of `token_ids[i]` in row `at[i]`, and each row's `num_top` best.

    `logits` is [num_rows, vocab_size], of any float type. On a CPU it needs memory for one row
    more, and what a row gives does not depend on the others.
    """
    if logits.device.type != "cpu":
        return on_device(logits, at, token_ids, num_top)
    values: Float32Array = logits.detach().float().numpy()
    normalizers = np.array([log_normalizer(row) for row in values], np.float64)
    logprobs = (values[at, token_ids].astype(np.float64) - normalizers[at]).astype(np.float32)
    top: list[RankedArray] = []
    if num_top:
        for row, normalizer in zip(values, normalizers, strict=True):
            ids = ranked_ids(row, min(num_top, len(row)))
            top.append(_ranked(ids, (row[ids].astype(np.float64) - normalizer).astype(np.float32)))
    return RowScores(logprobs, top)


def on_device(logits: torch.Tensor, at: IntArray, token_ids: IntArray, num_top: int) -> RowScores:
    """Do what `score_rows` does where the logits are; only scores come to the host."""
    rows, ids = (torch.as_tensor(x, device=logits.device) for x in (at, token_ids))
    best = logits.argmax(-1)
    highest = logits.gather(-1, best[:, None]).squeeze(-1)
    normalizers = highest - ops_for(logits.device).gather_logprobs(logits, best)
    logprobs: Float32Array = (logits[rows, ids] - normalizers[rows]).cpu().numpy()
    if not num_top:
        return RowScores(logprobs, [])
    num_top = min(num_top, logits.shape[1])
    # topk breaks ties as it likes: take all that reach the last of the best, and rank those here
    last = logits.topk(num_top, dim=-1).values[:, -1:]
    found = (logits >= last).nonzero()  # in row order, then by id
    values = (logits[found[:, 0], found[:, 1]] - normalizers[found[:, 0]]).cpu().numpy()
    row_of, id_of = found.cpu().numpy().T
    ends = np.searchsorted(row_of, np.arange(len(logits) + 1))
    top: list[RankedArray] = []
    for start, end in pairwise(ends.tolist()):
        order = np.argsort(-values[start:end], kind="stable")[:num_top]
        top.append(_ranked(id_of[start:end][order], values[start:end][order]))
    return RowScores(logprobs, top)


def _ranked(ids: IntArray, logprobs: Float32Array) -> RankedArray:
    made = np.empty(len(ids), RANKED)
    made["token_id"], made["logprob"] = ids, logprobs
    return made
