"""The vocabulary as a byte trie in arrays: all tokens are walked through an automaton at once.

Knows nothing of grammars beyond a table of transitions. Built once per vocabulary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .byte_dfa import DEAD, BuildTimeoutError

_CHUNK_PAIRS = 4_000_000  # (state, node) pairs that can be in flight: bounds the memory of a walk
_BANDS = (3, 6, 10, 16, sys.maxsize)  # token lengths in bytes, up to and including

Int32 = npt.NDArray[np.int32]


class TokenTrie:
    """Nodes are numbered level by level, so that a node's children are neighbours.

    Tokens with the same bytes share a node; empty tokens (special and unused ids) have none.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        ids = sorted((i for i, t in enumerate(token_bytes) if t), key=token_bytes.__getitem__)
        lengths = np.array([len(token_bytes[i]) for i in ids], np.int64)
        width = int(lengths.max(initial=1))
        self.max_len = width
        padded = b"".join(token_bytes[i].ljust(width, b"\0") for i in ids)
        text = np.frombuffer(padded, np.uint8).reshape(len(ids), width)
        shared = _shared_prefix(text, lengths)

        byte, parent, ends = [np.zeros(1, np.uint8)], [np.full(1, -1)], []
        above = np.zeros(len(ids), np.int64)  # each token's node one level up
        num_nodes = 1
        for depth in range(width):
            here = np.flatnonzero(lengths > depth)
            is_new = shared[here] <= depth
            node = num_nodes + np.cumsum(is_new) - 1
            byte.append(text[here[is_new], depth])
            parent.append(above[here[is_new]])
            above[here] = node
            num_nodes += int(is_new.sum())
            finished = lengths[here] == depth + 1
            ends.append((here[finished], node[finished]))
        self.byte = np.concatenate(byte)  # [num_nodes], the byte that leads to a node
        parents = np.concatenate(parent)
        counts = np.bincount(parents[1:], minlength=num_nodes)
        self.num_children: Int32 = counts.astype(np.int32)
        self.first_child: Int32 = (1 + np.cumsum(counts) - counts).astype(np.int32)
        self.token_at: Int32 = np.full(num_nodes, -1, np.int32)  # one token that ends at the node
        order = np.array(ids, np.int32)
        twins: list[tuple[int, int]] = []
        for index, node in ends:
            tokens = order[index]
            self.token_at[node] = tokens
            for token, at in zip(tokens.tolist(), node.tolist(), strict=True):
                if self.token_at[at] != token:
                    twins.append((token, int(self.token_at[at])))
        self._twins = twins  # (token, the token at the same node that `token_at` names)

    def find(self, data: bytes) -> int:
        """Return the node of a byte string; -1 if no token begins with it."""
        node = 0
        for wanted in data:
            first, count = int(self.first_child[node]), int(self.num_children[node])
            at = int(np.searchsorted(self.byte[first : first + count], wanted))
            if at == count or self.byte[first + at] != wanted:
                return -1
            node = first + at
        return node

    def continues(self, data: bytes, transitions: Int32, state: int) -> bool:
        """Whether a token begins with `data` and goes on as `state` (reached after it) allows."""
        node = self.find(data)
        todo = [(node, state)] if node >= 0 else []
        while todo:
            node, state = todo.pop()
            first = int(self.first_child[node])
            for child in range(first, first + int(self.num_children[node])):
                after = int(transitions[state, self.byte[child]])
                if after == DEAD:
                    continue
                if self.token_at[child] >= 0:
                    return True
                todo.append((child, after))
        return False

    def walk(self, transitions: Int32, states: Int32, found: npt.NDArray[Any]) -> None:
        """Write where each token leads: found [len(states), >= vocabulary], 0 stays for nowhere.

        `transitions` is the flat table [num_states * 256]. An array of booleans holds whether a
        token leads anywhere, one of integers the state.
        """
        cells = found.reshape(-1)
        offset = np.arange(len(states), dtype=np.int64) * found.shape[1]  # of the row in `cells`
        node = np.zeros(len(states), np.int64)
        state = states
        while len(node):
            # repeats and takes by int64: all else reads more slowly, or copies its indices
            counts = self.num_children.take(node)
            starts = np.cumsum(counts) - counts
            child = np.arange(int(counts.sum()))
            child += np.repeat(self.first_child.take(node) - starts, counts)
            cell = np.repeat(state.astype(np.int64) * 256, counts)
            cell += self.byte.take(child)
            after = transitions.take(cell)
            alive = np.flatnonzero(after != DEAD)
            node, state = child.take(alive), after.take(alive)
            offset = np.repeat(offset, counts).take(alive)
            token = self.token_at.take(node)
            at = np.flatnonzero(token >= 0)
            cells[offset.take(at) + token.take(at)] = state.take(at)
            grows = np.flatnonzero(self.num_children.take(node))
            node, state, offset = node.take(grows), state.take(grows), offset.take(grows)
        for token_id, twin in self._twins:
            found[:, token_id] = found[:, twin]


class StateRows(NamedTuple):
    """What tokens do in each state of an automaton."""

    rows: Int32  # [num_states, ceil(vocab_size / 32)], the allowed tokens
    alive: npt.NDArray[np.bool_]  # [num_states], whether tokens lead on to an accepting state


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
        self._bands: list[tuple[int, TokenTrie]] = []
        low = 0
        for high in _BANDS:
            band = [t if low < len(t) <= high else b"" for t in token_bytes]
            if any(band):
                self._bands.append((high, TokenTrie(band)))
            low = high

    def build(
        self, transitions: Int32, accepting: npt.NDArray[np.bool_], deadline: float = float("inf")
    ) -> StateRows:
        """Return the packed rows of an automaton's states [num_states, 256].

        Raises BuildTimeoutError past the deadline (`time.monotonic()`).
        """
        flat = np.ascontiguousarray(transitions).reshape(-1)
        clock = _Clock(deadline)
        spelled = (transitions != DEAD).any(axis=0)  # [256]
        if self.single_bytes[spelled].all():
            alive = np.arange(len(accepting)) != DEAD
            return StateRows(self._in_bands(flat, _Classes(transitions), clock), alive)
        return self._with_ends(flat, accepting, clock)

    def _in_bands(self, transitions: Int32, classes: _Classes, clock: _Clock) -> Int32:
        rows = np.zeros((len(transitions) // 256, self.num_words), np.int32)
        for num_bytes, trie in self._bands:
            class_of, first = classes.after(num_bytes)
            band = np.empty((len(first), self.num_words), np.int32)
            for chunk in clock.chunks(len(first), _CHUNK_PAIRS // len(trie.byte)):
                allowed = np.zeros((len(first[chunk]), self.num_words * 32), np.bool_)
                trie.walk(transitions, first[chunk], allowed)
                band[chunk] = _pack(allowed)
            rows |= band[class_of]
        return rows

    def _with_ends(
        self, transitions: Int32, accepting: npt.NDArray[np.bool_], clock: _Clock
    ) -> StateRows:
        """Allow no token into a state that no tokens lead on from.

        Bytes alone don't show these where a byte is part of longer tokens only.
        """
        num_states = len(accepting)
        follows = np.zeros((num_states, num_states), np.bool_)
        for chunk, after in self._all_ends(transitions, num_states, clock):
            for state, targets in zip(range(num_states)[chunk], after, strict=True):
                follows[state, targets] = True
        follows[:, DEAD] = False
        alive = accepting
        while (found := accepting | follows[:, alive].any(axis=1)).sum() > alive.sum():
            alive = found
        rows = np.zeros((num_states, self.num_words), np.int32)
        for chunk, after in self._all_ends(transitions, num_states, clock):
            rows[chunk] = _pack(alive[after])
        return StateRows(rows, alive)

    def _all_ends(
        self, transitions: Int32, num_states: int, clock: _Clock
    ) -> Iterator[tuple[slice, Int32]]:
        states = np.arange(num_states, dtype=np.int32)
        for chunk in clock.chunks(num_states, _CHUNK_PAIRS // (self.num_words * 32)):
            after = np.full((len(states[chunk]), self.num_words * 32), DEAD, np.int32)
            for _, trie in self._bands:
                trie.walk(transitions, states[chunk], after)
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


class _Classes:
    """Which states agree on every text of up to n bytes, for growing n."""

    def __init__(self, transitions: Int32) -> None:
        _, columns = np.unique(transitions, axis=1, return_index=True)
        self._reduced = transitions[:, columns]
        random = np.random.default_rng(0)
        self._weights = random.integers(1, 2**63, len(columns), np.uint64) | np.uint64(1)
        self._names = random.integers(0, 2**63, len(transitions) + 1, np.uint64)
        self._class_of = (np.arange(len(transitions)) != DEAD).astype(np.int64)
        self._num_bytes = 0
        self._is_stable = False

    def after(self, num_bytes: int) -> tuple[npt.NDArray[np.int64], Int32]:
        """Return (the class of each state, one state of each class)."""
        while self._num_bytes < num_bytes and not self._is_stable:
            names = self._names[self._class_of]
            signatures = (names[self._reduced] * self._weights).sum(axis=1, dtype=np.uint64)
            signatures += names * np.uint64(0x9E3779B97F4A7C15)
            _, found = np.unique(signatures, return_inverse=True)
            self._is_stable = found.max() == self._class_of.max()
            self._class_of = found
            self._num_bytes += 1
        first = np.unique(self._class_of, return_index=True)[1]
        return self._class_of, first.astype(np.int32)


def _shared_prefix(
    text: npt.NDArray[np.uint8], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return how many bytes each (sorted) token shares with the one before; -1 for the first."""
    shared = np.full(len(text), -1, np.int64)
    if len(text) > 1:
        differs = text[1:] != text[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), text.shape[1])
        shared[1:] = np.minimum(first, np.minimum(lengths[1:], lengths[:-1]))
    return shared
