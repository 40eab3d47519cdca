"""A tokenizer's vocabulary as bytes, for what works below text: masks, automata, detokenising."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Token ids as bytes. Compared and hashed by identity: one per loaded tokenizer.

    `token_bytes[i]` is b"" for special and unused ids. `size` is the model's (padded) vocabulary,
    at least len(token_bytes). `eos_ids` end a generation; they and `special_ids` are never text.
    `encode` turns plain text into ids without parsing special tokens.
    """

    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    size: int
    encode: Callable[[str], list[int]]
