"""Schemas as regexes: which ones, and exactly which texts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.lang import regex_syntax as rx
from umbel.lang.errors import ConstraintError
from umbel.runtime.grammar.byte_dfa import Budget, ByteDFA, build_dfa
from umbel.runtime.grammar.json_schema import check_schema
from umbel.runtime.grammar.json_to_regex import json_to_regex


def automaton(schema: Any) -> ByteDFA:
    node = json_to_regex(check_schema(json.dumps(schema)))
    assert node is not None
    return build_dfa(node, Budget())


def matches(schema: Any, text: str) -> bool:
    return automaton(schema).matches(text.encode())


@given(st.text(max_size=6), st.integers(0, 6), st.integers(0, 6), st.booleans())
def test_a_string_counts_code_points_however_they_are_written(
    value: str, low: int, more: int, ascii_only: bool
) -> None:
    schema = {"type": "string", "minLength": low, "maxLength": low + more}
    text = json.dumps(value, ensure_ascii=ascii_only)
    is_sound = not any(0xD800 <= ord(c) <= 0xDFFF for c in value)
    data = text.encode(errors="surrogatepass")
    assert automaton(schema).matches(data) == (is_sound and low <= len(value) <= low + more)


@pytest.mark.parametrize(
    "text",
    ['"\\u12G4"', '"\\x41"', "", '"a\nb"', '"', '""', '"\\ud83d"', '"\\ude00\\ud83d"', '"\\u00"',
     '"\\/"', '"\x7f"', '"\\b\\f"', "'a'",
     '"\\ud83d\\ude00"', '"\\uD83D\\uDE00"', '"\\"', '"\\\\"'],
)  # fmt: skip
def test_strings_are_those_of_json(text: str) -> None:
    try:
        value = json.loads(text)
        wanted = not any(0xD800 <= ord(c) <= 0xDFFF for c in value)  # no lone halves
    except ValueError:
        wanted = False
    assert matches({"type": "string"}, text) == wanted


@given(st.text(alphabet='ab"\\\n\té', max_size=4), st.sampled_from(
    ["a.b", '^["a]+$', r"^[^b]*$", r"\\", "\\n|\\t", "^(a|é)?$", r"^\s", "[^a]$"]))  # fmt: skip
def test_a_pattern_speaks_of_the_value_not_of_the_text(value: str, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    wanted = jsonschema.Draft202012Validator(schema).is_valid(value)
    if value.endswith("\n") and pattern.endswith("$"):
        return  # Python's `$` also matches before a last newline; the standard's doesn't
    assert matches(schema, json.dumps(value, ensure_ascii=False)) == wanted


def test_pattern_length_and_format_hold_together() -> None:
    schema = {"type": "string", "pattern": "^a*b*$", "minLength": 2, "maxLength": 3}
    found = {
        text
        for n in range(5)
        for text in map("".join, itertools.product("ab", repeat=n))
        if matches(schema, f'"{text}"')
    }
    assert found == {"aa", "ab", "bb", "aaa", "aab", "abb", "bbb"}
    leap = {"type": "string", "format": "date", "pattern": "02-29$"}
    assert matches(leap, '"2024-02-29"')
    assert not matches(leap, '"2023-02-29"')
    assert not matches(leap, '"2024-02-28"')


@given(st.dates())
def test_every_date_and_no_other_fits_the_format(day: Any) -> None:
    dfa = DATE
    assert dfa.matches(f'"{day.isoformat()}"'.encode())
    year = f"{day.year:04}"
    others = (f"{year}-{day.month:02}-{day.day + 31}", f"{day.isoformat()}T", "0000-01-01",
              f"{year}-13-01", f"{year}-02-30", f"{year}-04-31")  # fmt: skip
    for text in others:
        assert not dfa.matches(f'"{text}"'.encode())


@given(st.integers(1, 9999))
def test_february_has_29_days_in_leap_years(year: int) -> None:
    is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    assert DATE.matches(f'"{year:04}-02-29"'.encode()) == is_leap


DATE = automaton({"type": "string", "format": "date"})


@given(
    st.lists(st.integers(-3, 12), max_size=5),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 3),
    st.booleans(),
)
def test_arrays_keep_their_bounds_and_prefix(
    value: list[int], low: int, more: int, num_prefix: int, closed: bool
) -> None:
    schema = {
        "type": "array",
        **({"prefixItems": [{"type": "integer", "maximum": 5}] * num_prefix} if num_prefix else {}),
        "items": False if closed else {"type": "integer", "minimum": 0},
        "minItems": low,
        "maxItems": low + more,
    }
    wanted = jsonschema.Draft202012Validator(schema).is_valid(value)
    try:
        dfa = automaton(schema)
    except ConstraintError:  # closed before its least length
        assert not wanted
        return
    assert dfa.matches(json.dumps(value).encode()) == wanted
    assert matches(schema, json.dumps(value, separators=(",", ":"))) == wanted
    assert matches(schema, json.dumps(value, indent=2)) == wanted


@given(st.sets(st.sampled_from("abcde")), st.sets(st.sampled_from("abcde")))
def test_objects_take_their_keys_in_order_with_any_optional_left_out(
    required: set[str], present: set[str]
) -> None:
    schema = {
        "type": "object",
        "properties": {key: {"const": key} for key in "abcde"},
        "required": sorted(required),
        "additionalProperties": False,
    }
    value = {key: key for key in sorted(present)}
    assert matches(schema, json.dumps(value)) == (required <= present)
    if len(value) > 1:
        assert not matches(schema, json.dumps(dict(reversed(value.items()))))


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(-1e6, 1e6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
))  # fmt: skip
def test_a_constant_is_its_own_text_in_any_layout(value: Any) -> None:
    if any(0xD800 <= ord(c) <= 0xDFFF for c in json.dumps(value, ensure_ascii=False)):
        return
    dfa = automaton({"const": value})
    assert dfa.matches(json.dumps(value, ensure_ascii=False).encode())
    assert dfa.matches(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
    assert not dfa.matches(json.dumps([value], ensure_ascii=False).encode())


def test_white_space_is_bounded_and_only_where_it_is_free() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}},
              "additionalProperties": False}  # fmt: skip
    dfa = automaton(schema)
    for text, wanted in (
        ('{"a":[null,null]}', True),
        ('{\n  "a": [\n    null,\n    null\n  ]\n}', True),
        ('{        "a":[]}', True),
        ('{         "a":[]}', False),
        ('{"a" :[]}', False),
        ('{"a":[null ,null]}', False),
        (' {"a":[]}', False),
        ('{"a":[]} ', False),
        ("{}", True),
        ("{ }", True),
    ):
        assert dfa.matches(text.encode()) == wanted, text


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}, "additionalProperties": {"type": "null"}},
        {"type": "array"},
        {"type": "number", "maximum": 3},
        {"type": "integer", "multipleOf": 3},
        {"type": "integer", "minimum": 0.5},
        {"type": "string", "format": "email"},
        {"anyOf": [{"type": "null"}], "type": "null"},
        {"allOf": [{"type": "null"}, {"type": "null"}]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "string"}, {"type": ["string", "null"]}]},
        {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"},
        {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
        {"enum": [1], "minimum": 0},
        {"minimum": 0},
    ],
)
def test_what_has_no_exact_regular_form_is_left_to_others(schema: Any) -> None:
    assert json_to_regex(check_schema(json.dumps(schema))) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"type": "string", "enum": [1, None]},
        {"const": 1, "enum": [True]},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"anyOf": [False, {"enum": []}]},
    ],
)
def test_what_nothing_satisfies_matches_nothing(schema: Any) -> None:
    assert json_to_regex(check_schema(json.dumps(schema))) == rx.NEVER


def test_discriminated_unions_are_provably_disjoint() -> None:
    kinds = [
        {"type": "object", "properties": {"kind": {"const": kind}, "n": {"type": value}},
         "required": ["kind", "n"], "additionalProperties": False}
        for kind, value in (("cat", "integer"), ("dog", "null"))
    ]  # fmt: skip
    schema = {"$defs": {"cat": kinds[0], "dog": kinds[1]},
              "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}  # fmt: skip
    assert matches(schema, '{"kind": "cat", "n": 3}')
    assert matches(schema, '{"kind": "dog", "n": null}')
    assert not matches(schema, '{"kind": "dog", "n": 3}')
    same = [{**kinds[0]}, {**kinds[1], "properties": kinds[0]["properties"]}]
    assert json_to_regex(check_schema(json.dumps({"oneOf": same}))) is None


@pytest.mark.parametrize(
    ("left", "right", "is_disjoint"),
    [
        ({"type": "string"}, {"type": "null"}, True),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": 1}, {"const": True}, True),
        ({"enum": [1, 2]}, {"enum": [3]}, True),
        ({"enum": ["a"]}, {"type": "integer"}, True),
        ({"enum": [2.0]}, {"type": "integer"}, False),
        ({"const": [0]}, {"const": [False]}, True),
    ],
)
def test_one_of_needs_a_proof(left: Any, right: Any, is_disjoint: bool) -> None:
    node = json_to_regex(check_schema(json.dumps({"oneOf": [left, right]})))
    assert (node is not None) == is_disjoint


@pytest.mark.parametrize(
    ("schema", "is_keyword"),
    [
        ("http://json-schema.org/draft-07/schema#", False),
        ("https://json-schema.org/draft/2019-09/schema", False),
        ("https://json-schema.org/draft/2020-12/schema", True),
    ],
)
def test_a_prefix_is_written_only_where_the_draft_has_prefixes(
    schema: str, is_keyword: bool
) -> None:
    pair = {
        "$schema": schema,
        "type": "array",
        "prefixItems": [{"type": "integer"}],
        "items": {"type": "string"},
        "minItems": 2,
    }
    strict = check_schema(json.dumps(pair))
    named = [] if is_keyword else ["prefixItems"]
    assert [found.keyword for found in strict.unenforced] == named
    assert (json_to_regex(strict) is not None) == is_keyword
    lax = check_schema(json.dumps(pair), strict=False).schema
    assert isinstance(lax, dict)
    assert ("prefixItems" in lax) == is_keyword
