"""Token healing: the end of a literal is written again by the model, in tokens that may go on.

A prompt that ends inside what the tokenizer would have made one token ("http:", a blank) leaves
the model in a place that it has hardly seen. The last tokens of the literal are therefore backed
off, and the first sampled ones have to spell their bytes: each is the beginning of what is left of
them, or begins with all of it (guidance and llguidance heal by the same rule). Knows bytes and
masks; nothing of rows, requests or templates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from umbel.lang.results import Thinking

from .grammar.byte_spelling import after_prefix
from .grammar.matcher import BitmaskRow, GrammarMatcher
from .vocabulary import Vocabulary

IntArray = npt.NDArray[np.int64]


class TokenPrefixes:
    """The vocabulary's texts in the order of their bytes. Built once per vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        never = vocabulary.special_ids.union(vocabulary.eos_ids)
        tokens = vocabulary.token_bytes
        order = sorted(
            (i for i, data in enumerate(tokens) if data and i not in never), key=tokens.__getitem__
        )
        self.ids: IntArray = np.array(order, np.int64)
        self.texts = [tokens[i] for i in order]
        self.max_len = max(map(len, self.texts), default=0)

    def beginning_with(self, data: bytes) -> slice:
        """Return which places of `ids` and `texts` hold tokens that begin with `data`."""
        end = after_prefix(data)
        low = bisect_left(self.texts, data)
        return slice(low, len(self.texts) if end is None else bisect_left(self.texts, end, low))

    def spelling(self, data: bytes) -> IntArray:
        """Return the ids whose text is exactly `data`."""
        low, high = bisect_left(self.texts, data), bisect_right(self.texts, data)
        return self.ids[low:high]

    def open_end(self, text: bytes) -> int:
        """Return how many bytes at the end of `text` a token could begin with and go on; or 0."""
        for start in range(max(0, len(text) - self.max_len + 1), len(text)):
            end = text[start:]
            at = bisect_right(self.texts, end)
            if at < len(self.texts) and self.texts[at].startswith(end):
                return len(end)
        return 0

    def num_to_back_off(self, ids: Sequence[int], literal: bytes) -> int:
        """Return how many of the last `ids` to sample again; `literal` is the text to stay in.

        The fewest whole tokens that cover the longest end that some token could go on from: a
        token that begins before can't reach over the literal's end. Where these would reach out of
        the literal, as many as stay in it.
        """
        tokens = self.vocabulary.token_bytes
        sizes = [0]  # bytes of the last 0, 1, ... ids
        for token_id in reversed(ids):
            data = tokens[token_id] if token_id < len(tokens) else b""
            size = sizes[-1] + len(data)
            # special tokens have no bytes; where a tokenizer rewrote the text, it is left alone
            if not data or size > len(literal) or not literal.startswith(data, len(literal) - size):
                break
            sizes.append(size)
            if size >= self.max_len:  # no token goes on from so far back
                break
        wanted = self.open_end(literal[len(literal) - sizes[-1] :])
        return next(count for count, size in enumerate(sizes) if size >= wanted)


class Healing:
    """What may be sampled until the removed bytes are written again; shared by a node's samples.

    `start` is the constraint of what follows them, where it begins; it is not moved. All masks are
    made at once, which may take a while: a blank has half of a vocabulary to go on with.
    """

    def __init__(
        self, prefixes: TokenPrefixes, backed_off: tuple[int, ...], start: GrammarMatcher | None
    ) -> None:
        self.backed_off = backed_off  # ids
        tokens = prefixes.vocabulary.token_bytes
        self.removed = removed = b"".join([tokens[i] for i in backed_off])
        self._rows: dict[int, BitmaskRow] = {}
        can_end = {len(removed)}  # places that tokens lead on from: a vocabulary may lack bytes
        steps = _steps(prefixes, removed)
        for at in sorted(steps, reverse=True):
            allowed = np.zeros((prefixes.vocabulary.size + 31) // 32 * 32, np.uint8)
            over = _reaching_over(prefixes, removed[at:], start)
            allowed[over] = 1
            for end, ids in steps[at].items():
                if end in can_end:
                    allowed[ids] = 1
            if allowed.any():
                can_end.add(at)
            self._rows[at] = np.packbits(allowed, bitorder="little").view(np.int32)

    @property
    def num_bytes(self) -> int:
        """The memory that the masks hold."""
        return sum(row.nbytes for row in self._rows.values())

    def row(self, at: int) -> BitmaskRow:
        """Return the mask where `at` of the removed bytes are written. Not to be written to."""
        return self._rows[at]


def _steps(prefixes: TokenPrefixes, removed: bytes) -> dict[int, dict[int, IntArray]]:
    """Return, for each place that tokens lead to, the ids that lead on to a later one."""
    steps: dict[int, dict[int, IntArray]] = {0: {}}
    for at in range(len(removed)):
        if at not in steps:
            continue
        for end in range(at + 1, min(len(removed), at + prefixes.max_len + 1)):
            ids = prefixes.spelling(removed[at:end])
            if len(ids):
                steps[at][end] = ids
                steps.setdefault(end, {})
    return steps


def _reaching_over(prefixes: TokenPrefixes, left: bytes, start: GrammarMatcher | None) -> IntArray:
    """Return the ids that hold all that is left, and then nothing or what may follow it."""
    found = prefixes.beginning_with(left)
    ids = prefixes.ids[found]
    if start is None:
        return ids
    rests = [text[len(left) :] for text in prefixes.texts[found]]
    return ids[np.array(start.viable(rests), np.bool_)]


class HealedOpening:
    """Where one sample stands in a healing; see `gen_task.Opening`."""

    def __init__(self, healing: Healing, token_bytes: Sequence[bytes]) -> None:
        self._healing = healing
        self._token_bytes = token_bytes
        self._at = 0  # of the removed bytes, so many are written again

    def fill(self, row: BitmaskRow) -> None:
        """Overwrite `row` with the ids that may come next."""
        row[:] = self._healing.row(self._at)

    def accept(self, token_id: int) -> bytes | None:
        """Take an id that the mask allowed: None, or what it holds past the removed bytes."""
        data = self._token_bytes[token_id]
        left = len(self._healing.removed) - self._at
        if len(data) < left:
            self._at += len(data)
            return None
        return data[left:]

    @property
    def thinking(self) -> Thinking | None:
        """Nothing: the literal is no thought."""
        return None
