"""Random text of an exact number of tokens, the same for the same seed."""

from __future__ import annotations

import random
import re

from umbel.lang.errors import EngineConfigError

from ..tokenizer import Tokenizer

_WORD = re.compile(rb" [a-z]{3,}")
_LETTER = re.compile(rb"[A-Za-z0-9]")
_MIN_ATOMS = 16
_MAX_ATOMS = 4096


class RandomText:
    """Draws texts over pieces that stay one token each, whatever stands beside them.

    Pieces are words with a space before them, where the tokenizer has such; else single letters.
    Raises EngineConfigError for a tokenizer that merges both.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        for pattern in (_WORD, _LETTER):
            self._atoms = [
                token.decode() for token in tokenizer.token_bytes if pattern.fullmatch(token)
            ][:_MAX_ATOMS]
            if len(self._atoms) >= _MIN_ATOMS and self._is_exact(1024):
                return
        raise EngineConfigError(
            "this tokenizer merges words as well as letters, so that no text of random tokens has "
            "a length known beforehand: benchmark with another model, or a dummy of its shape"
        )

    def draw(self, num_tokens: int) -> str:
        """Return text of so many tokens."""
        return "".join(self._random.choices(self._atoms, k=num_tokens))

    def _is_exact(self, num_tokens: int) -> bool:
        return len(self._tokenizer.encode_text(self.draw(num_tokens))) == num_tokens
