"""The end of a token in tokens of single bytes, for engines that take nothing but tokens.

Knows the vocabulary's bytes and no grammar.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from ..vocabulary import Vocabulary


class ByteSpelling:
    """The single-byte tokens of a vocabulary.

    One made by byte-pair encoding has each byte of each token; a byte that is no token by itself
    can't be spelled, and a text with it counts as not allowed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = [-1] * 256
        never = vocabulary.special_ids.union(vocabulary.eos_ids)
        for token_id, data in enumerate(vocabulary.token_bytes):
            if len(data) == 1 and self._ids[data[0]] < 0 and token_id not in never:
                self._ids[data[0]] = token_id

    def spell(self, data: bytes) -> list[int]:
        """Return the ids that spell `data`, up to the first byte that is no token."""
        spelled = []
        for byte in data:
            token_id = self._ids[byte]
            if token_id < 0:
                break
            spelled.append(token_id)
        return spelled

    def viable(
        self, texts: Sequence[bytes], validate: Callable[[Sequence[int]], int]
    ) -> list[bool]:
        """Return which of many sorted texts are taken whole; `validate` counts tokens taken.

        Texts that begin with what was found to lead nowhere aren't asked for.
        """
        found = [False] * len(texts)
        at = 0
        while at < len(texts):
            text = texts[at]
            taken = validate(self.spell(text)) if text else 0
            found[at] = taken == len(text)
            if found[at]:
                at += 1
            else:
                end = after_prefix(text[: taken + 1])
                at = len(texts) if end is None else bisect_left(texts, end, at)
        return found


def after_prefix(data: bytes) -> bytes | None:
    """Return the first text in byte order after all that begin with `data`; None if none is."""
    kept = data.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
