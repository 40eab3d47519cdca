"""Constraints that come without the language's checks are refused for lone surrogates, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.lang.errors import ConstraintError
from umbel.runtime.grammar import GrammarCompiler

from .vocabularies import byte_vocabulary


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_vocabulary())
    yield compiler
    compiler.close()


@pytest.mark.parametrize("engine", [None, "llguidance", "umbel-dfa"])
@pytest.mark.parametrize(
    ("constraint", "where"),
    [
        (Choices(("a", "b\ud800")), "position 1"),
        (Regex("a|\ud800"), "position 2"),
        (JsonSchema('{"enum": ["a", "\\ud800"]}'), "/enum/1"),
        (JsonSchema('{"const": {"a": ["\\ud800"]}}', strict=False), "/const/a/0"),
        (JsonSchema('{"type": "string", "pattern": "a|\\ud800"}'), "/pattern"),
        (JsonSchema('{"properties": {"\\ud800": {}}}'), "/properties"),
        (Grammar('start: "a"\n  | "\ud800"'), "line 2, column 6"),
        (Grammar('root ::= "a" |\n "\ud800"', "gbnf"), "line 2, column 3"),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_place(
    compiler: GrammarCompiler, constraint: Constraint, where: str, engine: str | None
) -> None:
    with pytest.raises(ConstraintError, match="surrogate") as caught:
        compiler.compile(constraint, engine)
    assert caught.value.where == where
    str(caught.value).encode()


def test_pairs_are_characters(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(JsonSchema('{"enum": ["\\ud83d\\ude00"]}'))
    matcher = grammar.matcher()
    tokens = compiler.vocabulary.encode('"\U0001f600"')
    assert matcher.validate(tokens) == len(tokens)
