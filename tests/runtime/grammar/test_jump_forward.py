"""Jumping over forced text changes no token, and the forced tokens are the tokenizer's own."""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import pytest

from umbel.lang.constraints import Constraint, Grammar, JsonSchema, Regex
from umbel.runtime.grammar import ENGINES, CompiledGrammar, GrammarCompiler
from umbel.runtime.vocabulary import Vocabulary

FIXED = {
    "type": "object",
    "properties": {
        "severity": {"enum": ["low", "high"]},
        "affected_component": {"enum": ["database", "frontend"]},
        "needs_attention": {"type": "boolean"},
        "priority": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["severity", "affected_component", "needs_attention", "priority"],
    "additionalProperties": False,
}
CONSTRAINTS: list[Constraint] = [
    JsonSchema(json.dumps(FIXED)),
    Regex(r"The answer is (yes|no), because of [a-z]{3,9}\."),
    Regex(r"naïve café (日本|日曜)語!{0,2}"),
    Regex(r"[0-9]{2}:[0-9]{2} o'clock( sharp)?"),
]
CFG = Grammar('root ::= "call(" (root | [0-9]{1,3}) ") # done"', "gbnf")
PAIRS = [(e, c) for e in ENGINES for c in CONSTRAINTS] + [("llguidance", CFG)]


@pytest.fixture(params=PAIRS, ids=lambda p: f"{p[0]}-{type(p[1]).__name__}")
def grammar(request: pytest.FixtureRequest, smollm2: GrammarCompiler) -> CompiledGrammar:
    engine, constraint = request.param
    return smollm2.compile(constraint, engine)


def greedy(
    grammar: CompiledGrammar, vocabulary: Vocabulary, seed: int, *, jump: bool
) -> tuple[list[int], int]:
    """Return (tokens, forced ones among them) by logits that depend on the tokens before."""
    matcher = grammar.matcher()
    row = np.zeros((vocabulary.size + 31) // 32, np.int32)
    tokens: list[int] = []
    num_forced = 0
    while len(tokens) < 120:
        forced = matcher.forced() if jump else []
        for token_id in forced:
            assert matcher.accept(token_id)
        tokens += forced
        num_forced += len(forced)
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        key = hashlib.blake2b(f"{seed} {tokens}".encode(), digest_size=8).digest()
        logits = np.random.default_rng(int.from_bytes(key)).random(vocabulary.size)
        best = int(allowed[logits[allowed].argmax()])
        if best in vocabulary.eos_ids:
            break
        assert matcher.accept(best)
        tokens.append(best)
    return tokens, num_forced


def test_greedy_tokens_are_the_same_with_and_without_jumping(
    grammar: CompiledGrammar, smollm2: GrammarCompiler
) -> None:
    for seed in range(4):
        with_jumps, num_forced = greedy(grammar, smollm2.vocabulary, seed, jump=True)
        without, none = greedy(grammar, smollm2.vocabulary, seed, jump=False)
        assert with_jumps == without
        assert none == 0
        assert num_forced > 0 or grammar.engine == "outlines-core"


@pytest.mark.parametrize("engine", ["llguidance", "umbel-dfa"])
def test_text_that_is_forced_as_a_whole_is_encoded_as_a_whole(
    engine: str, smollm2: GrammarCompiler
) -> None:
    """Only the end may be left open, where a longer token could follow."""
    vocabulary = smollm2.vocabulary
    texts = [
        '{"affected_component": ',
        "The quick brown fox",
        "naïve café",
        "日本語 text",
        "x = 10;\n",
    ]
    for text in texts:
        escaped = "".join(f"\\U{ord(c):08x}" for c in text)
        grammar = smollm2.compile(Regex(f"{escaped}[a-z]*"), engine)
        forced = grammar.matcher().forced()
        wanted = vocabulary.encode(text)
        assert forced == wanted[: len(forced)]
        assert len(forced) >= len(wanted) - 2
        closed = smollm2.compile(Regex(escaped), engine)
        assert closed.matcher().forced() == wanted


def test_the_token_before_a_choice_is_left_open(smollm2: GrammarCompiler) -> None:
    """`name` may become `names`: the model chooses whether it is one token."""
    vocabulary = smollm2.vocabulary
    grammar = smollm2.compile(Regex(" (name|names)"))
    assert grammar.engine == "umbel-dfa"
    first = set(vocabulary.encode(" name") + vocabulary.encode(" names"))
    assert len(first) == 2
    matcher = grammar.matcher()
    assert matcher.forced() == []
    for token_id in first:
        assert matcher.validate([token_id]) == 1


def test_a_large_share_of_fixed_json_is_forced(smollm2: GrammarCompiler) -> None:
    rng = random.Random(0)
    grammar = smollm2.compile(JsonSchema(json.dumps(FIXED)))
    total = forced = 0
    for _ in range(5):
        tokens, num_forced = greedy(grammar, smollm2.vocabulary, rng.randrange(99), jump=True)
        total += len(tokens)
        forced += num_forced
    assert forced / total > 0.3
