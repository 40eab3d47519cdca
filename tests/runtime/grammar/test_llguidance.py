"""What llguidance does that no request may notice."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Literal

import llguidance
import numpy as np
import pytest

from umbel.lang.errors import ConstraintError
from umbel.runtime.grammar.llguidance import (
    GrammarKind,
    LLGuidanceGrammar,
    LLGuidanceTokenizers,
    compile_llguidance,
)
from umbel.runtime.grammar.llguidance_words import grammar_error
from umbel.runtime.vocabulary import Vocabulary

from .vocabularies import EOS, OTHER_EOS, abc_vocabulary, byte_vocabulary, json_vocabulary
from .walks import accepts, mask

RECURSIVE = json.dumps(
    {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"}
)


@pytest.fixture(scope="module")
def tokenizers() -> LLGuidanceTokenizers:
    return LLGuidanceTokenizers(json_vocabulary())


def small_lexer(tokenizers: LLGuidanceTokenizers) -> LLGuidanceGrammar:
    """A grammar whose lexer is full after some tens of different tokens."""
    limits = llguidance.LLParserLimits(max_lexer_states=60)
    return compile_llguidance(tokenizers, "regex", "([a-z]{1,9}[0-9]{1,9}){1,30}", limits=limits)


def fill_up(grammar: LLGuidanceGrammar, vocabulary: Vocabulary, seed: int) -> int:
    """Walk at random until the lexer is full; return the tokens taken until then."""
    rng = random.Random(seed)
    matcher = grammar.matcher()
    for count in range(300):
        try:
            text = sorted(mask(matcher, vocabulary) - {EOS, OTHER_EOS})
        except ConstraintError:
            return -1
        if not text:
            return count
        assert matcher.accept(rng.choice(text))
    return 300


def test_a_request_that_fills_the_lexer_fails_alone(tokenizers: LLGuidanceTokenizers) -> None:
    grammar = small_lexer(tokenizers)
    vocabulary = tokenizers.vocabulary
    sibling = grammar.matcher()
    for token_id in vocabulary.encode("ab1"):
        assert sibling.accept(token_id)
    before = mask(sibling, vocabulary)
    assert -1 in [fill_up(grammar, vocabulary, seed) for seed in range(5)]
    # a request that shared the full lexer goes on from where it was, and new ones start afresh
    assert mask(sibling, vocabulary) == before
    assert sibling.accept(vocabulary.encode("c")[0])
    sibling.rollback(2)
    assert accepts(grammar, vocabulary.encode("x12"))


def test_forced_text_is_encoded_once_for_all_who_meet_it() -> None:
    asked: list[str] = []
    plain = json_vocabulary()

    def encode(text: str) -> list[int]:
        asked.append(text)
        return plain.encode(text)

    tokenizers = LLGuidanceTokenizers(dataclasses.replace(plain, encode=encode))
    grammar = compile_llguidance(tokenizers, "regex", "long forced text, [0-9]{1,3} and more")
    ids = plain.encode("long forced text, 12 and more")
    masks = []
    for _ in range(3):
        matcher = grammar.matcher()
        masks.append([mask(matcher, plain) for i in ids if matcher.accept(i)])
    assert masks[0] == masks[1] == masks[2]
    assert len(asked) == len(set(asked)) > 10


def test_an_illegal_token_breaks_nothing(tokenizers: LLGuidanceTokenizers) -> None:
    grammar = compile_llguidance(tokenizers, "json_schema", RECURSIVE)
    vocabulary = tokenizers.vocabulary
    matcher = grammar.matcher()
    start = mask(matcher, vocabulary)
    for token_id in range(-2, vocabulary.size + 2):
        if token_id not in start:
            assert not matcher.accept(token_id)
            assert matcher.validate([token_id]) == 0
    assert mask(matcher, vocabulary) == start
    assert matcher.accept(vocabulary.encode("[")[0])


def test_taking_back_from_a_finished_text_takes_back_text(
    tokenizers: LLGuidanceTokenizers,
) -> None:
    grammar = compile_llguidance(tokenizers, "regex", "ab")
    vocabulary = tokenizers.vocabulary
    matcher = grammar.matcher()
    first, second = vocabulary.encode("a")[0], vocabulary.encode("b")[0]
    assert matcher.accept(first)
    assert matcher.accept(second)
    assert matcher.is_finished
    assert mask(matcher, vocabulary) == {EOS, OTHER_EOS}
    assert not matcher.accept(EOS)
    assert not matcher.accept(first)
    matcher.rollback(1)
    assert not matcher.is_finished
    assert matcher.validate([second]) == 1
    assert matcher.validate([first]) == 0


def test_white_space_is_bounded(tokenizers: LLGuidanceTokenizers) -> None:
    grammar = compile_llguidance(tokenizers, "json_schema", RECURSIVE)
    encode = tokenizers.vocabulary.encode
    assert accepts(grammar, encode("[" + " " * 8 + "[]]"))
    assert not accepts(grammar, encode("[" + " " * 9 + "[]]"))


def test_unicode_escapes_are_allowed(tokenizers: LLGuidanceTokenizers) -> None:
    grammar = compile_llguidance(tokenizers, "json_schema", '{"type": "string", "maxLength": 1}')
    encode = tokenizers.vocabulary.encode
    for text in ('"\\u00e9"', '"\\ud83d\\ude00"', '"\\n"', '"é"'):
        assert accepts(grammar, encode(text)), text
    assert not accepts(grammar, encode('"\\u00e9b"'))


def test_a_row_used_again_holds_what_a_fresh_one_would(tokenizers: LLGuidanceTokenizers) -> None:
    grammar = compile_llguidance(tokenizers, "json_schema", RECURSIVE)
    vocabulary = tokenizers.vocabulary
    matcher = grammar.matcher()
    rows = np.zeros((3, (vocabulary.size + 31) // 32), np.int32)
    views = list(rows)
    for step, token_id in enumerate(vocabulary.encode("[[], [[]], [" + " " * 5 + "[]]]")):
        view = views[step // 2 % 2]  # two steps in a row, then two in the other one
        view.fill(-1)
        matcher.fill(view)
        fresh = np.full_like(view, -1)
        matcher.fork().fill(fresh)
        assert view.tolist() == fresh.tolist()
        assert matcher.accept(token_id)
    assert not rows[2].any()
    matcher.fill(views[2])
    assert rows[2].tolist() == [0b11, *[0] * (rows.shape[1] - 1)]  # the two ids of EOS
    with pytest.raises(ValueError, match="contiguous"):
        matcher.fill(np.zeros(2 * rows.shape[1], np.int32)[::2])


def test_a_text_that_no_token_continues_ends_alone_and_says_so() -> None:
    vocabulary = abc_vocabulary()
    grammar = compile_llguidance(LLGuidanceTokenizers(vocabulary), "regex", "a[xy]|bc|ccc?")
    (a,), (b,), (c,) = (vocabulary.encode(letter) for letter in "abc")
    matcher, sibling = grammar.matcher(), grammar.matcher()
    before, prototype = mask(sibling, vocabulary), grammar.copy()[1]
    assert matcher.accept(a)
    for _ in range(2):
        with pytest.raises(ConstraintError, match="no token of the model continues"):
            mask(matcher, vocabulary)
    assert mask(sibling, vocabulary) == before
    assert grammar.copy()[1] is prototype
    matcher.rollback(1)
    assert mask(matcher, vocabulary) == before
    assert matcher.accept(b)
    assert c in mask(matcher, vocabulary)


@pytest.mark.parametrize("eos_id", [0, 30, 31, 32, 63])
def test_eos_is_allowed_where_the_text_may_end_at_any_bit_of_a_word(eos_id: int) -> None:
    letters = [bytes([i]) for i in range(97, 123)]
    token_bytes = [*letters, *[b""] * 38]
    token_bytes.insert(eos_id, b"")
    ids = {data.decode(): i for i, data in enumerate(token_bytes) if data}
    vocabulary = Vocabulary(
        tuple(token_bytes),
        frozenset({eos_id}),
        (eos_id,),
        len(token_bytes),
        lambda text: [ids[letter] for letter in text],
    )
    # in turn: a choice and no end, an end and a choice, an end alone
    grammar = compile_llguidance(LLGuidanceTokenizers(vocabulary), "regex", "[ab][cd]?")
    matcher = grammar.matcher()
    assert mask(matcher, vocabulary) == {ids["a"], ids["b"]}
    assert matcher.accept(ids["a"])
    assert mask(matcher, vocabulary) == {ids["c"], ids["d"], eos_id}
    assert matcher.accept(ids["c"])
    assert mask(matcher, vocabulary) == {eos_id}


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_a_long_token_is_allowed_where_the_string_has_room_for_all_of_it(
    kind: Literal["json_schema", "regex"],
) -> None:
    lengths = (10, 11, 30, 31, 127, 128, 129, 200)
    vocabulary = byte_vocabulary(*("-" * length for length in lengths))
    tokenizers = LLGuidanceTokenizers(vocabulary)
    longer = {vocabulary.encode("-" * length)[0]: length for length in lengths}
    assert len(longer) == len(lengths)
    for limit in (9, 10, 11, 30, 31, 127, 128, 129, 130, 199, 200, 201, 400):
        schema = json.dumps({"type": "string", "maxLength": limit})
        text = schema if kind == "json_schema" else f'"[^"]{{0,{limit}}}"'
        matcher = compile_llguidance(tokenizers, kind, text).matcher()
        assert matcher.accept(vocabulary.encode('"')[0])
        allowed = {longer[i] for i in mask(matcher, vocabulary) & set(longer)}
        assert allowed == {length for length in lengths if length <= limit}


def test_a_thousand_optional_keys_work(tokenizers: LLGuidanceTokenizers) -> None:
    schema = {"type": "object", "properties": {f"k{i}": {"type": "null"} for i in range(1000)},
              "additionalProperties": False}  # fmt: skip
    grammar = compile_llguidance(tokenizers, "json_schema", json.dumps(schema))
    encode = tokenizers.vocabulary.encode
    assert accepts(grammar, encode('{"k3": null, "k998": null}'))
    assert not accepts(grammar, encode('{"k3": null, "k1000": null}'))


def test_an_error_at_the_first_mask_is_one_of_compiling(tokenizers: LLGuidanceTokenizers) -> None:
    limits = llguidance.LLParserLimits(step_lexer_fuel=10)
    with pytest.raises(ConstraintError, match="too complex"):
        compile_llguidance(tokenizers, "regex", "([a-z]{1,9}[0-9]){1,30}", limits=limits)


def test_a_model_without_eos_takes_no_constraints() -> None:
    plain = byte_vocabulary()
    vocabulary = Vocabulary(plain.token_bytes, plain.special_ids, (), plain.size, plain.encode)
    with pytest.raises(ConstraintError, match="no end-of-sequence token"):
        LLGuidanceTokenizers(vocabulary)


def test_an_ambiguous_grammar_ends_its_own_request_before_steps_take_long(
    tokenizers: LLGuidanceTokenizers,
) -> None:
    compiled = compile_llguidance(tokenizers, "lark", 'start: start start | "a" |')
    (token_id,) = tokenizers.vocabulary.encode("a")

    def follow(num_tokens: int) -> None:
        matcher = compiled.matcher()
        for _ in range(num_tokens):
            assert token_id in mask(matcher, tokenizers.vocabulary)
            assert matcher.accept(token_id)

    with pytest.raises(ConstraintError, match="too complex to follow"):
        follow(600)
    follow(20)  # the next request begins anew


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ('start: "a', "line 1, column 10", "lexer error"),
        ('start: %json {"oneOf": [{"type": "integer"}, {"type": "number"}]}', "line 1, column 8",
         "`oneOf` can't be followed"),
    ],
)  # fmt: skip
def test_a_grammars_errors_are_placed_and_name_no_option_of_llguidance(
    text: str, where: str, words: str, tokenizers: LLGuidanceTokenizers
) -> None:
    with pytest.raises(ConstraintError, match=words) as caught:
        compile_llguidance(tokenizers, "lark", text)
    assert caught.value.where == where
    assert "coerce" not in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        "initial lexer configuration (grammar) too big (limit for this grammar: 5000000)",
        "grammar size (number of symbols) too big (limit for this grammar: 1000000)",
    ],
)
def test_a_limit_of_llguidance_is_said_as_what_to_do(message: str) -> None:
    assert "simplify it" in str(grammar_error(message))
    assert "limit" not in str(grammar_error(message))


@pytest.mark.parametrize(
    ("kind", "text", "start"),
    [
        ("regex", "a{5000}b?", ""),
        ("regex", "[ab]a{5000}", "b"),
        ("lark", 'start: ("b" | "c") part{2500}\npart: "aa"', "b"),
        ("json_schema", json.dumps({"const": "a" * 5000}), ""),
        ("json_schema", json.dumps({"enum": ["a" * 5000, "b" * 5000]}), '"b'),
    ],
)
def test_text_forced_without_end_is_looked_through_once(
    tokenizers: LLGuidanceTokenizers, kind: GrammarKind, text: str, start: str
) -> None:
    """It is not jumped over then: each mask allows its next character, and nothing else."""
    vocabulary = tokenizers.vocabulary
    matcher = compile_llguidance(tokenizers, kind, text).matcher()
    for byte in start.encode():
        assert matcher.accept(vocabulary.token_bytes.index(bytes([byte])))
    forced = matcher.forced()  # all of it, where it was not known before
    assert forced == [] if not start else len(forced) > 2000
    assert matcher.forced() == []
    for _ in range(3):
        allowed = mask(matcher, vocabulary)
        letters = {vocabulary.token_bytes[i][:1] for i in allowed}
        assert len(letters) == 1
        assert matcher.accept(min(allowed))
        assert matcher.forced() == []
