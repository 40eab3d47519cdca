"""What a primitive refuses on its own line, and what it makes."""

from __future__ import annotations

from typing import Any

import pytest

import umbel as ub
from umbel.lang.constraints import Choices, Grammar, JsonSchema, Regex
from umbel.lang.ir import Gen
from umbel.lang.regex_check import check_regex


def made(expr: ub.GenExpr[Any]) -> Gen:
    return expr.op(None)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (dict.fromkeys(range(1000), 0.5) | {7: "much"}, "7: 'much'"),
        (dict.fromkeys(range(1000), 0.5) | {"a": 1.0}, "'a': 1.0"),
        ([0.5] * 1000, "list"),
        (3, "int"),
    ],
)
def test_of_a_table_of_biases_the_entry_that_is_none_alone_is_named(value: Any, told: str) -> None:
    with pytest.raises(TypeError) as caught:
        ub.gen("x", logit_bias=value)
    assert str(caught.value) == f"logit_bias takes a dict of token ids and numbers, not {told}"


def test_gen_keeps_every_option_it_is_given() -> None:
    options: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 7,
        "ignore_eos": True,
        "prompt_logprobs": True,
    }
    gen = made(
        ub.gen(
            "x",
            n=2,
            heal=True,
            timeout=1.5,
            stop="a",
            stop_token_ids=[4, 5],
            stop_regex=["b+"],
            logit_bias={9: 1.0, 3: -2.0},
            top_logprobs=2,
            **options,
        )
    )
    assert (gen.name, gen.n, gen.heal, gen.timeout) == ("x", 2, True, 1.5)
    sampling = gen.sampling
    assert {key: getattr(sampling, key) for key in options} == options
    assert sampling.stop == ("a",)
    assert sampling.stop_token_ids == (4, 5)
    assert sampling.stop_regex == ("b+",)
    assert sampling.logit_bias == ((3, -2.0), (9, 1.0))
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 2)


def test_rule_10b_a_gen_says_that_it_thinks_and_for_how_long() -> None:
    assert not made(ub.gen("x")).thinking
    gen = made(ub.gen("x", thinking=True))
    assert (gen.thinking, gen.max_thinking_tokens) == (True, 1024)
    assert made(ub.gen(thinking=True, max_thinking_tokens=9)).max_thinking_tokens == 9
    with pytest.raises(ValueError, match="can't be combined"):
        ub.gen(thinking=True, heal=True)
    with pytest.raises(ValueError, match="needs thinking=True"):
        ub.gen(max_thinking_tokens=9)
    with pytest.raises(ValueError, match="at least 1"):
        ub.gen(thinking=True, max_thinking_tokens=0)
    with pytest.raises(TypeError, match="whole number"):
        ub.gen(thinking=True, max_thinking_tokens=True)


def test_rule_4_what_a_gen_says_wins_over_the_programs_defaults() -> None:
    defaults = ub.SamplingParams(temperature=0.7, max_tokens=50, stop=("x",))
    gen = ub.gen("a", max_tokens=5).op(defaults)
    assert gen.sampling == ub.SamplingParams(temperature=0.7, max_tokens=5, stop=("x",))
    assert ub.gen("a", temperature=0.0).op(defaults).sampling.temperature == 0.0


def test_rule_1_defaults_that_contradict_a_gen_are_refused() -> None:
    wants_many = ub.gen("a", min_tokens=200)
    assert wants_many.op(ub.SamplingParams(max_tokens=300)).sampling.min_tokens == 200
    with pytest.raises(ValueError, match="min_tokens must be from 0 to max_tokens"):
        wants_many.op(ub.SamplingParams(max_tokens=100))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"name": 3}, TypeError, "name is a string"),
        ({"name": ""}, ValueError, "must not be empty"),
        ({"n": 0}, ValueError, "n must be at least 1"),
        ({"n": "2"}, TypeError, "n must be a whole number"),
        ({"n": True}, TypeError, "n must be a whole number"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1"),
        ({"max_tokens": 2.5}, TypeError, "max_tokens must be a whole number"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number"),
        ({"temperature": -1}, ValueError, "temperature must be 0 or more"),
        ({"top_p": 0}, ValueError, "top_p"),
        ({"stop": ""}, ValueError, "stop must be strings that are not empty"),
        ({"stop": ["a", ""]}, ValueError, "stop must be strings that are not empty"),
        ({"stop": [1]}, TypeError, "stop takes str values"),
        ({"stop_regex": "("}, ub.ConstraintError, "position 0"),
        ({"stop_regex": ""}, ValueError, "stop_regex must be patterns that are not empty"),
        ({"stop_token_ids": ["x"]}, TypeError, "stop_token_ids takes int values"),
        ({"timeout": 0}, ValueError, "timeout must be above 0"),
        ({"timeout": float("inf")}, ValueError, r"at most 1e\+09, not inf: None is no limit"),
        ({"timeout": float("nan")}, ValueError, "timeout must be above 0"),
        ({"unheard_of": 1}, TypeError, "no option 'unheard_of'"),
        ({"regex": 3}, TypeError, "regex is a string"),
        ({"choices": []}, ub.ConstraintError, "choices is empty"),
        ({"choices": "ab"}, TypeError, "takes a list of strings"),
        ({"choices": ["a", 1]}, TypeError, "a choice is a string"),
        ({"choices": ["a", "b", "a"]}, ub.ConstraintError, "'a' more than once"),
        ({"grammar": " "}, ub.ConstraintError, "grammar is empty"),
        ({"grammar": 3}, TypeError, "grammar is text"),
        ({"schema": "{not json"}, ub.ConstraintError, "schema is not JSON"),
        ({"schema": '{"type": "string", "type": 1}'}, ub.ConstraintError, "duplicate key 'type'"),
        ({"schema": "[1]"}, ub.ConstraintError, "is an object, not list"),
        ({"schema": False}, ub.ConstraintError, "no value satisfies"),
        ({"schema": {"const": {1, 2}}}, ub.ConstraintError, "can't be written as JSON"),
        ({"schema": 7}, ub.ConstraintError, "not 7"),
        ({"dtype": "int"}, TypeError, "dtype takes a type"),
        ({"regex": "a", "schema": int}, ub.ConstraintError, "schema and regex can't be combined"),
    ],
)
def test_rule_1_gen_refuses_on_its_line(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        ub.gen(**options)


@pytest.mark.parametrize("choices", [[], ()])
def test_case_17_no_choices_are_refused_through_either_spelling(choices: Any) -> None:
    with pytest.raises(ValueError, match="nothing to choose from"):
        ub.select("x", choices)
    with pytest.raises(ValueError, match="nothing to choose from"):
        ub.gen("x", choices=choices)


def test_case_18_duplicate_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="'b' more than once"):
        ub.select("x", ["a", "b", "b"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "best"}, "method 'best' is unknown"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"terminator": ""}, "terminator must not be empty"),
        ({"timeout": -1}, "timeout must be above 0"),
    ],
)
def test_rule_1_select_refuses_on_its_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ub.select("x", ["a", "b"], **options)


@pytest.mark.parametrize(
    ("pattern", "construct", "position"),
    [
        (r"a(?=b)", "a look-ahead", 1),
        (r"a(?!b)", "a negative look-ahead", 1),
        (r"(?<=a)b", "a look-behind", 0),
        (r"(?<!a)b", "a negative look-behind", 0),
        (r"(a)\1", "a back-reference", 3),
        (r"(?P<x>a)(?P=x)", "a back-reference", 8),
        (r"(a)?(?(1)b|c)", "a conditional group", 4),
        (r"(?>a)", "an atomic group", 0),
        (r"ab++", "a possessive quantifier", 2),
        (r"a{2}+", "a possessive quantifier", 1),
    ],
)
def test_case_28_irregular_constructs_are_named_with_their_place(
    pattern: str, construct: str, position: int
) -> None:
    with pytest.raises(ub.ConstraintError, match=construct) as caught:
        ub.gen("x", regex=pattern)
    assert caught.value.where == f"position {position}"


@pytest.mark.parametrize(
    ("pattern", "construct", "position", "hint"),
    [
        ("(?i)ab", "a flag", 0, "[Aa]"),
        ("a(?x: b)", "a flag", 1, "without blanks"),
        ("(?s).", "a flag", 0, r"[\s\S]"),
        ("(?-i:a)", "a flag", 0, "[Aa]"),
        (r"a\b", "a word boundary", 1, "which characters"),
        (r"\\\Ba", "a word boundary", 2, "which characters"),
        (r"a\p{Lu}", "a Unicode property", 1, "[A-Z]"),
        (r"[a\P{Lu}]", "a Unicode property", 2, "[^A-Z]"),
        (r"\N{DASH}", "a character's name", 0, "the character itself"),
        ("[[:alpha:]]+", "a POSIX class", 1, "A-Za-z"),
        ("a[:alpha:]+", "a POSIX class", 1, "write [A-Za-z]"),
        ("[^_[:xdigit:]]+", "a POSIX class", 3, "0-9A-Fa-f"),
        ("[[a-z]]", "a class in a class", 1, r"\["),
        ("a[a-z&&b]", "an operation on classes", 5, r"\&"),
        ("[a--b]", "an operation on classes", 2, r"\-"),
        ("[a||b]", "an operation on classes", 2, r"\|"),
        ("a{3,", "a repeat that is none", 1, r"\{"),
        ("a{3", "a repeat that is none", 1, r"\{"),
        ("a{1, 3}", "a repeat that is none", 1, "without blanks"),
        ("a{1,2,3}", "a repeat that is none", 1, r"\{"),
    ],
)
def test_rule_1_what_no_engine_takes_is_named_with_what_to_write(
    pattern: str, construct: str, position: int, hint: str
) -> None:
    with pytest.raises(ub.ConstraintError, match=construct) as caught:
        ub.gen("x", regex=pattern)
    assert caught.value.where == f"position {position}"
    assert hint in str(caught.value)


@pytest.mark.parametrize("pattern", ["(?i)end", r"\bend\b", "(?s:a.b)", "a{3,"])
def test_a_stop_is_searched_for_and_may_hold_flags_and_borders(pattern: str) -> None:
    ub.gen("x", stop_regex=pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d+",
        r"",
        r"[\b]\x41[a[:]|[-&~|]|[--a]|[]-]?",
        '{"a": [0-9]{2}, "b": {}}{,}',
        r"a{2}b{2,}c{2,3}d{,3}",
        r"(?:a|b)?",
        r"(?P<x>a)",
        r"[(?=]+",
        r"[]\1-9]",
        r"[^]a]*\(\?=",
        r"\\1",
        r"\101",
        r"(?#(?=)x",
        r"a\++",
        r"}+",
    ],
)
def test_regular_patterns_that_look_irregular_are_taken(pattern: str) -> None:
    check_regex(pattern)
    assert made(ub.gen("x", regex=pattern)).constraint == Regex(pattern)


def test_constraints_are_kept_as_data() -> None:
    assert made(ub.gen("x", choices=["a", "b"])).constraint == Choices(("a", "b"))
    assert made(ub.gen("x", grammar='start: "A"')).constraint == Grammar('start: "A"', "lark")
    assert made(ub.gen("x", grammar='root ::= "a"')).constraint == Grammar('root ::= "a"', "gbnf")
    assert made(ub.gen("x", schema='{"type": "null"}')).constraint == JsonSchema('{"type": "null"}')
    assert made(ub.gen("x")).constraint is None


def test_case_3_an_expression_adds_only_to_text_and_expressions() -> None:
    with pytest.raises(TypeError):
        ub.gen("x") + 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        3 + ub.gen("x")  # type: ignore[operator]
    with pytest.raises(TypeError, match="a turn holds a string"):
        ub.user(None)  # type: ignore[arg-type]


def test_case_30_an_expression_never_turns_into_text() -> None:
    for make in (str, "{}".format, lambda e: f"{e}"):
        with pytest.raises(ub.ProgramError, match="has no text yet"):
            make(ub.gen("x"))
    assert repr("a" + ub.gen("x") + ub.select("y", ["b"])) == "'a' + gen('x') + select('y')"


def test_images_are_reserved() -> None:
    with pytest.raises(ub.ProgramError, match="images are not supported yet"):
        ub.image("cat.png")
