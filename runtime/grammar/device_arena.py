"""Automata of many grammars in one table on a device, where sampling masks and steps by itself.

Hands out room for states and takes it back; knows no request, no batch and no stream. Its tensors
never move, so that captured graphs may read them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from umbel.kernels import RowMasks, TokenBytes

from ..vocabulary import Vocabulary
from .token_dfa import TokenDFA

#: the state of rows without a constraint: allows every id, and stays
FREE = 0

_DEFAULT_BYTES = 256 << 20  # 13,000 states of a vocabulary of 152k


@dataclass(slots=True)
class _Span:
    """The states of one grammar in the table."""

    start: int
    length: int
    num_holders: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


class DeviceArena:
    """Up to `num_states` states of token automata on one device.

    A grammar's states are neighbours: its state s is `base + s` here, where `hold` gives the base.
    A grammar that nobody holds stays until its room is needed; the one that was used longest ago
    goes first. One thread at a time. Copies to the device are queued on the current stream, so what
    is launched there afterwards sees them.
    """

    def __init__(
        self, vocabulary: Vocabulary, device: torch.device, num_states: int | None = None
    ) -> None:
        """Take (vocabulary / 8 + 1,024) bytes of the device a state; by default 256 MiB."""
        num_words = (vocabulary.size + 31) // 32
        if num_states is None:
            num_states = _DEFAULT_BYTES // (4 * num_words + 1024)
        self.rows = torch.zeros(num_states + 1, num_words, dtype=torch.int32, device=device)
        self.rows[FREE] = -1
        self.transitions = torch.zeros(num_states + 1, 256, dtype=torch.int32, device=device)
        self.tokens = _token_bytes(vocabulary, device)
        self._num_states = num_states
        self._spans: OrderedDict[int, _Span] = OrderedDict()  # by id(grammar), oldest use first
        self._grammars: dict[int, TokenDFA] = {}  # keeps the ids from being given to others

    def hold(self, grammar: TokenDFA) -> int | None:
        """Make sure that a grammar is here until it is released; return its base.

        None if there is no room: then its masks come from the host. Each `hold` that gave a base
        needs one `release`.
        """
        key = id(grammar)
        span = self._spans.get(key)
        if span is None:
            start = self._make_room(len(grammar.transitions))
            if start is None:
                return None
            span = self._spans[key] = _Span(start, len(grammar.transitions))
            self._grammars[key] = grammar
            self._copy(grammar, span)
        self._spans.move_to_end(key)
        span.num_holders += 1
        return span.start

    def release(self, grammar: TokenDFA) -> None:
        """Give back what one `hold` took."""
        span = self._spans[id(grammar)]
        assert span.num_holders > 0, "released more often than held"
        span.num_holders -= 1

    def masks(self, states: Tensor) -> RowMasks:
        """Return the masks of rows whose states are in a tensor, int32 [num_rows]."""
        return RowMasks(self.rows, states)

    @property
    def num_held(self) -> int:
        """Holds that were not released."""
        return sum(span.num_holders for span in self._spans.values())

    @property
    def num_free(self) -> int:
        """States that no grammar takes."""
        return self._num_states - sum(span.length for span in self._spans.values())

    def check(self) -> None:
        """Assert that spans are inside the table and apart from each other."""
        spans = sorted(self._spans.values(), key=lambda span: span.start)
        at = FREE + 1
        for span in spans:
            assert at <= span.start, "two grammars share states"
            at = span.end
        assert at <= self._num_states + 1, "a grammar reaches over the end"
        assert self._spans.keys() == self._grammars.keys()

    def _make_room(self, length: int) -> int | None:
        """Return where so many states fit, letting go of idle grammars as far as that is needed."""
        held = [span for span in self._spans.values() if span.num_holders]
        if _first_gap(held, length, self._num_states) is None:
            return None  # nothing that could be let go would be enough
        while (start := _first_gap(self._spans.values(), length, self._num_states)) is None:
            oldest = next(key for key, span in self._spans.items() if not span.num_holders)
            del self._spans[oldest], self._grammars[oldest]
        return start

    def _copy(self, grammar: TokenDFA, span: _Span) -> None:
        place = slice(span.start, span.end)
        moved = grammar.transitions + np.int32(span.start)  # dead is a state of its own: no tokens
        for table, values in ((self.rows, grammar.rows), (self.transitions, moved)):
            source = torch.from_numpy(values)
            if table.device.type == "cuda":  # from pageable memory the host would wait for the pass
                source = source.pin_memory()
            table[place].copy_(source, non_blocking=True)


def _first_gap(spans: Iterable[_Span], length: int, num_states: int) -> int | None:
    """Return the first place where `length` states lie in no span."""
    at = FREE + 1
    for span in sorted(spans, key=lambda span: span.start):
        if span.start - at >= length:
            break
        at = span.end
    return at if num_states + 1 - at >= length else None


def _token_bytes(vocabulary: Vocabulary, device: torch.device) -> TokenBytes:
    tokens = vocabulary.token_bytes
    starts = np.zeros(vocabulary.size + 1, np.int32)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    starts[1 : len(tokens) + 1] = lengths.cumsum()
    starts[len(tokens) + 1 :] = starts[len(tokens)]
    data = np.frombuffer(b"".join(tokens) or b"\0", np.uint8).copy()
    return TokenBytes(torch.from_numpy(data).to(device), torch.from_numpy(starts).to(device))
