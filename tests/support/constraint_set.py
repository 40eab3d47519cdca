"""Sixty constraints as programs have them, each with what says whether a text satisfies it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from umbel.lang.constraints import Constraint, JsonSchema, Regex
from umbel.lang.errors import ConstraintError
from umbel.runtime.grammar import validate_after

_SHORT = {"type": "string", "maxLength": 24}
_NAME = {"type": "string", "minLength": 1, "maxLength": 16, "pattern": "^[A-Z][a-z]+$"}


def _object(required: int | None = None, /, **properties: Any) -> dict[str, Any]:
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names if required is None else names[:required],
        "additionalProperties": False,
    }


def _list(items: Any, **bounds: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 4, **bounds}


_TREE = {
    "$defs": {
        "node": _object(
            1, name=_NAME, left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}
        ),
        "leaf": _object(value={"type": "integer", "minimum": -9, "maximum": 9}),
    },
    "$ref": "#/$defs/node",
}

SCHEMAS: dict[str, Any] = {
    "a short string": _SHORT,
    "a name": _NAME,
    "a whole number": {"type": "integer", "minimum": 0, "maximum": 120},
    "a negative number": {"type": "integer", "minimum": -500, "maximum": -7},
    "a price": {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.25},
    "an integer above": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2**55},
    "a multiple": {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 15},
    "a truth": {"type": "boolean"},
    "nothing": {"type": "null"},
    "a colour": {"enum": ["red", "green", "blue", None, 7, 1.5, [1, 2]]},
    "a constant": {"const": {"kind": "fixed", "values": [1, "two", None]}},
    "a date": {"type": "string", "format": "date"},
    "a moment": {"type": "string", "format": "date-time"},
    "an id": {"type": "string", "format": "uuid"},
    "an address": {"type": "string", "format": "ipv4"},
    "numbers": _list({"type": "integer", "minimum": 0, "maximum": 99}, minItems=2),
    "names": _list(_NAME, minItems=1),
    "a pair": {
        "type": "array",
        "prefixItems": [_NAME, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "a person": _object(name=_NAME, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "an optional field": _object(1, name=_NAME, note=_SHORT, done={"type": "boolean"}),
    "all optional": _object(0, a={"type": "boolean"}, b={"type": "null"}, c=_NAME),
    "nested": _object(user=_object(name=_NAME, tags=_list(_NAME)), ok={"type": "boolean"}),
    "a list of objects": _list(_object(id={"type": "integer", "minimum": 1, "maximum": 999})),
    "either": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, _NAME]},
    "one of two objects": {
        "oneOf": [
            _object(kind={"const": "cat"}, lives={"type": "integer", "minimum": 0, "maximum": 9}),
            _object(kind={"const": "dog"}, good={"type": "boolean"}),
        ]
    },
    "references": _TREE,
    "a code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "a quoted thing": {"type": "string", "pattern": '^["a-c\\\\]{1,6}$'},
    "eight fields": _object(**{f"field_{i}": {"enum": ["yes", "no", "unknown"]} for i in range(8)}),
    "a report": _object(
        title=_SHORT,
        severity={"enum": ["low", "medium", "high"]},
        score={"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5},
        people=_list(
            _object(name=_NAME, email={"type": "string", "pattern": "^[a-z]{1,8}@x.org$"})
        ),
    ),
}

REGEXES: list[str] = [
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    r"\d{1,3}(,\d{3}){0,3}",
    r"(\+\d{1,2} )?\(?\d{3}\)?[ -]\d{3}-\d{4}",
    r"[a-z0-9._]{1,20}@[a-z0-9]{1,12}\.(com|org|net)",
    r"(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}",
    r"#[0-9a-fA-F]{6}",
    r"(yes|no|maybe)",
    r"(foo|foobar|foobarbaz)",
    r"[A-Z][a-z]{2,10}( [A-Z][a-z]{2,10}){0,2}",
    r"-?(0|[1-9]\d{0,8})(\.\d{1,6})?",
    r"(a|b){0,30}abb",
    r"[ab]{3,9}c?",
    r"((red|green|blue)(, )?){1,4}",
    r"\w{1,12}(_\w{1,12}){0,3}",
    r"[^aeiou\n]{1,12}",
    r"\"[^\"\\\n]{0,20}\"",
    r"(GET|POST|PUT) /[a-z]{1,10}(/[a-z0-9]{1,10}){0,3}",
    r"v\d{1,2}\.\d{1,2}\.\d{1,2}(-(alpha|beta)\.\d)?",
    r"[01]{8}",
    r"(0x)?[0-9a-f]{1,16}",
    r"(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day",
    r"[IVX]{1,6}",
    r"[\u00e0-\u00ff]{1,6}",
    r"(\d{2}:){2}\d{2}",
    r"(?:x=\d{1,3};){1,5}",
    r"[A-Z]{3}-\d{4}|[a-z]{5}",
    r".{1,30}",
    r"\s?[a-z]{1,30}\.?",
    r"(ab?c?){2,4}d",
    r"\$\d{1,4}\.\d{2}",
]


@dataclass(frozen=True, slots=True)
class Checked:
    """A constraint with its oracle, which is no part of any grammar engine."""

    name: str
    constraint: Constraint
    allows: Callable[[str], bool]


def _of_schema(name: str, schema: Any) -> Checked:
    constraint = JsonSchema(json.dumps(schema))

    def allows(text: str) -> bool:
        try:
            validate_after(constraint, text)  # the jsonschema library
        except ConstraintError:
            return False
        return True

    return Checked(name, constraint, allows)


def _of_regex(pattern: str) -> Checked:
    compiled = re.compile(pattern, re.ASCII)
    return Checked(pattern, Regex(pattern), lambda text: compiled.fullmatch(text) is not None)


CONSTRAINTS = [
    *(_of_schema(name, schema) for name, schema in SCHEMAS.items()),
    *map(_of_regex, REGEXES),
]
