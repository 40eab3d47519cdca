"""Log-probabilities of prompts: what one gen wants of its own, and what is kept beside the KV.

Knows token ids, positions and slots; nothing of batches, requests or logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from umbel.lang.errors import UmbelError
from umbel.lang.results import TokenLogprob

from .sampling import RankedArray

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class PromptScores:
    """The log-probability of every token of a prompt after the first, given those before it.

    Row r of the prompt gives the logits that score token r + 1. `done` is called once, when the
    last score has come, and `failed` at most once instead.
    """

    token_ids: list[int]
    num_top: int  # alternatives wanted of each token
    done: Callable[[], None]
    failed: Callable[[UmbelError], None]
    namespace: str = ""  # of the cache, as in the gen's request
    is_wanted: bool = True  # neither complete nor given up
    num_missing: int = field(init=False)
    logprobs: npt.NDArray[np.float32] = field(init=False)  # [num_tokens]; NaN: not known yet
    top: list[RankedArray | None] = field(init=False)  # [num_tokens]
    missing: BoolArray = field(init=False)  # [num_tokens] tokens that have no score yet
    awaited: BoolArray = field(init=False)  # [num_tokens] of these, what a recomputation will bring

    def __post_init__(self) -> None:
        """Start with nothing known; the first token follows nothing and is never scored."""
        num_tokens = len(self.token_ids)
        self.num_missing = num_tokens - 1
        self.logprobs = np.full(num_tokens, np.nan, np.float32)
        self.top = [None] * num_tokens
        self.missing = np.ones(num_tokens, np.bool_)
        self.missing[0] = False
        self.awaited = np.zeros(num_tokens, np.bool_)

    @property
    def is_complete(self) -> bool:
        """Whether every score has come."""
        return self.num_missing == 0

    def set(self, token: int, logprob: float, top: RankedArray | None) -> None:
        """Take the score of a token that is missing."""
        assert self.missing[token], "a score came twice"
        self.logprobs[token] = logprob
        self.top[token] = None if top is None else top[: self.num_top]
        self.missing[token] = False
        self.num_missing -= 1

    def result(self, text_of: Callable[[tuple[int]], str]) -> tuple[TokenLogprob, ...]:
        """Return the scores in order, from the second token on."""
        assert self.is_complete
        texts: dict[int, str] = {}  # a prompt repeats itself, and its alternatives more so

        def text(token_id: int) -> str:
            if token_id not in texts:
                texts[token_id] = text_of((token_id,))
            return texts[token_id]

        found = []
        for token_id, logprob, ranked in zip(
            self.token_ids[1:], self.logprobs[1:].tolist(), self.top[1:], strict=True
        ):
            top = () if ranked is None else tuple(ranked.tolist())
            top_texts = tuple(text(other) for other, _ in top)
            found.append(TokenLogprob(token_id, logprob, top, text(token_id), top_texts))
        return tuple(found)


class ScoreTable:
    """For each KV slot the log-probability of its token given its prefix, where that is known.

    A row's prefix is fixed when its KV is written, so an entry holds until the slot is written
    again. 4 bytes a slot; alternatives, kept where they were asked for, take about 110 bytes and
    8 for each, beside KV of some 10,000 bytes and more for the smallest of models.
    """

    def __init__(self, num_slots: int) -> None:
        self._logprobs = np.full(num_slots, np.nan, np.float32)
        self._top: dict[int, RankedArray] = {}

    def forget(self, slots: IntArray) -> None:
        """Drop the entries of slots that are about to be written."""
        self._logprobs[slots] = np.nan
        if self._top:
            for slot in slots.tolist():
                self._top.pop(slot, None)

    def keep(self, slots: IntArray, scores: PromptScores) -> None:
        """Note what is known of the first tokens of a prompt, held by `slots`."""
        num = len(slots)
        known = ~scores.missing[:num]
        known[:1] = False
        self._logprobs[slots[known]] = scores.logprobs[:num][known]
        if scores.num_top:
            for token in np.flatnonzero(known).tolist():
                top = scores.top[token]
                slot = int(slots[token])
                if top is not None and len(top) > len(self._top.get(slot, ())):
                    self._top[slot] = top.copy()  # not a view of more

    def recall(self, slots: IntArray, scores: PromptScores) -> None:
        """Fill in what is missing of the first tokens of a prompt, held by `slots`."""
        num = len(slots)
        found = np.flatnonzero(scores.missing[:num] & ~np.isnan(self._logprobs[slots]))
        for token in found.tolist():
            slot = int(slots[token])
            top = self._top.get(slot)
            if scores.num_top and (top is None or len(top) < scores.num_top):
                continue
            scores.set(token, float(self._logprobs[slot]), top if scores.num_top else None)
