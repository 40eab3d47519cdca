"""Constrained generation: compiled grammars, matchers, and the batch's bitmask."""

from .after_validation import validate_after
from .bitmask import TokenBitmask
from .compiler import ENGINES, GrammarCompiler
from .matcher import BitmaskRow, CompiledGrammar, GrammarMatcher

__all__ = [
    "ENGINES",
    "BitmaskRow",
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarMatcher",
    "TokenBitmask",
    "validate_after",
]
