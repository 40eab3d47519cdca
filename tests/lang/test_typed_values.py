"""Rule 14: types become constraints, and text comes back as values of the type."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

import umbel as ub
from umbel.lang.constraints import Choices, JsonSchema, Regex
from umbel.lang.errors import ConstraintError
from umbel.lang.typed_values import value_type


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Movie(TypedDict):
    title: str
    year: int


class Pair(NamedTuple):
    left: int
    right: str


class Node(msgspec.Struct):
    name: str
    children: list[Node] = []


class Report(BaseModel):
    title: str
    score: int = Field(ge=0, le=10)
    points: list[Point] = []


@dataclasses.dataclass
class Holder:
    report: Report


def schema_of(tp: object) -> dict[str, Any]:
    constraint = value_type(tp).constraint
    assert isinstance(constraint, JsonSchema)
    found: dict[str, Any] = json.loads(constraint.schema)
    return found


@pytest.mark.parametrize(
    ("tp", "text", "value"),
    [
        (int, "-12", -12),
        (float, "2.5", 2.5),
        (bool, "true", True),
        (str, '"a\\n"', "a\n"),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, "x", None], "null", None),
        (Color, "blue", Color.BLUE),
        (Level, "2", Level.HIGH),
        (Point, '{"x": 1}', Point(1, 0)),
        (Movie, '{"title": "M", "year": 1931}', {"title": "M", "year": 1931}),
        (Pair, '[1, "a"]', Pair(1, "a")),
        (Node, '{"name": "a", "children": [{"name": "b"}]}', Node("a", [Node("b")])),
        (list[int], "[1, 2]", [1, 2]),
        (dict[str, float], '{"a": 1}', {"a": 1.0}),
        (int | None, "null", None),
        (Annotated[int, msgspec.Meta(ge=3)], "3", 3),
        (Annotated[int, Field(ge=3)], "3", 3),
        (Report, '{"title": "t", "score": 3}', Report(title="t", score=3)),
        (list[Report], '[{"title": "t", "score": 3}]', [Report(title="t", score=3)]),
        (Holder, '{"report": {"title": "t", "score": 3}}', Holder(Report(title="t", score=3))),
        ({"type": "array"}, "[1]", [1]),
        ('{"type": "array"}', "[1]", [1]),
        (True, "{}", {}),
    ],
)
def test_rule_14_a_value_comes_back_as_its_type(tp: object, text: str, value: object) -> None:
    found = value_type(tp).decode(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("tp", "text"),
    [
        (int, "a"),
        (bool, "yes"),
        (str, "3"),
        (Literal["a"], "b"),
        (Color, "green"),
        (Point, '{"x": "1"}'),
        (Annotated[int, msgspec.Meta(ge=3)], "2"),
        (Annotated[int, Field(ge=3)], "2"),
        (Report, '{"title": "t", "score": 11}'),
        (Holder, '{"report": {"title": "t", "score": 11}}'),
        ({}, "{"),
    ],
)
def test_text_that_does_not_fit_is_refused(tp: object, text: str) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        value_type(tp).decode(text)


def test_rule_14_bounds_reach_the_schema_whoever_wrote_them() -> None:
    assert schema_of(Annotated[int, msgspec.Meta(ge=3)])["minimum"] == 3
    assert schema_of(Annotated[int, Field(ge=3)])["minimum"] == 3
    assert schema_of(Report)["properties"]["score"] == {
        "maximum": 10,
        "minimum": 0,
        "title": "Score",
        "type": "integer",
    }
    deep = schema_of(dict[str, list[Annotated[int, Field(ge=3)]]])
    assert deep["additionalProperties"]["items"]["minimum"] == 3


def test_objects_of_a_type_take_no_other_properties_and_maps_do() -> None:
    assert schema_of(Report)["additionalProperties"] is False
    assert schema_of(Report)["$defs"]["Point"]["additionalProperties"] is False
    assert schema_of(dict[str, int])["additionalProperties"] == {"type": "integer"}


def test_case_29_a_property_named_like_a_keyword_is_only_a_name() -> None:
    odd = TypedDict("odd", {"$ref": int, "properties": int, "enum": int})
    schema = schema_of(odd)
    properties = schema["$defs"]["odd"]["properties"] if "$defs" in schema else schema["properties"]
    assert properties == {name: {"type": "integer"} for name in ("$ref", "properties", "enum")}


def test_scalars_and_closed_sets_are_written_plainly() -> None:
    assert isinstance(value_type(int).constraint, Regex)
    assert value_type(bool).constraint == Choices(("true", "false"))
    assert value_type(Color).constraint == Choices(("red", "blue"))
    assert value_type(Literal["a", 1]).constraint == Choices(("a", "1"))


@pytest.mark.parametrize(
    "tp",
    [Literal["1", 1], Literal["", "a"], Enum("Empty", []), None.__class__.__class__, object(), 3.5],
)
def test_types_without_a_form_are_refused(tp: object) -> None:
    with pytest.raises((ub.ConstraintError, TypeError)):
        value_type(tp)


@given(st.integers(-(10**17), 10**17))
def test_every_whole_number_satisfies_its_own_pattern(number: int) -> None:
    import re

    kind = value_type(int)
    assert isinstance(kind.constraint, Regex)
    assert re.fullmatch(kind.constraint.pattern, str(number))
    assert kind.decode(str(number)) == number


@given(st.decimals(-(10**9), 10**9, places=6, allow_nan=False))
def test_every_decimal_satisfies_the_pattern_of_float(number: Decimal) -> None:
    import re

    kind = value_type(float)
    assert isinstance(kind.constraint, Regex)
    text = f"{number:f}"
    assert re.fullmatch(kind.constraint.pattern, text)
    assert kind.decode(text) == float(text)


class _Plain:
    pass


@dataclasses.dataclass
class _Point:
    x: int


@dataclasses.dataclass(frozen=True)
class _FrozenPoint:
    x: int


def test_a_class_without_fields_is_told_what_to_make_it() -> None:
    with pytest.raises(ub.ConstraintError, match=r"_Plain.*make it a dataclass") as caught:
        value_type(_Plain)
    assert "schema_hook" not in str(caught.value), "umbel has no such thing"


@pytest.mark.parametrize("value", [_Point(1), _FrozenPoint(1), [1], 5])
def test_a_value_in_the_place_of_a_type_is_refused_as_that(value: object) -> None:
    with pytest.raises(ub.ConstraintError, match=r"schema takes .* or a type, such as"):
        value_type(value)


class Odd(Enum):
    THING = object()


class Unordered(Enum):
    THINGS = frozenset((1, 2))


@pytest.mark.parametrize("tp", [Odd, Unordered, Literal[b"bytes"]])
def test_a_member_that_json_lacks_is_named(tp: object) -> None:
    with pytest.raises(ConstraintError, match=r"has the member .*, which has no JSON form"):
        value_type(tp)


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "(?<!a)b", "a("])
def test_a_pattern_that_pydantic_refuses_is_refused_as_a_constraint(pattern: str) -> None:
    with pytest.raises(ConstraintError, match="can't be used"):
        value_type(Annotated[str, Field(pattern=pattern)])


def test_schemas_that_nest_too_deep_are_refused() -> None:
    deep: Any = {"type": "null"}
    for _ in range(100_000):
        deep = {"items": deep}
    for schema in (deep, '{"items":' * 20_000 + "{}" + "}" * 20_000):
        with pytest.raises(ub.ConstraintError, match="too deep"):
            value_type(schema)
