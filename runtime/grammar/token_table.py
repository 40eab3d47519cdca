"""An automaton whose steps are tokens, as arrays; and how an outlines-core index becomes one.

Knows no library by import: it is used on both sides of the compile process.
"""

from __future__ import annotations

from array import array
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

START = 0

Int32 = npt.NDArray[np.int32]


class TokenTable(NamedTuple):
    """States are numbered from START on; nothing can be matched where there are none.

    State s allows `tokens[offsets[s] : offsets[s + 1]]`, in ascending order, and `targets` has
    where each of them leads.
    """

    offsets: npt.NDArray[np.int64]  # [num_states + 1]
    tokens: Int32  # [num_steps]
    targets: Int32  # [num_steps]
    is_final: npt.NDArray[np.bool_]  # [num_states]

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.nbytes for part in self)


class TokenIndex(Protocol):
    """The part of an outlines-core index that is read."""

    def get_initial_state(self) -> int:
        """Return the state before any token."""
        ...

    def get_next_state(self, state: int, token_id: int) -> int | None:
        """Return the state after a token."""
        ...

    def get_allowed_tokens(self, state: int) -> list[int] | None:
        """Return the tokens that lead on, in no order; EOS, too, where a text may end."""
        ...

    def is_final_state(self, state: int) -> bool:
        """Whether a text may end here."""
        ...


def read_index(index: TokenIndex, vocab_size: int, eos_id: int) -> TokenTable:
    """Return what an index does after the token `vocab_size`; neither that one nor EOS is in it.

    One state at a time: all transitions at once, as objects, take 14 times the arrays' memory.
    """
    next_state = index.get_next_state
    start = next_state(index.get_initial_state(), vocab_size)
    states = [] if start is None else [start]  # as the index numbers them
    number = _Numbers()
    number.give(np.array(states, np.int64))
    row = np.full(vocab_size, -1, np.int32)  # where each token leads
    offsets, is_final = [0], []
    tokens, targets = array("i"), array("i")  # grow in place
    for state in states:  # grows, too
        allowed = index.get_allowed_tokens(state) or []
        is_final.append(index.is_final_state(state))
        if is_final[-1]:  # EOS is listed, and leads nowhere
            allowed = [token_id for token_id in allowed if token_id != eos_id]
        after = np.fromiter(map(next_state, repeat(state), allowed), np.int64, len(allowed))
        ids = np.fromiter(allowed, np.int64, len(allowed))
        is_text = ids < vocab_size  # where a text may hold the sentinel, its token is allowed
        ids, after = ids[is_text], after[is_text]
        states += number.give(after).tolist()
        row[ids] = number.of[after]
        found = np.flatnonzero(row >= 0)
        tokens.frombytes(found.astype(np.int32).tobytes())
        targets.frombytes(row[found].tobytes())
        offsets.append(len(tokens))
        row[ids] = -1
    return TokenTable(
        np.array(offsets, np.int64),
        np.frombuffer(tokens, np.int32),
        np.frombuffer(targets, np.int32),
        np.array(is_final, np.bool_),
    )


class _Numbers:
    """New numbers for states, in the order in which they are seen."""

    def __init__(self) -> None:
        self.of: Int32 = np.full(1024, -1, np.int32)  # by the old number
        self._count = 0

    def give(self, states: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Give numbers to those that have none yet; return these, in the order of the numbers."""
        largest = int(states.max(initial=0))
        if largest >= len(self.of):
            longer = np.full(max(largest + 1, 2 * len(self.of)), -1, np.int32)
            longer[: len(self.of)] = self.of
            self.of = longer
        new = np.unique(states[self.of[states] < 0])
        self.of[new] = np.arange(self._count, self._count + len(new))
        self._count += len(new)
        return new
