"""Random constraints against their oracles: `re` for regexes, jsonschema for schemas."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from umbel.lang.constraints import Choices, JsonSchema, Regex
from umbel.lang.errors import ConstraintError
from umbel.runtime.grammar import ENGINES, GrammarCompiler, validate_after

from .random_schemas import random_instance, random_schema
from .regexes import anchored, random_regex
from .vocabularies import EOS, OTHER_EOS
from .walks import accepts, mask, sentences

MAX_LEN = 8
TEXTS = ["".join(p) for n in range(MAX_LEN + 1) for p in itertools.product("abc", repeat=n)]


@pytest.fixture(scope="module")
def languages() -> list[tuple[str, set[str]]]:
    """Two thousand regexes and the texts up to length 8 that `re` matches."""
    rng = random.Random("two thousand regexes")
    patterns = [anchored(rng, random_regex(rng, rng.randrange(1, 5))) for _ in range(2000)]
    return [(p, set(filter(re.compile(p, re.ASCII).fullmatch, TEXTS))) for p in patterns]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_thousand_random_regexes_mean_what_re_says(
    engine: str, abc: GrammarCompiler, languages: list[tuple[str, set[str]]]
) -> None:
    alphabet = {char: abc.vocabulary.encode(char)[0] for char in "abc"}
    for pattern, language in languages:
        try:
            grammar = abc.compile(Regex(pattern), engine)
        except ConstraintError:
            found = set()  # refused because nothing satisfies it
        else:
            found = sentences(grammar, alphabet, MAX_LEN)
        assert found == language, pattern


@pytest.mark.parametrize("engine", ENGINES)
def test_choices_that_prefix_each_other_are_all_possible(engine: str, abc: GrammarCompiler) -> None:
    rng = random.Random(7)
    alphabet = {char: abc.vocabulary.encode(char)[0] for char in "abc"}
    for _ in range(20):
        choices = tuple(sorted({rng.choice(TEXTS[:121]) for _ in range(rng.randrange(2, 8))}))
        grammar = abc.compile(Choices(choices), engine)
        assert sentences(grammar, alphabet, 6) == set(choices)


@pytest.mark.parametrize("engine", ENGINES)
def test_generated_text_fullmatches(engine: str, abc: GrammarCompiler) -> None:
    """Every allowed token keeps a match; what ends on EOS matches."""
    rng = random.Random(8)
    vocabulary = abc.vocabulary
    for _ in range(40):
        pattern = random_regex(rng, 4)
        try:
            matcher = abc.compile(Regex(pattern), engine).matcher()
        except ConstraintError:
            continue
        data = b""
        for _ in range(30):
            allowed = mask(matcher, vocabulary)
            token_id = rng.choice(sorted(allowed))
            if token_id in (EOS, OTHER_EOS):
                assert re.compile(pattern, re.ASCII).fullmatch(data.decode()), (pattern, data)
                break
            assert matcher.accept(token_id)
            data += vocabulary.token_bytes[token_id]


def check_schemas(compiler: GrammarCompiler, engine: str | None, count: int) -> tuple[int, int]:
    """Return (how many schemas compile, how many valid instances were accepted)."""
    rng = random.Random(f"schemas for {engine}")
    vocabulary = compiler.vocabulary
    num_compiled = num_accepted = 0
    for _ in range(count):
        schema = random_schema(rng, 3)
        constraint = JsonSchema(json.dumps(schema))
        try:
            grammar = compiler.compile(constraint, engine)
        except ConstraintError as error:
            refusal = str(error)
            keywords = (k for k in (*_keywords(schema), "schema", "satisf", "regular form"))
            assert any(k in refusal for k in keywords), refusal
            continue
        num_compiled += 1
        for _ in range(12):
            text = json.dumps(random_instance(rng, schema), ensure_ascii=rng.random() < 0.3)
            try:
                validate_after(constraint, text)
                is_valid = True
            except ConstraintError:
                is_valid = False
            accepted = accepts(grammar, vocabulary.encode(text))
            assert is_valid or not accepted, (schema, text)
            num_accepted += accepted
        generated = _generate(rng, compiler, constraint, engine)
        if generated is not None:
            validate_after(constraint, generated)
    return num_compiled, num_accepted


def _generate(
    rng: random.Random, compiler: GrammarCompiler, constraint: JsonSchema, engine: str | None
) -> str | None:
    """Walk the masks at random, preferring to end; None if that takes too long."""
    matcher = compiler.compile(constraint, engine).matcher()
    data = b""
    for _ in range(300):
        if matcher.is_accepting:
            return data.decode()
        allowed = sorted(mask(matcher, compiler.vocabulary))
        closing = [t for t in allowed if compiler.vocabulary.token_bytes[t] in b'"}],0']
        token_id = rng.choice(closing if closing and rng.random() < 0.6 else allowed)
        assert matcher.accept(token_id)
        data += compiler.vocabulary.token_bytes[token_id]
    return None


def _keywords(schema: object) -> set[str]:
    if isinstance(schema, dict):
        return set(schema).union(*map(_keywords, schema.values()))
    if isinstance(schema, list):
        return set().union(*map(_keywords, schema))
    return set()


@pytest.mark.parametrize("engine", [None, "llguidance", "umbel-dfa"])
def test_no_invalid_value_of_a_random_schema_is_possible(
    engine: str | None, json_compiler: GrammarCompiler
) -> None:
    num_compiled, num_accepted = check_schemas(json_compiler, engine, 80)
    assert num_compiled > 25
    assert num_accepted > 60


@pytest.mark.slow
def test_no_invalid_value_of_five_hundred_random_schemas_is_possible(
    json_compiler: GrammarCompiler,
) -> None:
    num_compiled, num_accepted = check_schemas(json_compiler, None, 500)
    assert num_compiled > 300
    assert num_accepted > 1000
