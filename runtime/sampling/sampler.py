"""Picks tokens from logits, each row by itself: what a row gets never depends on its batch.

Sums run over one row in one order, in float64, so that sampled ids are bitwise the same alone and
in any batch. Knows no request, no tokenizer and no grammar: only rows of numbers and bit masks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from umbel.lang.errors import EngineError
from umbel.lang.sampling_params import SamplingParams

from .random_numbers import uniform

if TYPE_CHECKING:
    from ..grammar.matcher import BitmaskRow

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_NO_IDS: IntArray = np.zeros(0, np.int64)
# shares of allowed ids up to which it is faster to pick them out first
_MOST_GREEDY, _MOST_DRAWN = 0.1, 0.75
#: [256, 8]: for each byte of a bitmask, 0 for the ids that it allows and -inf for the others
_MASKS_BY_BYTE: Float32Array = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") > 0,
    np.float32(0),
    np.float32(-np.inf),
)


@dataclass(slots=True, eq=False)
class SamplingRow:
    """What one row's next token depends on besides its logits; kept by its request.

    `params` and `seed` never change, nor does `prompt_ids`.
    `num_sampled` is the index of the token to come: with `seed` it fixes the random number.
    `end_ids` (EOS and stop tokens) can't be sampled before `params.min_tokens`, for which the
    first `num_before` tokens don't count: they came before the value.
    `bitmask` allows ids as in `GrammarMatcher.fill`; None allows all. `state` says the same to a
    sampler with automata on its device: 0 allows all, a number above is a state there, and -1 - p
    the state after what was sampled in row p of the last call.
    """

    params: SamplingParams
    seed: int = 0  # taken modulo 2**64
    num_sampled: int = 0
    num_before: int = 0
    end_ids: Collection[int] = ()
    bitmask: BitmaskRow | None = None
    state: int = 0
    prompt_ids: IntArray = field(default_factory=lambda: _NO_IDS)  # for the repetition penalty
    #: how often an id was sampled, where a penalty depends on it
    output_counts: dict[int, int] = field(default_factory=dict)
    is_penalized: bool = field(init=False)  # for what its output holds already

    def __post_init__(self) -> None:
        """Note whether tokens have to be counted."""
        params = self.params
        self.is_penalized = bool(
            params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
        )

    def append(self, token_id: int) -> None:
        """Count a token of the output; the row is then ready for the next one."""
        self.num_sampled += 1
        if self.is_penalized:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    @property
    def wants_logprobs(self) -> bool:
        """Whether the sampled token's log-probability is asked for."""
        return self.params.logprobs or self.params.top_logprobs > 0

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything stands between the model's logits and temperature."""
        return self.bitmask is not None or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the bitmask does."""
        return bool(self.params.logit_bias) or self.is_penalized or self.holds_end_ids

    @property
    def may_change_logits(self) -> bool:
        """Whether `changes_logits` may hold for any of its tokens."""
        params = self.params
        return bool(params.logit_bias) or self.is_penalized or params.min_tokens > 0

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p may leave ids out."""
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0

    @property
    def takes_highest(self) -> bool:
        """Whether the token of the model's highest logit is all that is asked for."""
        is_greedy = self.params.temperature == 0.0
        return is_greedy and not self.adjusts_logits and not self.wants_logprobs

    @property
    def holds_end_ids(self) -> bool:
        """Whether it is too early for the ids that end it."""
        return self.num_sampled - self.num_before < self.params.min_tokens and bool(self.end_ids)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One entry per row. A row with an error has token id -1 and nothing else."""

    token_ids: list[int]
    logprobs: list[float | None]  # of the model's own distribution; None unless asked for
    top: list[tuple[tuple[int, float], ...]]  # most likely (id, logprob), ties by lower id
    errors: list[EngineError | None]


class _RowError(Exception):
    """Why one row has no token."""


class Sampler:
    """Samples batches of rows over one vocabulary. Holds scratch memory: one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._adjusted = np.empty(vocab_size, np.float32)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """Pick a token for each row of `logits` (float32 [num_rows, vocab_size], left unchanged).

        In order: logit bias, repetition, frequency and presence penalties, `min_tokens`, bitmask;
        then temperature, top-k, top-p, min-p, and the inverse CDF over what is left, in id order,
        at the row's random number. The filters rank by logit, ties by lower id, and keep at
        least one id; temperature 0 takes the highest logit, ties by lower id. A row that has no
        finite highest logit, or no allowed id, gets an entry in `errors`; the others don't notice.
        """
        values = _as_array(logits)
        assert values.shape == (len(rows), self.vocab_size), "one row of logits per sampling row"
        best = values.argmax(axis=1).tolist()  # a NaN counts as the highest
        uniforms = uniform([row.seed % 2**64 for row in rows], [row.num_sampled for row in rows])
        result = SampledTokens([], [], [], [])
        is_finite = np.isfinite(values[np.arange(len(rows)), best]).tolist()
        for i, row in enumerate(rows):
            if is_finite[i] and row.takes_highest:
                result.token_ids.append(best[i])
                result.logprobs.append(None)
                result.top.append(())
                result.errors.append(None)
                continue
            token_id, logprob, error = -1, None, None
            top: tuple[tuple[int, float], ...] = ()
            try:
                token_id = self._pick(values[i], best[i], row, float(uniforms[i]))
            except _RowError as problem:
                error = EngineError(str(problem))
            else:
                if row.wants_logprobs:
                    normalizer = log_normalizer(values[i])
                    logprob = float(values[i, token_id]) - normalizer
                    top = _top_logprobs(values[i], row.params.top_logprobs, normalizer)
            result.token_ids.append(token_id)
            result.logprobs.append(logprob)
            result.top.append(top)
            result.errors.append(error)
        return result

    def _pick(self, raw: Float32Array, best: int, row: SamplingRow, u: float) -> int:
        if not np.isfinite(raw[best]):
            raise _RowError(
                f"the model's highest logit is {raw[best]}, so no token can be sampled: look at "
                "the weights and at the number type for overflow"
            )
        params, logits = row.params, raw
        allowed: IntArray | None = None  # ids of the logits that are left; None: all
        if row.adjusts_logits:
            logits = self._adjust(raw, row)
            if row.bitmask is not None:
                share = np.bitwise_count(row.bitmask.view(np.uint32)).sum() / self.vocab_size
                if share > (_MOST_GREEDY if params.temperature == 0.0 else _MOST_DRAWN):
                    logits = self._masked(logits, row.bitmask)
                else:  # what is masked out costs nothing from here on
                    allowed = _allowed_ids(row.bitmask, self.vocab_size)
                    logits = logits[allowed]
            best = int(logits.argmax()) if len(logits) else -1
            if best < 0 or np.isneginf(logits[best]):
                raise _RowError(
                    "no token is allowed: the constraint, min_tokens and logit_bias together leave "
                    "none; loosen one of them"
                )
            if not np.isfinite(logits[best]):
                raise _RowError(
                    f"the highest logit is {logits[best]} after logit_bias and the penalties: use "
                    "finite values"
                )
        if params.temperature == 0.0:
            return best if allowed is None else int(allowed[best])
        weights = _weights(logits, float(logits[best]), params.temperature)
        kept = _kept_ids(logits, weights, params)
        cdf = np.cumsum(weights if kept is None else weights[kept])
        at = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
        if kept is not None:
            at = int(kept[at])
        return at if allowed is None else int(allowed[at])

    def _masked(self, logits: Float32Array, bitmask: BitmaskRow) -> Float32Array:
        # added: where every other bit is set, an assignment by a mask takes six times as long
        masks = _MASKS_BY_BYTE[bitmask.view(np.uint8)].reshape(-1)
        return np.add(logits, masks[: self.vocab_size], out=self._adjusted)

    def _adjust(self, raw: Float32Array, row: SamplingRow) -> Float32Array:
        """Return the logits after all but the bitmask."""
        if not row.changes_logits:
            return raw
        params, logits = row.params, self._adjusted
        np.copyto(logits, raw)
        with np.errstate(over="ignore", invalid="ignore"):  # judged by the result's highest logit
            for token_id, bias in params.logit_bias:
                if not 0 <= token_id < self.vocab_size:
                    raise _RowError(
                        f"logit_bias names token id {token_id}; the vocabulary has "
                        f"{self.vocab_size} ids: remove it"
                    )
                logits[token_id] += np.float32(bias)
            if params.repetition_penalty != 1.0:
                seen = np.union1d(row.prompt_ids, _keys(row.output_counts))
                values, penalty = logits[seen], np.float32(params.repetition_penalty)
                logits[seen] = np.where(values > 0, values / penalty, values * penalty)
            if row.output_counts and (params.frequency_penalty or params.presence_penalty):
                counts = np.fromiter(row.output_counts.values(), np.float64)
                penalties = params.frequency_penalty * counts + params.presence_penalty
                logits[_keys(row.output_counts)] -= penalties.astype(np.float32)
        if row.holds_end_ids:
            logits[list(row.end_ids)] = -np.inf
        return logits


def _allowed_ids(bitmask: BitmaskRow, vocab_size: int) -> IntArray:
    """Return the ids whose bits are set, ascending."""
    words = np.flatnonzero(bitmask)
    if 8 * len(words) < len(bitmask):
        bits = np.unpackbits(bitmask[words].view(np.uint8), bitorder="little")
        found = np.flatnonzero(bits)
        ids: IntArray = words[found >> 5] * 32 + (found & 31)
    else:
        ids = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
    return ids if not len(ids) or ids[-1] < vocab_size else ids[ids < vocab_size]


def log_normalizer(row: Float32Array) -> float:
    """Return the log of the sum of exp(row), for logits float32 [vocab_size]; NaN stays NaN."""
    highest = row.max()
    if not np.isfinite(highest):
        return float("nan")
    return float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], rows: Sequence[int] | None = None
) -> Float64Array:
    """Return the log-probability of `token_ids[i]` in row `rows[i]` of `logits` (row i if None).

    `logits` is float32 [num_rows, vocab_size]. Needs memory for one row at a time, and each row's
    normalizer is computed once. NaN where the row has no finite highest logit.
    """
    values = _as_array(logits)
    ids = np.asarray(token_ids, np.int64)
    at = np.arange(len(ids)) if rows is None else np.asarray(rows, np.int64)
    wanted, which = np.unique(at, return_inverse=True)
    normalizers = np.array([log_normalizer(values[row]) for row in wanted.tolist()], np.float64)
    result: Float64Array = values[at, ids].astype(np.float64) - normalizers[which]
    return result


def _as_array(logits: torch.Tensor) -> Float32Array:
    values: Float32Array = logits.detach().float().cpu().numpy()
    return values


def _keys(counts: dict[int, int]) -> IntArray:
    return np.fromiter(counts, np.int64, len(counts))


def _weights(logits: Float32Array, highest: float, temperature: float) -> Float64Array:
    # probabilities up to one factor; float64, so that a cumulative sum over the vocabulary is sharp
    weights = logits.astype(np.float64)
    weights -= highest
    with np.errstate(over="ignore", under="ignore"):
        weights /= temperature
        np.exp(weights, out=weights)
    return weights


def _kept_ids(
    logits: Float32Array, weights: Float64Array, params: SamplingParams
) -> IntArray | None:
    """Return the ids that all filters keep, ascending; None for all.

    Each filter keeps a first part of the ids in the order (falling logit, rising id), so the
    result is the shortest of the three.
    """
    num_kept = len(weights)
    if 0 < params.top_k < num_kept:
        num_kept = params.top_k
    has_top_p = params.top_p < 1.0
    if num_kept == len(weights) and not has_top_p:
        if params.min_p == 0.0:
            return None
        return np.flatnonzero(weights >= params.min_p)  # the highest weight is 1
    guess = num_kept if num_kept < len(weights) else min(256, len(weights))
    total = float(weights.sum()) if num_kept == len(weights) else None
    while True:
        ranked = ranked_ids(logits, guess)
        ordered = weights[ranked]
        if not has_top_p:
            break
        mass = np.cumsum(ordered)
        needed = params.top_p * (mass[-1] if total is None else total)
        reached = int(np.searchsorted(mass, needed)) + 1  # first place with mass >= needed
        if reached <= len(ranked) or guess == len(weights):
            ranked = ranked[:reached]
            break
        guess = min(8 * guess, len(weights))
    if params.min_p > 0.0:
        ranked = ranked[weights[ranked] >= params.min_p]
    return np.sort(ranked)


def ranked_ids(logits: Float32Array, num_ids: int) -> IntArray:
    """Return the first `num_ids` ids in the order (falling logit, rising id)."""
    if num_ids < len(logits):
        threshold = np.partition(logits, len(logits) - num_ids)[len(logits) - num_ids]
        candidates = np.flatnonzero(logits >= threshold)
    else:
        candidates = np.arange(len(logits))
    return candidates[np.argsort(-logits[candidates], kind="stable")][:num_ids]


def _top_logprobs(
    row: Float32Array, num_ids: int, normalizer: float
) -> tuple[tuple[int, float], ...]:
    if num_ids == 0:
        return ()
    ids = ranked_ids(row, min(num_ids, len(row))).tolist()
    return tuple((i, float(row[i]) - normalizer) for i in ids)
