"""A think block as it is sampled: free text up to its mark, then the template's way to the answer.

Knows ids and their text; nothing of rows, requests or templates.
"""

from __future__ import annotations

import numpy as np

from umbel.lang.results import Thinking

from .detokenizer import IncrementalDetokenizer
from .grammar.matcher import BitmaskRow
from .vocabulary import Vocabulary


class ThinkingOpening:
    """Where one sample stands in its think block; see `gen_task.Opening`.

    `ending` are the mark's id and those of the text between it and the answer, which the mask
    leaves no choice in. It comes when the model draws the mark, and at the latest when it is
    needed for the block to take no more than `max_tokens`. No EOS can be drawn before.
    """

    def __init__(self, vocabulary: Vocabulary, ending: tuple[int, ...], max_tokens: int) -> None:
        self._eos_ids = vocabulary.eos_ids
        self._ending = ending
        self._detokenizer = IncrementalDetokenizer(vocabulary.token_bytes)
        self._num_free = max_tokens - len(ending)  # tokens of text that may still come
        self._num_ended = 0  # of `ending`, so many have come
        self._num_tokens = 0
        self._was_cut = False
        self._text = ""

    def fill(self, row: BitmaskRow) -> None:
        """Overwrite `row` with the ids that may come next."""
        words = row.view(np.uint32)
        if self._num_ended == 0 and self._num_free > 0:
            words[:] = 0xFFFFFFFF
            for eos_id in self._eos_ids:
                words[eos_id >> 5] &= ~np.uint32(1 << (eos_id & 31))
        else:
            wanted = self._ending[self._num_ended]
            words[:] = 0
            words[wanted >> 5] = 1 << (wanted & 31)

    def accept(self, token_id: int) -> bytes | None:
        """Take an id that the mask allowed: None, or b"" behind the last one of the block."""
        self._num_tokens += 1
        if self._num_ended == 0 and token_id != self._ending[0]:
            self._num_free -= 1
            self._text += self._detokenizer.push(token_id)
            return None
        if self._num_ended == 0:
            self._was_cut = self._num_free == 0
            self._text += self._detokenizer.flush()
        self._num_ended += 1
        return b"" if self._num_ended == len(self._ending) else None

    @property
    def thinking(self) -> Thinking:
        """What was thought so far."""
        is_whole = self._num_ended > 0 and not self._was_cut
        return Thinking(self._text, self._num_tokens, "stop" if is_whole else "length")
