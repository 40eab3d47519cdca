"""A regular constraint as an automaton over bytes with one packed mask row per state.

`transitions` (states x 256) and `rows` (states x vocabulary bits) are plain arrays: a step is
"copy the state's row" and "walk the token's own bytes", which a device can do without the host.
Doesn't parse anything.

Where the text leaves no choice, a state allows one token: the one that the tokenizer would use for
the forced text. Decoding with and without jumping over forced text is therefore the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..vocabulary import Vocabulary
from .byte_dfa import DEAD, START, ByteDFA
from .forced_text import ForcedText
from .matcher import BitmaskRow
from .token_rows import StateRows

Int32 = npt.NDArray[np.int32]


class TokenDFA:
    """A compiled regular constraint; see `CompiledGrammar`.

    States are numbered as in `ByteDFA`: 0 is dead, 1 the start. `rows` includes EOS bits where
    the state accepts. `forced_tokens[state]` is the only token allowed there, or -1.
    """

    engine = "umbel-dfa"

    def __init__(
        self,
        vocabulary: Vocabulary,
        dfa: ByteDFA,
        state_rows: StateRows,
        forced_texts: Iterable[ForcedText],
    ) -> None:
        rows = state_rows.rows
        self.vocabulary = vocabulary
        self.transitions: Int32 = dfa.transitions  # [num_states, 256]
        self.accepting = dfa.accepting  # [num_states]
        self.forced_tokens = _forced_tokens(  # [num_states]
            vocabulary, dfa, state_rows.alive, forced_texts
        )
        self.rows: Int32 = rows  # [num_states, ceil(vocab_size / 32)]
        forced = np.flatnonzero(self.forced_tokens >= 0)
        tokens = self.forced_tokens[forced]
        rows[forced] = 0
        rows[forced, tokens >> 5] = _bits(tokens)
        for eos_id in vocabulary.eos_ids:
            rows[self.accepting, eos_id >> 5] |= _bits(np.array(eos_id))
        self.has_next = (dfa.transitions != DEAD).any(axis=1)  # [num_states]
        # a token may not end in a state that no tokens lead on from
        self._dead_ends = frozenset(np.flatnonzero(~state_rows.alive).tolist()) - {DEAD}
        self.num_bytes = rows.nbytes + dfa.transitions.nbytes
        # a flat view reads faster than numpy scalars
        self._table = memoryview(np.ascontiguousarray(dfa.transitions).reshape(-1).data)

    def step(self, state: int, token_id: int) -> int:
        """Return the state after a token's bytes; DEAD if it is not allowed or not text."""
        tokens = self.vocabulary.token_bytes
        data = tokens[token_id] if 0 <= token_id < len(tokens) else b""
        return self.step_bytes(state, data) if data else DEAD

    def step_bytes(self, state: int, data: bytes) -> int:
        """Return the state after bytes that a token ends with; DEAD if they are not allowed."""
        table = self._table
        for byte in data:
            state = table[(state << 8) | byte]
        return DEAD if state in self._dead_ends else state

    def viable(self, state: int, texts: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return which texts `step_bytes` can take from a state, all walked at once."""
        states = np.full(len(texts), state, np.int64)
        lengths = np.array([len(text) for text in texts], np.int64)
        ends = np.cumsum(lengths)
        data = np.frombuffer(b"".join(texts), np.uint8)
        flat = self.transitions.reshape(-1)
        walking = np.flatnonzero(lengths)
        for depth in range(int(lengths.max(initial=0))):
            byte = data[ends[walking] - lengths[walking] + depth]
            states[walking] = flat[states[walking] * 256 + byte]
            walking = walking[(lengths[walking] > depth + 1) & (states[walking] != DEAD)]
        return ~np.isin(states, [DEAD, *self._dead_ends])

    def matcher(self) -> TokenDFAMatcher:
        """Return a matcher at the start."""
        return TokenDFAMatcher(self, [START])


class TokenDFAMatcher:
    """One request's state; see `GrammarMatcher` for the contract."""

    __slots__ = ("_dfa", "_states")

    def __init__(self, dfa: TokenDFA, states: list[int]) -> None:
        self._dfa = dfa
        self._states = states  # one per accepted token, after the start

    @property
    def grammar(self) -> TokenDFA:
        """What it follows."""
        return self._dfa

    @property
    def state(self) -> int:
        """The automaton's state, for a device that steps by itself."""
        return self._states[-1]

    def fill(self, row: BitmaskRow) -> None:
        """Overwrite `row` with the allowed ids; padding bits are 0."""
        row[:] = self._dfa.rows[self._states[-1]]

    def accept(self, token_id: int) -> bool:
        """Step over a token; False (and no change) if it is not allowed."""
        state = self._dfa.step(self._states[-1], token_id)
        if state == DEAD:
            return False
        self._states.append(state)
        return True

    def accept_bytes(self, data: bytes) -> bool:
        """Step over the end of a token that began before; False (and no change) if illegal."""
        state = self._dfa.step_bytes(self._states[-1], data)
        if state == DEAD:
            return False
        self._states.append(state)
        return True

    def viable(self, texts: Sequence[bytes]) -> list[bool]:
        """Return which byte strings `accept_bytes` would take, without moving."""
        found: list[bool] = self._dfa.viable(self._states[-1], texts).tolist()
        return found

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens; any number up to all accepted so far."""
        if not 0 <= num_tokens < len(self._states):
            raise ValueError(f"can't take back {num_tokens} of {len(self._states) - 1} tokens")
        del self._states[len(self._states) - num_tokens :]

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens would be accepted, without moving."""
        state = self._states[-1]
        for i, token_id in enumerate(token_ids):
            state = self._dfa.step(state, token_id)
            if state == DEAD:
                return i
        return len(token_ids)

    def forced(self) -> list[int]:
        """Return tokens that must come next, canonically tokenised; [] if there is a choice."""
        state, tokens = self._states[-1], []
        while (token_id := int(self._dfa.forced_tokens[state])) >= 0:
            tokens.append(token_id)
            state = self._dfa.step(state, token_id)
        return tokens

    def fork(self) -> TokenDFAMatcher:
        """Return an independent matcher in the same state."""
        return TokenDFAMatcher(self._dfa, self._states.copy())

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is a complete value."""
        return bool(self._dfa.accepting[self._states[-1]])

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can be added."""
        return self.is_accepting and not self._dfa.has_next[self._states[-1]]


def _forced_tokens(
    vocabulary: Vocabulary, dfa: ByteDFA, alive: npt.NDArray[np.bool_], texts: Iterable[ForcedText]
) -> Int32:
    """Return the one token that each state of forced text allows; -1 for the others.

    A state keeps the first token it is given, so that following the states one by one gives the
    same tokens as jumping.
    """
    forced: Int32 = np.full(dfa.num_states, -1, np.int32)
    for state, data, closed_len in texts:
        length = 0
        for token_id in _encode(vocabulary, data) if forced[state] < 0 else ():
            length += len(vocabulary.token_bytes[token_id])
            after = dfa.step(state, vocabulary.token_bytes[token_id])
            if length > closed_len or forced[state] >= 0 or not alive[after]:
                break
            forced[state] = token_id
            state = after
    return forced


def _encode(vocabulary: Vocabulary, data: bytes) -> list[int]:
    """Return the tokenizer's own ids for a text; [] where they spell something else."""
    try:
        ids = vocabulary.encode(data.decode("utf-8"))
    except UnicodeDecodeError:  # it starts or ends inside a character: single steps do that
        return []
    parts = [vocabulary.token_bytes[i] for i in ids]
    return ids if all(parts) and b"".join(parts) == data else []


def _bits(token_ids: npt.NDArray[np.int32]) -> Int32:
    return (np.uint32(1) << (token_ids & 31).astype(np.uint32)).view(np.int32)
