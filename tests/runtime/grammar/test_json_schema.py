"""The front door: what is no schema, and what can't be enforced, is named with its pointer."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from umbel.lang.constraints import Grammar, JsonSchema, Regex
from umbel.lang.errors import ConstraintError, InvalidValueError, from_wire, to_wire
from umbel.lang.regex_syntax import NEVER
from umbel.lang.schema_check import DRAFTS, check_json_schema
from umbel.lang.schema_patterns import check_patterns
from umbel.runtime.grammar import ENGINES, GrammarCompiler, json_schema, validate_after
from umbel.runtime.grammar.json_schema import check_schema, parse_json
from umbel.runtime.grammar.json_to_regex import json_to_regex

from .random_schemas import random_schema
from .walks import accepts

STRING = {"type": "string"}
OVERLAP = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
IMPOSSIBLE = {"type": "array", "minItems": 3, "maxItems": 2}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "is not JSON"),
        ('{"a": 1,}', "is not JSON"),
        ('{"minimum": NaN}', "NaN is not JSON"),
        ('{"minimum": -Infinity}', "-Infinity is not JSON"),
        ('{"type": "string", "type": "null"}', "duplicate key 'type'"),
        ('{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        ('{"minimum": 1e400}', "more digits than a 64-bit float"),
        ('{"minimum": 0.12345678901234567890}', "more digits than a 64-bit float"),
        ('{"minimum": ' + "9" * 5000 + "}", "not usable JSON"),
        ("[" * 65, "nests deeper than 64"),
        ('{"not":' * 65 + "{}" + "}" * 65, "nests deeper than 64"),
        ('"' + "x" * 1_000_001 + '"', "characters; at most"),
        ("[]", "a schema is an object or a boolean"),
        ('"string"', "a schema is an object or a boolean"),
    ],
)
def test_text_that_is_no_schema_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConstraintError, match=what):
        check_schema(text)


def test_brackets_in_strings_do_not_nest() -> None:
    assert parse_json(json.dumps(['[{"\\' * 100])) == ['[{"\\' * 100]
    assert parse_json("[" * 64 + "]" * 64)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "strng"}, "/type"),
        ({"properties": {"a/b": {"~": 1, "minLength": -1}}}, "/properties/a~1b/minLength"),
        ({"items": [STRING]}, "/items"),  # a list of items is draft 7's
        ({"required": ["a", "a"]}, "/required"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1,
          "exclusiveMinimum": 3},
         "/exclusiveMinimum"),
        ({"anyOf": [STRING, {"enum": "a"}]}, "/anyOf/1/enum"),
        ({"$schema": "https://example.com/own"}, "/$schema"),
    ],
)  # fmt: skip
def test_the_meta_schema_of_the_draft_is_enforced(schema: Any, where: str) -> None:
    with pytest.raises(ConstraintError) as caught:
        check_schema(json.dumps(schema))
    assert caught.value.where == where


def test_the_line_of_a_gen_refuses_no_schema_that_the_runtime_takes() -> None:
    """But for an empty `enum`, which newer drafts allow: a choice of nothing."""
    rng = random.Random(7)
    wrong = ["strng", -1, 1.5, True, None, [], {}, ["a", "a"], {"a": "b"}, "#/nowhere", "string"]
    outcomes = Counter[tuple[bool, bool]]()
    for i in range(3000):
        schema = random_schema(rng, 3)
        objects = [o for o in json_schema._all_objects(schema) if o]
        if i % 3 and objects:
            target = rng.choice(objects)
            target[rng.choice([*target, "type", "required", "$ref"])] = rng.choice(wrong)
        # the meta-schemas of older drafts don't look into $defs, to which references lead
        if "$defs" not in json.dumps(schema) and rng.random() < 0.5 and isinstance(schema, dict):
            schema["$schema"] = rng.choice(list(json_schema._DRAFTS))
        text = json.dumps(schema)
        line, runtime = _refusal(check_json_schema, text), _refusal(check_schema, text)
        if "enum: it is empty" not in line:
            assert runtime or not line, (text, line)
            outcomes[bool(line), bool(runtime)] += 1
    assert outcomes[True, True] > 10 * outcomes[False, True] > 0  # what it misses is rare
    assert outcomes[False, False] > 500


def test_each_draft_has_its_own_validator() -> None:
    for uri in DRAFTS:
        assert json_schema.validator_class(uri).META_SCHEMA["$schema"].rstrip("#") == uri
    assert DRAFTS[json_schema._DEFAULT_DRAFT] == max(DRAFTS.values())


_BAD_PATTERNS = ("(?=a)b", r"(a)\1", "a^b", "(a$|b)c", r"\ba", "(?i)a", "a(", "a|^b")


def _with_patterns(rng: random.Random, schema: Any) -> None:
    """Put patterns into some of a schema's objects, wherever they are."""
    for item in [o for o in json_schema._all_objects(schema) if o]:
        if rng.random() < 0.25:
            item["pattern"] = rng.choice(_BAD_PATTERNS)
        if rng.random() < 0.1 and isinstance(item.get("properties", {}), dict):
            item["patternProperties"] = {rng.choice(_BAD_PATTERNS): {"type": "null"}}
        if rng.random() < 0.1:
            item["type"] = rng.choice(["integer", ["integer", "null"], "string", "array"])


def test_a_pattern_is_refused_on_the_line_of_its_gen_where_every_engine_refuses_it() -> None:
    rng = random.Random(8)
    outcomes = Counter[tuple[bool, bool]]()
    for _ in range(4000):
        schema = random_schema(rng, 3)
        _with_patterns(rng, schema)
        text = json.dumps(schema)
        if _refusal(check_json_schema, text) or _refusal(check_schema, text):
            continue
        checked = check_schema(text)
        # as the compiler has it: the regular form decides, then what can't be followed
        is_taken = not checked.unenforced or json_to_regex(checked) not in (None, NEVER)
        is_for_pattern = not is_taken and "attern" in checked.unenforced[0].keyword
        line = _refusal(lambda given: check_patterns(given, strict=True), text)
        assert not (line and is_taken), (text, line)
        outcomes[bool(line), is_for_pattern] += 1
    assert outcomes[True, True] > 100 * outcomes[False, True]  # what it misses is rare
    assert outcomes[False, False] > 500


def _refusal(check: Callable[[str], object], text: str) -> str:
    try:
        check(text)
    except ConstraintError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("schema", "where", "what"),
    [
        ({"$ref": "#/$defs/x"}, "/$ref", "not found in this schema"),
        ({"items": {"$ref": "#nowhere"}}, "/items/$ref", "not found in this schema"),
        ({"$ref": "https://example.com/s.json"}, "/$ref", "remote schemas aren't loaded"),
        ({"$ref": "#/title", "title": "t"}, "/$ref", "is no schema"),
        ({"$defs": {"a": {"items": {"$ref": "#/$defs/b"}}}, "$ref": "#/$defs/a"},
         "/$defs/a/items/$ref", "not found"),
    ],
)  # fmt: skip
def test_references_lead_somewhere_in_the_schema(schema: Any, where: str, what: str) -> None:
    with pytest.raises(ConstraintError, match=what) as caught:
        check_schema(json.dumps(schema))
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"not": STRING}, "/not"),
        ({"if": STRING, "then": {"minLength": 1}}, "/if"),
        ({"properties": {"a": {"type": "array", "contains": STRING}}}, "/properties/a/contains"),
        ({"items": {"uniqueItems": True}}, "/items/uniqueItems"),
        ({"propertyNames": {"maxLength": 3}}, "/propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
        ({"allOf": [{}, {"unevaluatedProperties": False}]}, "/allOf/1/unevaluatedProperties"),
        ({"$dynamicRef": "#"}, "/$dynamicRef"),
        ({"type": "string", "format": "phone"}, "/format"),
        ({"properties": {"p": {"type": "string", "pattern": "a(?=b)"}}}, "/properties/p/pattern"),
        ({"type": "object", "patternProperties": {"(a)\\1": STRING}}, "/patternProperties"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "/$ref"),
        ({"$defs": {"d": {"not": {}}}, "items": {"$ref": "#/$defs/d"}}, "/$defs/d/not"),
        ({"x": {"y": {"not": {}}}, "items": {"$ref": "#/x/y"}}, "/x/y/not"),
        ({"type": "number", "minimum": 2**53 + 1}, "/minimum"),
        ({"const": {"deep": [-(2**60)]}, "type": "object", "properties": {}}, "/const"),
        ({"type": "integer", "maximum": 10**4000}, "/maximum"),
        ({"type": "integer", "exclusiveMinimum": -(10**4000)}, "/exclusiveMinimum"),
        ({"properties": {"a": {"type": "integer", "minimum": 10**501}}}, "/properties/a/minimum"),
        ({"type": "string", "maxLength": 10**4000}, "/maxLength"),
        ({"type": "string", "minLength": 2**63}, "/minLength"),
        ({"type": "array", "maxItems": 10**20}, "/maxItems"),
        ({"type": "array", "items": STRING, "minItems": 10**4000}, "/minItems"),
        ({"type": "object", "minProperties": 10**4000}, "/minProperties"),
    ],
)
def test_what_can_not_be_enforced_is_refused_with_its_pointer(
    schema: Any, pointer: str, json_compiler: GrammarCompiler
) -> None:
    found = check_schema(json.dumps(schema)).unenforced
    assert [item.pointer for item in found] == [pointer]
    assert found[0].keyword == pointer.rsplit("/", 1)[1]
    with pytest.raises(ConstraintError, match="strict=False") as caught:
        json_compiler.compile(JsonSchema(json.dumps(schema)))
    assert caught.value.where == pointer
    relaxed = json_compiler.compile(JsonSchema(json.dumps(schema), strict=False))
    assert relaxed.engine in ENGINES


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (OVERLAP, "/oneOf"),
        ({"items": OVERLAP}, "/items/oneOf"),
        ({"properties": {"a": {"oneOf": [STRING, {"type": "null"}]}, "b": OVERLAP,
                         "c": {"oneOf": [STRING, {"type": "integer"}]}}}, "/properties/b/oneOf"),
        ({"$defs": {"d/": OVERLAP}, "prefixItems": [{"$ref": "#/$defs/d~1"}]}, "/$defs/d~1/oneOf"),
        ({"type": "object", "patternProperties": {"a": {"type": "null"}, "b": STRING}},
         "/patternProperties"),
        ({"type": "object", "maxProperties": 2, "properties": {"a": STRING}}, "/maxProperties"),
        ({"items": {"type": "number", "multipleOf": 1e-20}}, "/items/multipleOf"),
        ({"$defs": {"l": {"items": {"$ref": "#/$defs/l"}}},
          "allOf": [{"$ref": "#/$defs/l"}, {"$ref": "#/$defs/l"}]}, "/allOf"),
    ],
)  # fmt: skip
def test_rule_14_what_llguidance_refuses_is_said_in_our_words_with_its_place(
    schema: Any, pointer: str, json_compiler: GrammarCompiler
) -> None:
    with pytest.raises(ConstraintError) as caught:
        json_compiler.compile(JsonSchema(json.dumps(schema)))
    assert caught.value.where == pointer
    said = str(caught.value)
    assert f"`{pointer.rsplit('/', 1)[1]}`" in said.replace("'", "`")
    assert f"(at {pointer}); with strict=False it is checked afterwards" in said
    assert not re.search("option |coerce|lenient|stack level|patternProperty", said)
    json_compiler.compile(JsonSchema(json.dumps(schema), strict=False))


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"anyOf": [IMPOSSIBLE, IMPOSSIBLE]}, "/anyOf/0/minItems"),
        ({"properties": {"a": IMPOSSIBLE, "b": {"minItems": 1}}, "required": ["a"],
          "type": "object"}, "/required"),
        ({"prefixItems": [{}, IMPOSSIBLE], "minItems": 2, "type": "array"}, "/prefixItems"),
        ({"items": IMPOSSIBLE, "minItems": 1, "type": "array", "required": []}, ""),  # by chance
    ],
)  # fmt: skip
def test_what_nothing_can_satisfy_is_placed(
    schema: Any, pointer: str, json_compiler: GrammarCompiler
) -> None:
    with pytest.raises(ConstraintError, match="nsatisfiable") as caught:
        json_compiler.compile(JsonSchema(json.dumps(schema)), "llguidance")
    if pointer.startswith("/anyOf"):  # both are to blame
        assert caught.value.where in (pointer, pointer.replace("0", "1"))
    else:
        assert caught.value.where == pointer


def test_an_error_crosses_a_border_as_what_it_is(json_compiler: GrammarCompiler) -> None:
    for constraint in (JsonSchema('{"enum": []}'), Regex(r"[^\s\S]"), JsonSchema("false")):
        with pytest.raises(ConstraintError) as caught:
            json_compiler.compile(constraint)
        assert type(from_wire(to_wire(caught.value))) is ConstraintError


@pytest.mark.parametrize(
    "schema",
    [
        {"then": False, "else": False, "minContains": 4},  # nothing without `if` and `contains`
        {"uniqueItems": False},
        {"unevaluatedItems": True},
        {"$defs": {"unused": {"not": {}}}},
        {"properties": {"not": STRING, "if": STRING, "x-guidance": STRING}},
        {"enum": [{"not": 1}], "const": {"not": 1}},
        {"default": {"not": 1}, "examples": [{"uniqueItems": True}]},
        {"type": "integer", "minimum": 2**53},
    ],
)
def test_what_means_nothing_is_not_refused(schema: Any) -> None:
    assert check_schema(json.dumps(schema)).unenforced == ()


def test_options_of_llguidance_are_taken_out_where_they_are_options() -> None:
    options = {"x-guidance": {"lenient": True, "whitespace_flexible": False}}
    schema = {**options, "properties": {"x-guidance": {**STRING, **options}}, "enum": [options]}
    assert check_schema(json.dumps(schema)).schema == {
        "properties": {"x-guidance": STRING},
        "enum": [options],
    }


def test_the_schema_given_to_engines_is_a_copy() -> None:
    schema = {"type": "string", "pattern": "^a$", "minLength": 1.0, "x-guidance": {}}
    checked = check_schema(json.dumps(schema))
    assert checked.source == schema
    assert checked.schema != schema


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}


@pytest.mark.parametrize(
    "node",
    [
        {**NODE, "required": ["next"]},
        {"$ref": "#/$defs/n"},
        {"allOf": [{"type": "object"}, {"$ref": "#/$defs/n"}]},
        {"anyOf": [{**NODE, "required": ["next"]}, {"$ref": "#/$defs/n"}]},
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#/$defs/n"}], "minItems": 1},
        False,
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "array", "items": False, "minItems": 1},
    ],
)
def test_a_schema_without_a_finite_value_is_refused(node: Any) -> None:
    with pytest.raises(ConstraintError, match="no finite value"):
        check_schema(json.dumps({"$defs": {"n": node}, "$ref": "#/$defs/n"}))


@pytest.mark.parametrize(
    "node",
    [
        NODE,
        {"anyOf": [{**NODE, "required": ["next"]}, {"type": "null"}]},
        {"type": ["object", "null"], "properties": NODE["properties"], "required": ["next"]},
        {"type": "array", "items": {"$ref": "#/$defs/n"}},
        {**NODE, "required": ["other"]},
    ],
)
def test_recursion_that_can_end_is_not(node: Any, json_compiler: GrammarCompiler) -> None:
    schema = json.dumps({"$defs": {"n": node}, "$ref": "#/$defs/n"})
    assert json_compiler.compile(JsonSchema(schema)).engine == "llguidance"


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 2]", "[1, 1]"),
        ({"type": "string", "not": {"const": "a"}}, '"b"', '"a"'),
        ({"type": "string", "pattern": "^(?!root$)[a-z]+$"}, '"user"', '"root"'),
        ({"type": "string", "format": "idn-email"}, '"a@b"', '"ab"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 10}]}, "10.5", "12"),
        ({"type": "integer", "maximum": 2**53 + 1, "multipleOf": 7}, "14", str(7 * 2**53)),
        ({"patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 3}}, "type": "object"},
         '{"ab": 4}', '{"ab": 1}'),
    ],
)  # fmt: skip
def test_without_strict_the_rest_is_checked_afterwards(
    schema: Any, right: str, wrong: str, json_compiler: GrammarCompiler
) -> None:
    constraint = JsonSchema(json.dumps(schema), strict=False)
    grammar = json_compiler.compile(constraint)
    assert accepts(grammar, json_compiler.vocabulary.encode(right))
    assert accepts(grammar, json_compiler.vocabulary.encode(wrong))  # so the check has to follow
    assert validate_after(constraint, right) == json.loads(right)
    with pytest.raises(ConstraintError, match="does not fit the schema"):
        validate_after(constraint, wrong)


def test_without_strict_what_can_be_enforced_still_is(json_compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    grammar = json_compiler.compile(JsonSchema(json.dumps(schema), strict=False))
    assert not accepts(grammar, json_compiler.vocabulary.encode('["a"]'))


def test_the_error_points_into_the_value() -> None:
    schema = {"properties": {"a/b": {"items": {"type": "integer"}}}}
    with pytest.raises(ConstraintError) as caught:
        validate_after(JsonSchema(json.dumps(schema)), '{"a/b": [1, "x"]}')
    assert caught.value.where == "/a~1b/1"


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "NaN", "[1", "1 2", ""])
def test_a_value_is_parsed_strictly_too(text: str) -> None:
    with pytest.raises(ConstraintError):
        validate_after(JsonSchema("true"), text)


def test_a_format_without_type_is_an_annotation_afterwards() -> None:
    assert validate_after(JsonSchema('{"format": "ipv4"}', strict=False), '"x"') == "x"
    with pytest.raises(ConstraintError):
        validate_after(JsonSchema('{"type": "string", "format": "ipv4"}', strict=False), '"x"')


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('start: "a" %json {"type": "array", "uniqueItems": true}',
         "line 1, column 18 /uniqueItems", "uniqueItems"),
        ('start: a\na: %json {"type": "strng"}', "line 2, column 10 /type", "not valid"),
        ('start: %json {"a": }', "line 1, column 14", "not JSON"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "line 1, column 1", "options"),
        ('start: "a" b', "line 1, column 12", "'b' is not defined"),
        ("start: /a[/", "line 1, column 8", "unclosed character class"),
    ],
)  # fmt: skip
def test_errors_in_lark_say_where(
    text: str, where: str, what: str, json_compiler: GrammarCompiler
) -> None:
    with pytest.raises(ConstraintError, match=what) as caught:
        json_compiler.compile(Grammar(text))
    assert caught.value.where == where


def test_a_schema_inside_lark_is_enforced(json_compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
              "additionalProperties": False, "x-guidance": {"lenient": True}}  # fmt: skip
    grammar = json_compiler.compile(Grammar(f'start: "call " %json {json.dumps(schema)} "!"'))
    encode = json_compiler.vocabulary.encode
    assert accepts(grammar, encode('call {"n": 3}!'))
    assert not accepts(grammar, encode('call {"n": "3"}!'))


def test_a_finished_value_may_have_more_digits_than_a_float() -> None:
    constraint = JsonSchema('{"type": "number", "maximum": 1}', strict=False)
    assert validate_after(constraint, "0.1234567890123456789012") == 0.12345678901234568
    with pytest.raises(InvalidValueError, match="maximum"):
        validate_after(constraint, "1.5000000000000000000001")


def test_patterns_are_checked_afterwards_as_the_standard_has_it() -> None:
    rng = random.Random(12)
    verdicts = Counter[bool]()
    patterns = ("^a", "b$", "a+b", "(?=ab)a", r"(a)\1", "^$", "c")
    for _ in range(400):
        names = ["".join(rng.choices("abc", k=rng.randrange(4))) for _ in range(3)]
        subs: list[Any] = [True, False, {"type": "string", "pattern": rng.choice(patterns)}]
        schema = {
            "properties": {"ab": rng.choice(subs)},
            "patternProperties": {p: rng.choice(subs) for p in rng.sample(patterns, 2)},
            "additionalProperties": rng.choice(subs),
        }
        value = {name: rng.choice([1, *names]) for name in rng.sample(names, rng.randrange(4))}
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        given = JsonSchema(json.dumps(schema), strict=False)
        verdicts[is_valid] += 1
        if is_valid:
            assert validate_after(given, json.dumps(value)) == value
        else:
            with pytest.raises(InvalidValueError):
                validate_after(given, json.dumps(value))
    assert min(verdicts.values()) > 50


@pytest.mark.parametrize(
    "around",
    [
        lambda pattern: {"not": {"pattern": pattern}},
        lambda pattern: {"type": "string", "pattern": f"(?=a){pattern}"},
    ],
)
def test_rule_15_a_pattern_that_explodes_afterwards_fails_its_value_in_a_second(
    around: Callable[[str], Any],
) -> None:
    constraint = JsonSchema(json.dumps(around("^(a|a|b?a)+$")), strict=False)
    started = time.monotonic()
    with pytest.raises(ConstraintError, match=r"took more than 1 s: simplify it"):
        validate_after(constraint, json.dumps("a" * 60 + "!"))
    assert time.monotonic() - started < 5


def test_a_pattern_in_the_standards_own_dialect_is_checked_afterwards() -> None:
    letters = JsonSchema(json.dumps({"pattern": r"^(?<all>\p{L})+$"}), strict=False)
    assert validate_after(letters, '"aé"') == "aé"
    with pytest.raises(InvalidValueError, match="does not match"):
        validate_after(letters, '"a1"')
    with pytest.raises(ConstraintError, match="can't be checked"):
        validate_after(JsonSchema(r'{"pattern": "\\k<a>"}', strict=False), '"a"')


@pytest.mark.parametrize("draft", ["2019-09", "2020-12"])
def test_rule_15_what_patterns_leave_over_is_found_as_they_are(draft: str) -> None:
    def checked(pattern: str, value: dict[str, int]) -> Any:
        schema = {
            "$schema": f"https://json-schema.org/draft/{draft}/schema",
            "properties": {"1": {"const": 1}},
            "patternProperties": {pattern: {"type": "integer"}},
            "unevaluatedProperties": False,
        }
        return validate_after(JsonSchema(json.dumps(schema), strict=False), json.dumps(value))

    assert checked(r"^\p{L}+$", {"aé": 2, "1": 1}) == {"aé": 2, "1": 1}
    for wrong in ({"a1": 2}, {"1": 2}):
        with pytest.raises(InvalidValueError):
            checked(r"^\p{L}+$", wrong)
    started = time.monotonic()
    with pytest.raises(ConstraintError, match=r"took more than 1 s: simplify it"):
        checked("^(a|a|b?a)+$", {"a" * 60 + "!": 1})
    assert time.monotonic() - started < 5


def test_numbers_of_any_size_in_notes_to_readers_are_left_out(
    json_compiler: GrammarCompiler,
) -> None:
    huge = "1" + "0" * 400
    schema = f'{{"type": ["integer", "array"], "default": {huge}, "examples": [{huge}]}}'
    assert json_compiler.compile(JsonSchema(schema)).engine == "llguidance"
    with pytest.raises(ConstraintError, match="can't read the schema: number out of range"):
        json_compiler.compile(JsonSchema(f'{{"type": ["integer", "array"], "other": {huge}}}'))
