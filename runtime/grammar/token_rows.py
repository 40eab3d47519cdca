"""What tokens do in each state of an automaton: one packed mask row per state.

Works on a table of transitions and the vocabulary's trie; knows no grammars.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .byte_dfa import DEAD, BuildTimeoutError
from .token_trie import Int32, Int64, TokenTrie, WalkTable

_CHUNK = 4_000_000  # (state, node) pairs and (state, token) bits at once: bounds the memory
_BANDS = (3, 6, 10, 16, sys.maxsize)  # token lengths in bytes, up to and including
_TIMES_FEWER = 4  # a merged trie pays if it has so many times fewer nodes,
_LOOKUPS = 8  # and walking a node of the other costs about as much as looking up so many tokens


class StateRows(NamedTuple):
    """What tokens do in each state of an automaton."""

    rows: Int32  # [num_states, ceil(vocab_size / 32)], the allowed tokens
    alive: npt.NDArray[np.bool_]  # [num_states], whether tokens lead on to an accepting state


class _Band(NamedTuple):
    """The tokens of some lengths, numbered by the words of a row that hold any of them."""

    max_len: int  # bytes
    words: Int64
    trie: TokenTrie  # token 32 * i + j is bit j of word words[i]


class TokenRows:
    """Computes, for every state of an automaton, the bits of the tokens it allows.

    A row says which tokens don't lead to the dead state, so for tokens of up to n bytes all states
    that agree on the next n bytes share their bits. Counters (`{1,64}`) make many such states;
    tokens are therefore kept in bands by length, and each band is walked once per class of states.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int) -> None:
        self.num_words = (vocab_size + 31) // 32
        self.usable_bytes = np.zeros(256, np.bool_)  # those that some token holds
        self.usable_bytes[list(frozenset(b"".join(token_bytes)))] = True
        self.single_bytes = np.zeros(256, np.bool_)  # those that are tokens by themselves
        self.single_bytes[[t[0] for t in token_bytes if len(t) == 1]] = True
        self._bands: list[_Band] = []
        lengths = np.array([len(token) for token in token_bytes])
        low = 0
        for high in _BANDS:
            if len(ids := np.flatnonzero((lengths > low) & (lengths <= high))):
                words = np.unique(ids // 32)
                if len(words) > self.num_words // 4:  # whole rows are put together faster
                    words = np.arange(self.num_words)
                tokens = [b""] * (32 * len(words))
                places = np.searchsorted(words, ids // 32).tolist()
                for token_id, at in zip(ids.tolist(), places, strict=True):
                    tokens[32 * at + token_id % 32] = token_bytes[token_id]
                self._bands.append(_Band(high, words, TokenTrie(tokens)))
            low = high

    def build(
        self, transitions: Int32, accepting: npt.NDArray[np.bool_], deadline: float = float("inf")
    ) -> StateRows:
        """Return the packed rows of an automaton's states [num_states, 256].

        Raises BuildTimeoutError past the deadline (`time.monotonic()`).
        """
        clock = _Clock(deadline)
        spelled = (transitions != DEAD).any(axis=0)  # [256]
        if self.single_bytes[spelled].all():
            alive = np.arange(len(accepting)) != DEAD
            return StateRows(self._in_bands(transitions, clock), alive)
        return self._with_ends(transitions, accepting, clock)

    def _in_bands(self, transitions: Int32, clock: _Clock) -> Int32:
        table, columns = WalkTable.of(transitions), _Columns.of(transitions)
        classes = _Classes(columns.table)
        rows = np.zeros((len(transitions), self.num_words), np.int32)
        for num_bytes, words, trie in self._bands:
            class_of, first = classes.after(num_bytes)
            merged = _merge(trie, columns, 32 * len(words))
            band = np.empty((len(first), len(words)), np.int32)
            for chunk in clock.chunks(len(first), _CHUNK // max(len(trie.byte), 32 * len(words))):
                if merged is not None:
                    allowed = merged.allowed(columns.table, first[chunk])
                else:
                    allowed = np.zeros((len(first[chunk]), 32 * len(words)), np.bool_)
                    trie.walk(table, first[chunk], allowed)
                band[chunk] = _pack(allowed)
            if len(words) == self.num_words:
                rows |= band[class_of]
            else:
                rows[:, words] |= band[class_of]
        return rows

    def _with_ends(
        self, transitions: Int32, accepting: npt.NDArray[np.bool_], clock: _Clock
    ) -> StateRows:
        """Allow no token into a state that no tokens lead on from.

        Bytes alone don't show these where a byte is part of longer tokens only.
        """
        table = WalkTable.of(transitions)
        num_states = len(accepting)
        follows = np.zeros((num_states, num_states), np.bool_)
        for chunk, after in self._all_ends(table, num_states, clock):
            for state, targets in zip(range(num_states)[chunk], after, strict=True):
                follows[state, targets] = True
        follows[:, DEAD] = False
        alive = accepting
        while (found := accepting | follows[:, alive].any(axis=1)).sum() > alive.sum():
            alive = found
        rows = np.zeros((num_states, self.num_words), np.int32)
        for chunk, after in self._all_ends(table, num_states, clock):
            rows[chunk] = _pack(alive[after])
        return StateRows(rows, alive)

    def _all_ends(
        self, table: WalkTable, num_states: int, clock: _Clock
    ) -> Iterator[tuple[slice, Int32]]:
        states = np.arange(num_states, dtype=np.int32)
        for chunk in clock.chunks(num_states, _CHUNK // (self.num_words * 32)):
            after = np.full((len(states[chunk]), self.num_words * 32), DEAD, np.int32)
            for _, words, trie in self._bands:
                found = np.full((len(after), 32 * len(words)), DEAD, np.int32)
                trie.walk(table, states[chunk], found)
                after.reshape(len(after), -1, 32)[:, words] |= found.reshape(len(after), -1, 32)
            yield chunk, after


def _pack(bits: npt.NDArray[np.bool_]) -> Int32:
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


class _Clock(NamedTuple):
    deadline: float

    def chunks(self, length: int, step: int) -> Iterator[slice]:
        """Yield slices of at least one element, watching the time."""
        for start in range(0, length, max(1, step)):
            if time.monotonic() > self.deadline:
                raise BuildTimeoutError("computing the token rows")
            yield slice(start, start + max(1, step))


class _Columns(NamedTuple):
    """Bytes that no state tells apart have one column of the transitions."""

    table: Int32  # [num_states, number of columns]
    of_byte: npt.NDArray[np.uint8]  # [256]
    is_live: npt.NDArray[np.bool_]  # [256], whether any state takes a byte

    @classmethod
    def of(cls, transitions: Int32) -> _Columns:
        found, of_byte = np.unique(transitions, axis=1, return_inverse=True)
        is_live = (transitions != DEAD).any(axis=0)
        return cls(found, of_byte.reshape(-1).astype(np.uint8), is_live)


class _Merged(NamedTuple):
    """Tokens that no state tells apart end at one node of this trie of columns."""

    levels: Sequence[tuple[Int64, npt.NDArray[np.uint8]]]  # (node above, by its place; column)
    node_of: Int64  # [vocabulary bits]; the root, where nothing ends, for what leads nowhere

    def allowed(self, columns: Int32, states: Int32) -> npt.NDArray[np.bool_]:
        """Return whether each token leads anywhere from each state."""
        reached = states[:, None]
        alive = [np.zeros((len(states), 1), np.bool_)]
        for above, column in self.levels:
            reached = columns[reached[:, above], column]
            alive.append(reached != DEAD)
        return np.concatenate(alive, axis=1).take(self.node_of, axis=1)


def _merge(trie: TokenTrie, columns: _Columns, vocab_bits: int) -> _Merged | None:
    """Return the trie with the bytes of a column merged; None unless that saves most of a walk.

    Where a constraint takes classes of characters, thousands of tokens are one. But each token is
    then looked up for each state.
    """
    node, above = np.zeros(1, np.int64), np.zeros(1, np.int64)  # on one level: (node, merged one)
    levels = []
    node_of = np.zeros(vocab_bits, np.int64)
    num_nodes = num_merged = 1
    while len(node):
        child, counts = trie.children(node)
        byte = trie.byte.take(child)
        alive = np.flatnonzero(columns.is_live.take(byte))
        node = child.take(alive)
        keys = np.repeat(above, counts).take(alive) * 256 + columns.of_byte.take(byte.take(alive))
        found, above = np.unique(keys, return_inverse=True)
        levels.append((found // 256, (found % 256).astype(np.uint8)))
        token = trie.token_at.take(node)
        at = np.flatnonzero(token >= 0)
        node_of[token.take(at)] = num_merged + above.take(at)
        num_nodes += len(node)
        num_merged += len(found)
        if num_nodes > 1_000 and num_merged * _TIMES_FEWER > num_nodes:
            return None
    if num_nodes * _LOOKUPS < vocab_bits:
        return None
    for token_id, twin in trie.twins:
        node_of[token_id] = node_of[twin]
    return _Merged(levels, node_of)


class _Classes:
    """Which states agree on every text of up to n bytes, for growing n."""

    def __init__(self, columns: Int32) -> None:
        self._columns = columns  # [num_states, distinct columns of the transitions]
        random = np.random.default_rng(0)
        self._weights = random.integers(1, 2**63, columns.shape[1], np.uint64) | np.uint64(1)
        self._names = random.integers(0, 2**63, len(columns) + 1, np.uint64)
        self._class_of = (np.arange(len(columns)) != DEAD).astype(np.int64)
        self._num_bytes = 0
        self._is_stable = False

    def after(self, num_bytes: int) -> tuple[npt.NDArray[np.int64], Int32]:
        """Return (the class of each state, one state of each class)."""
        while self._num_bytes < num_bytes and not self._is_stable:
            names = self._names[self._class_of]
            signatures = (names[self._columns] * self._weights).sum(axis=1, dtype=np.uint64)
            signatures += names * np.uint64(0x9E3779B97F4A7C15)
            _, found = np.unique(signatures, return_inverse=True)
            self._is_stable = found.max() == self._class_of.max()
            self._class_of = found
            self._num_bytes += 1
        first = np.unique(self._class_of, return_index=True)[1]
        return self._class_of, first.astype(np.int32)
