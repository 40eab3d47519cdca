"""Where an automaton leaves no choice: the text that must follow, and how much of it is settled.

Works on bytes; which tokens spell the text is decided where the tokenizer is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .byte_dfa import DEAD, ByteDFA
from .packed_bytes import PackedBytes
from .token_trie import TokenTrie


class ForcedText(NamedTuple):
    """What must follow from a state on."""

    state: int
    data: bytes
    closed_len: int  # no token that starts before this can reach over the end of the text


def find_forced_texts(trie: TokenTrie, dfa: ByteDFA) -> list[ForcedText]:
    """Return the forced text of each state that has one, in the order of the states.

    Tokens past `closed_len` are open: a longer token may spell the text's end together with what
    comes after it, and only the model can choose.
    """
    live = dfa.transitions != DEAD
    is_forced = (live.sum(axis=1) == 1) & ~dfa.accepting
    byte = live.argmax(axis=1)
    reaches: dict[tuple[int, bytes], bool] = {}  # states along one text share their suffixes
    found = []
    for state in np.flatnonzero(is_forced).tolist():
        data, end = bytearray(), state
        while is_forced[end]:
            data.append(byte[end])
            end = int(dfa.transitions[end, byte[end]])
        closed_len = len(data)
        for start in range(len(data) - 1, max(-1, len(data) - 1 - trie.max_len), -1):
            suffix = bytes(data[start:])
            if (end, suffix) not in reaches:
                reaches[end, suffix] = trie.continues(suffix, dfa.transitions, end)
            if reaches[end, suffix]:
                closed_len = start
        if closed_len:
            found.append(ForcedText(state, bytes(data), closed_len))
    return found


class PackedTexts(NamedTuple):
    """Forced texts as arrays: a row of n states has n**2 / 2 bytes of them."""

    states: npt.NDArray[np.int64]  # [num_texts]
    data: PackedBytes
    closed_lens: npt.NDArray[np.int64]  # [num_texts]

    def texts(self) -> Iterator[ForcedText]:
        """Yield one text after the other."""
        parts = self.states.tolist(), self.data.strings(), self.closed_lens.tolist()
        return map(ForcedText, *parts)


def pack_texts(texts: Sequence[ForcedText]) -> PackedTexts:
    """Return texts as arrays."""
    return PackedTexts(
        np.array([text.state for text in texts], np.int64),
        PackedBytes.of([text.data for text in texts]),
        np.array([text.closed_len for text in texts], np.int64),
    )
