"""Constrained generation: compiled grammars, matchers, and the batch's bitmask."""

from .bitmask import TokenBitmask
from .compiler import ENGINES, GrammarCompiler
from .json_schema import validate_after
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
