"""The vocabulary as a byte trie in arrays: all tokens are walked through an automaton at once.

Knows nothing of grammars beyond a table of transitions. Built once per vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .byte_dfa import DEAD

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# Bytes in at most 64 groups, the bits of a set. One that a state treats apart from its group only
# makes walks longer, so those that texts tend to end with or escape with are alone.
_GROUP_STARTS = (0, *range(32, 49), *range(58, 66), 71, *range(91, 98), 103, *range(123, 128), 192)
_GROUP_BITS: UInt64 = np.uint64(1) << (
    np.searchsorted(_GROUP_STARTS, np.arange(256), side="right").astype(np.uint64) - np.uint64(1)
)  # [256]
_NO_GROUP = np.uint64(0)


class WalkTable(NamedTuple):
    """An automaton's transitions, prepared to be walked."""

    transitions: Int32  # [num_states * 256]
    leaves: UInt64  # [num_states], the groups of bytes, as bits, of which any leads to elsewhere

    @classmethod
    def of(cls, transitions: Int32) -> WalkTable:
        """Prepare a table of [num_states, 256]."""
        leads_on = transitions != np.arange(len(transitions))[:, None]
        leaves = np.zeros(len(transitions), np.uint64)
        np.bitwise_or.reduce(np.where(leads_on, _GROUP_BITS, _NO_GROUP), axis=1, out=leaves)
        return cls(np.ascontiguousarray(transitions).reshape(-1), leaves)


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
        first_token, num_tokens = [np.zeros(1, np.int64)], [np.full(1, len(ids))]
        above = np.zeros(len(ids), np.int64)  # each token's node one level up
        num_nodes, level_ends = 1, [1]
        for depth in range(width):
            here = np.flatnonzero(lengths > depth)
            is_new = shared[here] <= depth
            node = num_nodes + np.cumsum(is_new) - 1
            byte.append(text[here[is_new], depth])
            parent.append(above[here[is_new]])
            first_token.append(here[is_new])
            num_tokens.append(np.bincount(node - num_nodes))
            above[here] = node
            num_nodes += int(is_new.sum())
            level_ends.append(num_nodes)
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
        self.twins = twins  # (token, the token at the same node that `token_at` names)
        # the tokens at and under a node are neighbours in the order of their bytes
        self._tokens = order.astype(np.int64)
        self._first_token = np.concatenate(first_token)
        self._num_tokens = np.concatenate(num_tokens)
        self._below = self._groups_below(parents, level_ends)

    def _groups_below(self, parents: Int64, level_ends: Sequence[int]) -> UInt64:
        """Return the groups of the bytes under each node, as bits."""
        groups = _GROUP_BITS[self.byte]
        below = np.zeros(len(groups), np.uint64)
        for start, end in reversed(list(itertools.pairwise(level_ends))):
            above, first = np.unique(parents[start:end], return_index=True)
            below[above] = np.bitwise_or.reduceat(below[start:end] | groups[start:end], first)
        return below

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

    def walk(self, table: WalkTable, states: Int32, found: npt.NDArray[Any]) -> None:
        """Write where each token leads: found [len(states), >= vocabulary], 0 stays for nowhere.

        An array of booleans holds whether a token leads anywhere, one of integers the state.
        """
        cells = found.reshape(-1)
        offset = np.arange(len(states), dtype=np.int64) * found.shape[1]  # of the row in `cells`
        node = np.zeros(len(states), np.int64)
        state = states
        while len(node):
            child, counts = self.children(node)
            cell = np.repeat(state.astype(np.int64) * 256, counts)
            cell += self.byte.take(child)
            after = table.transitions.take(cell)
            alive = np.flatnonzero(after != DEAD)
            node, state = child.take(alive), after.take(alive)
            offset = np.repeat(offset, counts).take(alive)
            # where no byte further down leaves the state, all tokens of the branch lead to it
            stays = (self._below.take(node) & table.leaves.take(state)) == 0
            at = np.flatnonzero(stays)
            branch = node.take(at)
            sizes = self._num_tokens.take(branch)
            under = self._tokens.take(_ranges(self._first_token.take(branch), sizes))
            cells[np.repeat(offset.take(at), sizes) + under] = np.repeat(state.take(at), sizes)
            at = np.flatnonzero(~stays)
            node, state, offset = node.take(at), state.take(at), offset.take(at)
            token = self.token_at.take(node)
            at = np.flatnonzero(token >= 0)
            cells[offset.take(at) + token.take(at)] = state.take(at)
        for token_id, twin in self.twins:
            found[:, token_id] = found[:, twin]

    def children(self, node: Int64) -> tuple[Int64, Int32]:
        """Return the children of nodes, and how many each of them has."""
        counts = self.num_children.take(node)
        return _ranges(self.first_child.take(node), counts), counts


def _ranges(first: npt.NDArray[Any], counts: npt.NDArray[Any]) -> Int64:
    """Return first[0], first[0] + 1, ... counts[0] numbers, then those of the next."""
    # all by int64: all else reads more slowly, or copies its indices
    starts = np.cumsum(counts, dtype=np.int64) - counts
    result = np.arange(int(counts.sum()))
    result += np.repeat(first - starts, counts)
    return result


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
