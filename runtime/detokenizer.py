"""Token ids to text, one at a time; knows bytes, and neither stops nor templates."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class IncrementalDetokenizer:
    """Decodes a growing row of ids; holds back only an incomplete UTF-8 tail.

    The text of all pushes and the flush together is that of the row's bytes decoded at once with
    errors="replace": bytes that can't become a character are U+FFFD as soon as that is certain,
    and a U+FFFD that the model wrote flows like any other character. Special, unused and padding
    ids have no text.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._tail = b""  # of a character that is not complete

    def push(self, token_id: int) -> str:
        """Return the text that this id completes."""
        if token_id >= len(self._token_bytes):
            return ""
        data = self._token_bytes[token_id]
        if data.isascii() and not self._tail:  # as most are: no character of it can be cut short
            return data.decode("ascii")
        return self.push_bytes(data)

    def push_bytes(self, data: bytes) -> str:
        """Return the text that the bytes of a part of a token complete."""
        # the codec itself, without the library's decoder: that took as long as all else of a token
        data = self._tail + data
        text, num_taken = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[num_taken:]
        return text

    @property
    def is_clean(self) -> bool:
        """Whether the text so far ends with a whole character."""
        return not self._tail

    def flush(self) -> str:
        """Return what is left of a character that was cut short, as U+FFFD; then start anew."""
        rest, self._tail = self._tail.decode(errors="replace"), b""
        return rest
