"""What tests do with a compiled grammar: spell texts, list its sentences, read its masks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from umbel.runtime.grammar import CompiledGrammar, GrammarMatcher
from umbel.runtime.vocabulary import Vocabulary


def accepts(grammar: CompiledGrammar, token_ids: Iterable[int]) -> bool:
    """Whether the tokens are all accepted and end in an accepting state."""
    matcher = grammar.matcher()
    return all(matcher.accept(t) for t in token_ids) and matcher.is_accepting


def mask(matcher: GrammarMatcher, vocabulary: Vocabulary) -> set[int]:
    """The ids that `fill` allows, from a row that held other bits; padding bits too."""
    row = np.full((vocabulary.size + 31) // 32, -1, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def sentences(grammar: CompiledGrammar, alphabet: dict[str, int], max_len: int) -> set[str]:
    """All sentences up to a length, by single-character tokens, depth first with rollback."""
    matcher, found = grammar.matcher(), set[str]()

    def visit(text: str) -> None:
        if matcher.is_accepting:
            found.add(text)
        if len(text) < max_len:
            for char, token_id in alphabet.items():
                if matcher.accept(token_id):
                    visit(text + char)
                    matcher.rollback(1)

    visit("")
    return found
