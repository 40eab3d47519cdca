"""A regular constraint as an automaton over bytes with one packed mask row per state.

`transitions` (states x 256) and `rows` (states x vocabulary bits) are plain arrays: a step is
"copy the state's row" and "walk the token's own bytes", which a device can do without the host.
Doesn't parse anything.

Where the text leaves no choice, a state allows one token: the one that the tokenizer would use for
the forced text. Decoding with and without jumping over forced text is therefore the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..vocabulary import Vocabulary
from .byte_dfa import DEAD, START, ByteDFA
from .matcher import BitmaskRow
from .token_trie import StateRows, TokenTrie

Int32 = npt.NDArray[np.int32]


class TokenDFA:
    """A compiled regular constraint; see `CompiledGrammar`.

    States are numbered as in `ByteDFA`: 0 is dead, 1 the start. `rows` includes EOS bits where
    the state accepts. `forced_tokens[state]` is the only token allowed there, or -1.
    """

    engine = "umbel-dfa"

    def __init__(
        self, vocabulary: Vocabulary, trie: TokenTrie, dfa: ByteDFA, state_rows: StateRows
    ) -> None:
        rows = state_rows.rows
        self.vocabulary = vocabulary
        self.transitions: Int32 = dfa.transitions  # [num_states, 256]
        self.accepting = dfa.accepting  # [num_states]
        self.forced_tokens: Int32 = _ForcedTokens(
            vocabulary, trie, dfa, state_rows.alive
        ).find()  # [num_states]
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
        if not data:
            return DEAD
        table = self._table
        for byte in data:
            state = table[(state << 8) | byte]
        return DEAD if state in self._dead_ends else state

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


class _ForcedTokens:
    """Finds the one token each state of forced text allows.

    The forced text is encoded as a whole; its last tokens are left open where a longer token could
    still reach over its end. A state keeps the first token it is given, so that following the
    states one by one gives the same tokens as jumping.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        trie: TokenTrie,
        dfa: ByteDFA,
        alive: npt.NDArray[np.bool_],
    ) -> None:
        self._vocabulary = vocabulary
        self._trie = trie
        self._dfa = dfa
        self._alive = alive
        live = dfa.transitions != DEAD
        only = (live.sum(axis=1) == 1) & ~dfa.accepting
        self._byte: Int32 = np.where(only, live.argmax(axis=1), -1).astype(np.int32)
        self._straddles: dict[tuple[int, bytes], bool] = {}
        self._token = np.full(dfa.num_states, -1, np.int32)

    def find(self) -> Int32:
        for state in np.flatnonzero(self._byte >= 0).tolist():
            if self._token[state] < 0:
                self._assign(state)
        return self._token

    def _assign(self, state: int) -> None:
        for token_id in self._tokens(state):
            after = self._dfa.step(state, self._vocabulary.token_bytes[token_id])
            if self._token[state] >= 0 or not self._alive[after]:
                return
            self._token[state] = token_id
            state = after

    def _tokens(self, state: int) -> list[int]:
        data, end = bytearray(), state
        while self._byte[end] >= 0:
            data.append(int(self._byte[end]))
            end = int(self._dfa.transitions[end, self._byte[end]])
        try:
            text = bytes(data).decode("utf-8")
        except UnicodeDecodeError:
            # inside a character, or the last one is open: leave those to single steps
            return []
        ids = self._vocabulary.encode(text)
        parts = [self._vocabulary.token_bytes[i] for i in ids]
        if b"".join(parts) != data:  # the tokenizer adds or changes something at a text's start
            return []
        limit = self._open_from(bytes(data), end)
        kept, length = [], 0
        for token_id, part in zip(ids, parts, strict=True):
            length += len(part)
            if length > limit or not part:
                break
            kept.append(token_id)
        return kept

    def _open_from(self, data: bytes, end: int) -> int:
        """Return the first position from which a token can reach over the end of the text."""
        first = len(data)
        for start in range(len(data) - 1, max(-1, len(data) - 1 - self._trie.max_len), -1):
            key = (end, data[start:])
            if key not in self._straddles:
                reaches = self._trie.continues(data[start:], self._dfa.transitions, end)
                self._straddles[key] = reaches
            if self._straddles[key]:
                first = start
        return first


def _bits(token_ids: npt.NDArray[np.int32]) -> Int32:
    return (np.uint32(1) << (token_ids & 31).astype(np.uint32)).view(np.int32)
