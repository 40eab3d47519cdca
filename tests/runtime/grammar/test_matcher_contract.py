"""Every engine keeps the contract of GrammarMatcher, on the same constraints."""

from __future__ import annotations

import json
import random

import pytest

from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.lang.errors import ConstraintError
from umbel.runtime.grammar import ENGINES, CompiledGrammar, GrammarCompiler

from .vocabularies import EOS, NUM_SPECIAL, OTHER_EOS, SPECIAL
from .walks import mask

CONSTRAINTS: list[Constraint] = [
    Regex(r"[a-z]{2,5}(-[0-9]{1,3})?"),
    Regex(r"(foo|foobar|)"),
    Regex("é+日本.{0,2}"),
    Choices(("red", "green", "name", "names")),
    JsonSchema(
        json.dumps(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 6},
                    "age": {"type": "integer", "minimum": 0, "maximum": 130},
                    "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            }
        )
    ),
    JsonSchema('{"type": ["number", "null", "boolean"]}'),
]
CFG = Grammar('root ::= "[" (root ("," root)*)? "]" | [0-9]{1,2}', "gbnf")
PAIRS = [(e, c) for e in ENGINES for c in CONSTRAINTS] + [("llguidance", CFG)]


@pytest.fixture(params=PAIRS, ids=lambda p: f"{p[0]}-{type(p[1]).__name__}")
def grammar(request: pytest.FixtureRequest, json_compiler: GrammarCompiler) -> CompiledGrammar:
    engine, constraint = request.param
    compiled = json_compiler.compile(constraint, engine)
    assert compiled.engine == engine
    assert compiled.num_bytes > 0
    return compiled


def test_random_walks_keep_the_contract(
    grammar: CompiledGrammar, json_compiler: GrammarCompiler
) -> None:
    vocabulary = json_compiler.vocabulary
    eos = {EOS, OTHER_EOS}
    for seed in range(6):
        rng = random.Random(seed)
        matcher = grammar.matcher()
        masks = [mask(matcher, vocabulary)]
        tokens: list[int] = []
        for _ in range(25):
            allowed = masks[-1]
            # EOS exactly where the value is complete; nothing that isn't text
            assert (eos <= allowed) == matcher.is_accepting
            assert (eos & allowed == eos) or not eos & allowed
            assert SPECIAL not in allowed
            assert max(allowed) < len(vocabulary.token_bytes)
            assert matcher.is_finished == (allowed == eos)
            for token_id in (EOS, SPECIAL, vocabulary.size - 1, vocabulary.size + 7, -1):
                assert not matcher.accept(token_id)
            forced = matcher.forced()
            text = allowed - eos
            if forced:
                assert text == {forced[0]}
                assert not matcher.is_accepting
            if not text:
                break
            for token_id in rng.sample(range(NUM_SPECIAL, len(vocabulary.token_bytes)), 40):
                # accepting may allow more than the mask (other spellings of forced text)
                can = matcher.validate([token_id]) == 1
                assert can or token_id not in text
                assert can == (token_id in text) or forced
            token_id = rng.choice(sorted(text))
            assert matcher.accept(token_id)
            tokens.append(token_id)
            masks.append(mask(matcher, vocabulary))
        assert matcher.validate([]) == 0
        # a fork goes its own way; taking back leads to the same masks, step by step
        fork = matcher.fork()
        for taken in range(1, len(tokens) + 1):
            matcher.rollback(1)
            assert mask(matcher, vocabulary) == masks[len(tokens) - taken]
        assert mask(fork, vocabulary) == masks[-1]
        assert matcher.validate(tokens) == len(tokens)
        assert matcher.validate([*tokens[:3], SPECIAL, *tokens[3:]]) == min(3, len(tokens))
        assert mask(matcher, vocabulary) == masks[0]
        assert all(matcher.accept(t) for t in tokens)
        assert mask(matcher, vocabulary) == masks[-1]
        fork.rollback(len(tokens))
        assert mask(fork, vocabulary) == masks[0]
        with pytest.raises(ValueError, match="take back"):
            fork.rollback(1)


def test_forced_tokens_follow_the_masks(
    grammar: CompiledGrammar, json_compiler: GrammarCompiler
) -> None:
    vocabulary = json_compiler.vocabulary
    for seed in range(4):
        rng = random.Random(seed)
        matcher = grammar.matcher()
        for _ in range(25):
            forced = matcher.forced()
            assert matcher.validate(forced) == len(forced)
            for token_id in forced:
                assert mask(matcher, vocabulary) == {token_id}
                assert matcher.accept(token_id)
            allowed = sorted(mask(matcher, vocabulary) - {EOS, OTHER_EOS})
            if not allowed:
                break
            assert matcher.accept(rng.choice(allowed))


@pytest.mark.parametrize("engine", ENGINES)
def test_matchers_of_one_grammar_are_independent(
    engine: str, json_compiler: GrammarCompiler
) -> None:
    grammar = json_compiler.compile(Regex("[a-c]{3}"), engine)
    vocabulary = json_compiler.vocabulary
    first, second = grammar.matcher(), grammar.matcher()
    before = mask(second, vocabulary)
    for token_id in vocabulary.encode("abc"):
        assert first.accept(token_id)
    assert first.is_finished
    assert mask(second, vocabulary) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_a_constraint_that_nothing_satisfies_is_refused(
    engine: str, json_compiler: GrammarCompiler
) -> None:
    with pytest.raises(ConstraintError):
        json_compiler.compile(JsonSchema('{"type": "string", "enum": [1]}'), engine)
    with pytest.raises(ConstraintError):
        json_compiler.compile(Regex(r"a[^\s\S]"), engine)
