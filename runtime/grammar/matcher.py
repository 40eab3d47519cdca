"""Where one request stands in its grammar: the interface that every grammar engine fulfils."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

BitmaskRow = npt.NDArray[np.int32]  # [ceil(vocab_size / 32)], bit i%32 of word i//32 allows id i


class GrammarMatcher(Protocol):
    """One request's position in a compiled grammar. Not thread-safe; owned by one request.

    Illegal input never changes the state. EOS ids are never accepted or rolled back here: `fill`
    sets their bits when the state is accepting, and the engine ends the request on them.
    """

    def fill(self, row: BitmaskRow) -> None:
        """Overwrite `row` with the allowed ids; padding bits are 0. Raises ConstraintError."""
        ...

    def accept(self, token_id: int) -> bool:
        """Step over a token; False (and no change) if it is not allowed."""
        ...

    def accept_bytes(self, data: bytes) -> bool:
        """Step over the end of a token that began before the constraint; False as in `accept`.

        It counts as one token for `rollback`.
        """
        ...

    def viable(self, texts: Sequence[bytes]) -> list[bool]:
        """Return which byte strings `accept_bytes` would take, each by itself, without moving."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens; any number up to all accepted so far."""
        ...

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens would be accepted, without moving."""
        ...

    def forced(self) -> list[int]:
        """Return tokens that must come next, canonically tokenised; [] if there is a choice."""
        ...

    def fork(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""
        ...

    @property
    def is_accepting(self) -> bool:
        """Whether the text so far is a complete value."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing can be added."""
        ...


class CompiledGrammar(Protocol):
    """An immutable compiled constraint, shared by any number of requests and threads."""

    engine: str  # "outlines-core", "llguidance", ...
    num_bytes: int  # estimate of the memory it holds, for the cache's budget

    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the start."""
        ...
