r"""Regexes run by outlines-core: one lookup per token on an index built beforehand.

outlines-core 0.2.14 taken raw builds a wrong automaton for many patterns (`(foo|foobar)` never
allows `foobar`); compiled as `SENTINEL(?:R)\z` and started after the sentinel it is right. Builds
happen in the compile process, which sends the index as arrays: the library is not loaded here. EOS
is handled here, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from umbel.lang.errors import ConstraintError

from ..vocabulary import Vocabulary
from .byte_spelling import ByteSpelling
from .compile_process import CompileProcesses
from .matcher import BitmaskRow
from .token_table import START, TokenTable

# Two noncharacters: no text holds them, and the regex syntax can.
_SENTINEL = "\U0010fffe\U0010ffff"


def compile_outlines_core(
    processes: CompileProcesses, vocabulary: Vocabulary, pattern: str, timeout_s: float
) -> OutlinesGrammar:
    """Compile a pattern in Rust's syntax. Raises ConstraintError, also past the limits."""
    wrapped = f"{_SENTINEL}(?:{pattern})\\z"
    status, reply = processes.run("outlines", wrapped, _SENTINEL, timeout_s=timeout_s)
    if status != "ok":
        raise ConstraintError(f"outlines-core can't compile the regex: {reply}")
    if not len(reply.is_final):
        raise ConstraintError("nothing can satisfy the constraint")
    return OutlinesGrammar(vocabulary, reply)


class OutlinesGrammar:
    """An index as a table, and the packed rows of the states seen so far."""

    engine = "outlines-core"

    def __init__(self, vocabulary: Vocabulary, table: TokenTable) -> None:
        self.vocabulary = vocabulary
        self._table = table
        # flat views read faster than numpy scalars
        self._offsets = table.offsets.data
        self._tokens = table.tokens.data
        self._targets = table.targets.data
        self._num_words = (vocabulary.size + 31) // 32
        # the rows come as states are visited; most requests visit few
        self.num_bytes = table.num_bytes + 64 * 4 * self._num_words
        self._rows: dict[int, BitmaskRow] = {}

    @cached_property
    def spelling(self) -> ByteSpelling:
        """The tokens that the end of a token is spelled with."""
        return ByteSpelling(self.vocabulary)

    def row(self, state: int) -> BitmaskRow:
        """Return the packed row of a state. Not to be written to."""
        row = self._rows.get(state)
        if row is None:
            bits = np.zeros(self._num_words * 32, np.uint8)
            start, end = self._table.offsets[state : state + 2]
            bits[self._table.tokens[start:end]] = 1
            bits[list(self.vocabulary.eos_ids)] = self.is_final(state)
            row = np.packbits(bits, bitorder="little").view(np.int32)
            self._rows[state] = row
        return row

    def step(self, state: int, token_id: int) -> int | None:
        """Return the state after a token; None if it is not allowed, or EOS."""
        if token_id in self.vocabulary.eos_ids:
            return None
        end = self._offsets[state + 1]
        at = bisect_left(self._tokens, token_id, self._offsets[state], end)
        if at == end or self._tokens[at] != token_id:
            return None
        return int(self._targets[at])

    def is_final(self, state: int) -> bool:
        """Whether a complete value may end here."""
        return bool(self._table.is_final[state])

    def matcher(self) -> OutlinesMatcher:
        """Return a matcher at the start."""
        return OutlinesMatcher(self, [START])


class OutlinesMatcher:
    """One request's state; see `GrammarMatcher` for the contract."""

    __slots__ = ("_grammar", "_states")

    def __init__(self, grammar: OutlinesGrammar, states: list[int]) -> None:
        self._grammar = grammar
        self._states = states  # one per accepted token, after the start

    def fill(self, row: BitmaskRow) -> None:
        """Overwrite `row` with the allowed ids; padding bits are 0."""
        row[:] = self._grammar.row(self._states[-1])
        if not row.any():
            raise ConstraintError("no token of the model continues the constraint from here")

    def accept(self, token_id: int) -> bool:
        """Step over a token; False (and no change) if it is not allowed."""
        state = self._grammar.step(self._states[-1], token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def accept_bytes(self, data: bytes) -> bool:
        """Step over the end of a token that began before; False (and no change) if illegal."""
        state = self._after_bytes(data)
        if state is None:
            return False
        self._states.append(state)
        return True

    def viable(self, texts: Sequence[bytes]) -> list[bool]:
        """Return which byte strings `accept_bytes` would take, without moving."""
        return self._grammar.spelling.viable(texts, self.validate)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens; any number up to all accepted so far."""
        if not 0 <= num_tokens < len(self._states):
            raise ValueError(f"can't take back {num_tokens} of {len(self._states) - 1} tokens")
        del self._states[len(self._states) - num_tokens :]

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens would be accepted, without moving."""
        state: int | None = self._states[-1]
        for i, token_id in enumerate(token_ids):
            state = None if state is None else self._grammar.step(state, token_id)
            if state is None:
                return i
        return len(token_ids)

    def forced(self) -> list[int]:
        """Return tokens that must come next: the states in a row that allow one token only."""
        state, tokens = self._states[-1], []
        while not self._grammar.is_final(state):
            row = self._grammar.row(state)
            words = np.flatnonzero(row)
            word = int(row[words[0]]) & 0xFFFFFFFF if len(words) == 1 else 0
            if word == 0 or word & (word - 1):
                break
            token_id = int(words[0]) * 32 + word.bit_length() - 1
            after = self._grammar.step(state, token_id)
            if after is None:
                break
            tokens.append(token_id)
            state = after
        return tokens

    def fork(self) -> OutlinesMatcher:
        """Return an independent matcher in the same state."""
        return OutlinesMatcher(self._grammar, self._states.copy())

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is a complete value."""
        return self._grammar.is_final(self._states[-1])

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can be added."""
        if not self.is_accepting:
            return False
        eos_ids = self._grammar.vocabulary.eos_ids
        row = self._grammar.row(self._states[-1])
        return int(np.bitwise_count(row.view(np.uint32)).sum()) == len(set(eos_ids))

    def _after_bytes(self, data: bytes) -> int | None:
        spelled = self._grammar.spelling.spell(data)
        if len(spelled) < len(data) or self.validate(spelled) < len(data):
            return None
        state: int | None = self._states[-1]
        for token_id in spelled:
            state = None if state is None else self._grammar.step(state, token_id)
        return state
