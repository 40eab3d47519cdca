"""Cuts long text where no token reaches over, so that texts encode what they share once.

Knows where words end, and keeps what pieces encode to; encodes nothing itself.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

import tokenizers
from tokenizers.normalizers import NFC

# Cuts come at least that far apart, and that far before the end (characters).
PIECE_LENGTH = 512

# Between two ASCII words: every splitter in use ends a word there, whatever is around it, and
# nothing composes with the space. So a cut depends on the characters beside it alone.
_BORDER = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")
_LEFT = ("a", "it's", "I'LL", "naïve", "x 12ab", "漢字ab", "a\n\n b", "12.5e", "(see", "don't\tZ")
_RIGHT = (" a", " b's", " Cd", " é", " x12", " a\u0301", " to  \n", " I'm.", " a漢", " z\r\n\r\n")


class TextPieces:
    """Splits text into pieces whose ids, one after the other, are the ids of the whole text.

    Where the tokenizer's splitter is not known to end words at `_BORDER`, a text is one piece.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._cuts = _ends_words_between_letters(backend)

    def split(self, text: str, length: int = PIECE_LENGTH) -> Iterator[str]:
        """Yield the pieces of a text, of `length` characters and more but for the last.

        Those of texts that begin alike are equal, but for the last two pieces of that beginning.
        """
        start = 0
        while self._cuts and len(text) - start > 2 * length:
            found = _BORDER.search(text, start + length)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        yield text[start:] if start else text


class PieceCache:
    """Keeps the ids of the pieces encoded last, up to `max_pieces` and `max_ids`; for any thread.

    One that is too long to be kept pushes nothing else out.
    """

    def __init__(
        self, encode: Callable[[str], tuple[int, ...]], *, max_pieces: int, max_ids: int
    ) -> None:
        self._encode = encode
        self._max_pieces, self._max_ids = max_pieces, max_ids
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # used longest ago first
        self.num_ids = 0

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a piece; raises what encoding raises."""
        with self._lock:
            found = self._ids.get(text)
            if found is not None:
                self._ids.move_to_end(text)
                return found
        made = self._encode(text)  # by two threads at once, if they ask at once
        if len(made) > self._max_ids:
            return made
        with self._lock:
            if text not in self._ids:
                self._ids[text] = made
                self.num_ids += len(made)
                while self.num_ids > self._max_ids or len(self._ids) > self._max_pieces:
                    _, dropped = self._ids.popitem(last=False)
                    self.num_ids -= len(dropped)
        return made


def _ends_words_between_letters(backend: tokenizers.Tokenizer) -> bool:
    words, normalizer = backend.pre_tokenizer, backend.normalizer
    if words is None or not (normalizer is None or isinstance(normalizer, NFC)):
        return False
    for added in backend.get_added_tokens_decoder().values():
        # found before the words are: such a token could reach over a border
        if _BORDER.search(added.content) or added.rstrip:
            return False
    for left in _LEFT:
        for right in _RIGHT:
            if left[-1:].isascii() and right[1:2].isascii():
                starts = [start for _, (start, _) in words.pre_tokenize_str(left + right)]
                if len(left) not in starts:
                    return False
    return True
