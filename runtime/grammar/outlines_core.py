r"""Regexes run by outlines-core: one lookup per token on an index built beforehand.

outlines-core 0.2.14 taken raw builds a wrong automaton for many patterns (`(foo|foobar)` never
allows `foobar`); compiled as `SENTINEL(?:R)\z` and started after the sentinel it is right. Builds
happen in the compile process. EOS is handled here: the index never sees it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import outlines_core

from umbel.lang.errors import ConstraintError

from ..vocabulary import Vocabulary
from .byte_spelling import ByteSpelling
from .compile_process import CompileProcesses
from .matcher import BitmaskRow

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
    return OutlinesGrammar(vocabulary, pickle.loads(reply), len(reply))


class OutlinesGrammar:
    """An index and the packed rows of the states seen so far."""

    engine = "outlines-core"

    def __init__(
        self, vocabulary: Vocabulary, index: outlines_core.Index, index_bytes: int
    ) -> None:
        self.vocabulary = vocabulary
        self.index = index
        start = index.get_next_state(index.get_initial_state(), vocabulary.size)
        if start is None:
            raise ConstraintError("nothing can satisfy the constraint")
        self.start: int = start
        self._num_words = (vocabulary.size + 31) // 32
        # the rows come as states are visited; most requests visit few
        self.num_bytes = 2 * index_bytes + 64 * 4 * self._num_words
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
            allowed = np.array(self.index.get_allowed_tokens(state) or [], np.int64)
            bits[allowed[allowed < self.vocabulary.size]] = 1  # the sentinel leaks in here
            bits[list(self.vocabulary.eos_ids)] = self.index.is_final_state(state)
            row = np.packbits(bits, bitorder="little").view(np.int32)
            self._rows[state] = row
        return row

    def matcher(self) -> OutlinesMatcher:
        """Return a matcher at the start."""
        return OutlinesMatcher(self, [self.start])


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
        state = self._next(self._states[-1], token_id)
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
            state = None if state is None else self._next(state, token_id)
            if state is None:
                return i
        return len(token_ids)

    def forced(self) -> list[int]:
        """Return tokens that must come next: the states in a row that allow one token only."""
        state, tokens = self._states[-1], []
        while not self._grammar.index.is_final_state(state):
            row = self._grammar.row(state)
            words = np.flatnonzero(row)
            word = int(row[words[0]]) & 0xFFFFFFFF if len(words) == 1 else 0
            if word == 0 or word & (word - 1):
                break
            token_id = int(words[0]) * 32 + word.bit_length() - 1
            after = self._next(state, token_id)
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
        return bool(self._grammar.index.is_final_state(self._states[-1]))

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
            state = None if state is None else self._next(state, token_id)
        return state

    def _next(self, state: int, token_id: int) -> int | None:
        vocabulary = self._grammar.vocabulary
        if token_id in vocabulary.eos_ids or not 0 <= token_id < vocabulary.size:
            return None
        after: int | None = self._grammar.index.get_next_state(state, token_id)
        return after
