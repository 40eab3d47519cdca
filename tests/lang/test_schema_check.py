"""Rule 1 for JSON schemas: what is wrong with one shows on the line of its gen, with its place."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import msgspec
import pytest

import umbel as ub
from umbel.lang import schema_check
from umbel.lang.schema_check import DRAFTS, check_json_schema, check_spelling

DRAFT_4, DRAFT_7 = (f"{uri}#" for uri in list(DRAFTS)[0:3:2])
STRING = {"type": "string"}

# each keyword, and values of a kind that it doesn't take
WRONG: dict[str, list[Any]] = {
    **{key: ["3", -1, 1.5, True, None, [1]] for key in schema_check._COUNTS},
    **{key: ["3", True, None, {}] for key in schema_check._BOUNDS},
    **{key: [3, None, ["a"], {}] for key in schema_check._TEXTS},
    **{key: ["a", 3, None, [1]] for key in schema_check._ONE_SCHEMA},
    **{key: ["a", {}, [], None, True, ["a"]] for key in schema_check._SCHEMA_LISTS},
    **{key: ["a", [], None, True, {"a": "b"}, {"a": 3}] for key in schema_check._SCHEMA_MAPS},
    "multipleOf": ["3", 0, -1, True, None],
    "uniqueItems": ["yes", 1, None],
    "required": [True, "a", {"a": 1}, [1], ["a", "a"]],
    "dependentRequired": [["a"], {"a": "b"}, {"a": [1]}],
    "enum": ["a", {"a": 1}, None, []],
    "examples": ["a", {}],
    "type": [
        "strng",
        "str",
        "",
        [],
        3,
        None,
        {},
        ["string", "strng"],
        ["null", "null"],
        [["null"]],
    ],
}

# a subschema's place, as a path from the root, and the schema around it
AROUND: list[tuple[str, Any]] = [
    ("", lambda sub: sub),
    ("/properties/a~1b", lambda sub: {"properties": {"a/b": sub}}),
    ("/items/anyOf/1", lambda sub: {"items": {"anyOf": [STRING, sub]}}),
    ("/$defs/unused", lambda sub: {"$defs": {"unused": sub}}),
    ("/else/not", lambda sub: {"if": True, "else": {"not": sub}}),
    ("/prefixItems/0/patternProperties/~0",
     lambda sub: {"prefixItems": [{"patternProperties": {"~": sub}}]}),
    ("/own/part", lambda sub: {"own": {"part": sub}, "$ref": "#/own/part"}),
]  # fmt: skip


@pytest.mark.parametrize("keyword", sorted(schema_check._ASSERTIONS - {"if"}))
def test_a_misspelt_keyword_is_refused_at_its_place_and_would_have_said_nothing(
    keyword: str,
) -> None:
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in keyword)
    wrong = {keyword.upper(), keyword.capitalize(), keyword + "_", snake} - {keyword}
    if len(keyword) > 6:
        wrong |= {keyword[:-1], keyword[:2] + keyword[3] + keyword[2] + keyword[4:]} - {keyword}
    for word in wrong:
        for pointer, around in AROUND:
            schema = around({word: 3})
            with pytest.raises(ub.ConstraintError, match=re.escape(f"mean '{keyword}'")) as caught:
                ub.gen("x", schema=schema)
            assert caught.value.where == f"{pointer}/{word}"
            assert ub.gen("x", schema=schema, strict=False) is not None  # as the standard has it


@pytest.mark.parametrize(
    "word",
    [
        *("example", "nullable", "discriminator", "xml", "id", "titel", "note", "unit", "x-order"),
        *("$recursiveRef", "contentMediaType", "definition", "enumNames", "markdownDescription"),
        *("propertyOrder", "errorMessage", "formatMinimum", "uniqueItemProperties", "allRequired"),
        *("deepProperties", "regexp"),
    ],
)
def test_a_word_of_another_vocabulary_is_left_alone(word: str) -> None:
    check_spelling(json.dumps({word: 3, "type": "string"}))
    # names of properties are no keywords, and neither is what stands beside the one that was meant
    check_spelling(json.dumps({"properties": {"requierd": STRING}}))
    check_spelling(json.dumps({"requierd": 3, "required": ["a"]}))


@pytest.mark.parametrize("keyword", sorted(WRONG))
def test_rule_1_a_keyword_of_the_wrong_kind_is_refused_with_its_pointer(keyword: str) -> None:
    for value in WRONG[keyword]:
        for pointer, around in AROUND:
            schema = around({keyword: value})
            for given in (schema, json.dumps(schema)):
                with pytest.raises(ub.ConstraintError) as caught:
                    ub.gen("x", schema=given)
                assert caught.value.where.startswith(f"{pointer}/{keyword}"), schema
                assert f"at {caught.value.where}: " in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strng"}, "'strng' is no type: did you mean 'string'?"),
        ({"type": ["null", "int"]}, "'int' is no type: did you mean 'integer'?"),
        ({"type": "Dict"}, "did you mean 'object'?"),
        ({"properties": {"a": {"required": True}}}, "list the names beside `properties`"),
        ({"minimum": 1, "exclusiveMinimum": True}, "it holds the bound itself"),
        ({"items": [STRING]}, "a list is `prefixItems`"),
        ({"enum": "a"}, 'one value is {"enum": [value]}'),
        ({"enum": []}, "there is nothing to choose from"),
        ({"properties": {"a": "string"}}, 'a schema is an object, not "string"'),
        ({"minimum": float("nan")}, "can't be written as JSON"),
    ],
)
def test_what_is_written_wrong_meets_what_to_write(schema: Any, words: str) -> None:
    with pytest.raises(ub.ConstraintError) as caught:
        ub.gen("x", schema=schema)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"$ref": "#/$defs/x"}, "/$ref"),
        ({"$defs": {"x": {}}, "$ref": "#/definitions/x"}, "/$ref"),
        ({"$defs": {"a": {"items": {"$ref": "#/$defs/b"}}}, "$ref": "#/$defs/a"},
         "/$defs/a/items/$ref"),
        ({"title": "t", "$ref": "#/title"}, "/$ref"),
        ({"prefixItems": [{}], "$ref": "#/prefixItems/1"}, "/$ref"),
        ({"items": {"$ref": "#nowhere"}}, "/items/$ref"),
        ({"properties": {"a": {"$ref": "Item"}}}, "/properties/a/$ref"),
        ({"$ref": "https://example.com/s.json"}, "/$ref"),
    ],
)  # fmt: skip
def test_rule_1_a_reference_leads_somewhere(schema: Any, where: str) -> None:
    with pytest.raises(ub.ConstraintError, match=r"not found|no schema") as caught:
        ub.gen("x", schema=schema)
    assert caught.value.where == where


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$ref": "#"},
        {"$defs": {"a b": {}, "c/d": {}}, "allOf": [{"$ref": "#/$defs/a%20b"},
                                                   {"$ref": "#/$defs/c~1d"}]},
        {"$defs": {"a": {"$anchor": "here"}}, "$ref": "#here"},
        {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"},
        {"$defs": {"unused": {"$ref": "#/nowhere"}}},
        {"$id": "https://example.com/s", "$ref": "s"},
        {"$defs": {"d": {"$id": "https://example.com/d", "$ref": "#/x"}}, "$ref": "#/$defs/d"},
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"const": {"type": "strng"}, "default": {"minLength": "a"}, "examples": [{"enum": 1}]},
        {"properties": {"type": {"type": "integer"}, "required": True, "enum": False}},
        {"minLength": 2.0, "multipleOf": 0.5, "own": {"type": "strng"}},
        {"$schema": DRAFT_4, "minimum": 1, "exclusiveMinimum": True, "const": 3, "contains": 3},
        {"$schema": DRAFT_7, "items": [STRING], "prefixItems": 3, "$defs": 3},
        {"dependencies": {"a": ["b"], "c": {"minProperties": 1}}},
    ],
)  # fmt: skip
def test_what_a_draft_allows_is_taken(schema: Any) -> None:
    ub.gen("x", schema=schema)


def test_a_loop_over_one_gen_checks_its_schema_once() -> None:
    check_json_schema.cache_clear()
    for _ in range(5):
        ub.gen("x", schema={"type": "string", "maxLength": 4321})
    found = check_json_schema.cache_info()
    assert (found.misses, found.hits) == (1, 4)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(?=b)", "a look-ahead ((?=) at position 1"),
        (r"(a)\1", r"a back-reference (\1) at position 3"),
        ("^a^b$", "an anchor inside the pattern at position 2: something can come before it"),
        ("(a|b$)c", "an anchor inside the pattern at position 4: something can follow it"),
        (r"\bx", "a word boundary (\\b) at position 0 can't be used as a constraint: say which"),
        ("a(?i)", "a flag ((?i)) at position 1"),
        (r"\p{L}", "a Unicode property (\\p) at position 0"),
        ("a(b", "missing ), unterminated group at position 1"),
        ("a**", "multiple repeat at position 2"),
    ],
)
def test_rule_1_a_pattern_is_refused_with_its_pointer_and_its_position(
    pattern: str, words: str
) -> None:
    places = {
        "/pattern": {"pattern": pattern},
        "/properties/a~1b/pattern": {"properties": {"a/b": {"type": "string", "pattern": pattern}}},
        "/patternProperties": {"patternProperties": {"^a": {}, pattern: {}}},
        "/items/anyOf/1/pattern": {"items": {"anyOf": [STRING, {"pattern": pattern}]}},
        "/$defs/a/pattern": {"$defs": {"a": {"pattern": pattern}}, "items": {"$ref": "#/$defs/a"}},
    }
    for pointer, schema in places.items():
        with pytest.raises(ub.ConstraintError) as caught:
            ub.gen("x", schema=schema)
        assert caught.value.where == pointer
        assert f"at {pointer}: regex {pattern!r}: {words}" in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "pattern": "(?=a)", "patternProperties": {"(": {}}},
        {"type": "array", "items": {"type": "null"}, "properties": {"a": {"pattern": "a^b"}}},
        {"$defs": {"unused": {"pattern": "("}}, "type": "string"},
        {"type": "array", "items": {"pattern": "("}, "maxItems": 0},
        {"default": {"pattern": "("}, "enum": [{"pattern": "("}]},
        {"properties": {"pattern": {"type": "string"}}},
        {"pattern": "^(a|^b)c|[[:alpha:]]|x{3,"},
    ],
)
def test_a_pattern_that_says_nothing_forbids_nothing(schema: Any) -> None:
    ub.gen("x", schema=schema)
    ub.gen("x", schema=schema, strict=False)


def test_without_strict_a_pattern_only_has_to_be_one() -> None:
    for pattern in ("a(?=b)", r"(a)\1", "a^b", r"\bx", "(?i)a", r"\p{L}", "(?<n>a)", "[^]"):
        ub.gen("x", schema={"not": {"pattern": pattern}}, strict=False)
        ub.gen("x", schema={"pattern": pattern}, strict=False)
    for pattern, position in (("a(b", 1), ("a**", 2), ("[b-a]", 1)):
        for keyword in ("not", "items"):
            with pytest.raises(ub.ConstraintError, match=f"at position {position}$") as caught:
                ub.gen("x", schema={keyword: {"pattern": pattern}}, strict=False)
            assert caught.value.where == f"/{keyword}/pattern"


def test_the_pattern_of_a_type_is_refused_on_the_line_of_its_gen() -> None:
    code: Any = Annotated[str, msgspec.Meta(pattern="a^b")]
    with pytest.raises(ub.ConstraintError, match="an anchor inside") as caught:
        ub.gen("x", dtype=code)
    assert caught.value.where == "/pattern"
