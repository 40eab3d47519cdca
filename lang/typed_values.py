"""Python types as constraints, and the way back from text to a value; runs no automaton.

Scalars and closed sets are written plainly (`7`, `true`, `high`), everything else as JSON.
Standard types need msgspec only; a pydantic model, or bounds in pydantic's form, use pydantic.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import types
import typing
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from functools import cache, lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from .constraints import Choices, Constraint, JsonSchema, Regex
from .errors import ConstraintError
from .json_text import unique_pairs
from .unicode_check import check_json, check_text

#: whole numbers as text: at most 18 digits, so that a model can't count for ever
INT_PATTERN = r"-?(0|[1-9][0-9]{0,17})"
FLOAT_PATTERN = INT_PATTERN + r"(\.[0-9]{1,17})?"
_SECONDS = r"[0-9]{1,5}(\.[0-9]{1,6})?S"
_MINUTES = rf"([0-9]{{1,4}}M({_SECONDS})?|{_SECONDS})"
_HOURS = rf"T([0-9]{{1,4}}H({_MINUTES})?|{_MINUTES})"
#: ISO 8601 without months and years, which have no one length
DURATION_PATTERN = rf"^-?P([0-9]{{1,6}}D({_HOURS})?|{_HOURS})$"


class ValueType(NamedTuple):
    """A type as a backend and a program see it."""

    constraint: Constraint
    decode: Callable[[str], Any]  # raises ValueError (or a subclass) for text that does not fit
    label: str


def value_type(schema: object) -> ValueType:
    """Return the constraint and the decoder of what `schema=` takes.

    That is a JSON schema (a dict, or JSON text) or a type: `int`, `float`, `bool`, `str`,
    `Literal`, `Enum`, dates, times, durations, `Decimal`, `UUID`, a dataclass, `TypedDict`,
    `NamedTuple`, pydantic model, `list[...]` and other containers, unions, and `Annotated` with
    bounds. Objects made from a type take no properties beyond the declared ones.

    Raises ConstraintError for anything else.
    """
    if isinstance(schema, dict | bool):
        return _from_json_schema(schema)
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema, object_pairs_hook=unique_pairs)
        except ConstraintError:
            raise
        except ValueError as error:
            raise ConstraintError(f"schema is not JSON: {error}", where=_where(error)) from None
        except RecursionError:
            raise ConstraintError("schema nests too deep to be read") from None
        return _from_json_schema(parsed, schema)
    try:
        return _from_type(schema)
    except TypeError:
        if not _is_unhashable(schema):
            raise
        raise ConstraintError(f"schema takes {_TAKEN}, not {schema!r}") from None


_TAKEN = "a JSON schema (dict or text) or a type, such as a dataclass or pydantic model itself"


def _where(error: ValueError) -> str:
    return f"position {error.pos}" if isinstance(error, json.JSONDecodeError) else ""


def _is_unhashable(schema: object) -> bool:
    try:
        hash(schema)
    except TypeError:
        return True
    return False


def _from_json_schema(schema: object, given: str | None = None) -> ValueType:
    """Check a schema. As it was `given` its numbers are exact, which floats may not be."""
    from .schema_check import check_json_schema  # a program without JSON schemas pays nothing

    if schema is False:
        raise ConstraintError("schema is `false`, which no value satisfies", where="#")
    if not isinstance(schema, dict | bool):
        raise ConstraintError(
            f"a JSON schema is an object, not {type(schema).__name__}: {schema!r}", where="#"
        )
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConstraintError(f"schema can't be written as JSON: {error}") from None
    except RecursionError:
        raise ConstraintError("schema nests too deep, or holds itself") from None
    check_json(schema, "schema")
    check_json_schema(text)
    return ValueType(JsonSchema(given or text), json.loads, "JSON")


@lru_cache(maxsize=512)
def _from_type(tp: Any) -> ValueType:
    scalar = _SCALARS.get(tp)
    if scalar is not None:
        return scalar
    if get_origin(tp) is Literal:
        return _from_options({_plain(v, tp): v for v in get_args(tp)}, len(get_args(tp)), tp)
    if isinstance(tp, type) and issubclass(tp, Enum):
        return _from_options({_plain(m.value, tp): m for m in tp}, len(list(tp)), tp)
    if tp is None or (isinstance(tp, type) and issubclass(tp, bytes | complex)):
        raise ConstraintError(f"schema {_label(tp)} has no JSON form")
    if not (isinstance(tp, type) or get_origin(tp) is not None):
        raise ConstraintError(f"schema takes {_TAKEN}, not {tp!r}")
    if _needs_pydantic(tp, set()):
        return _with_pydantic(tp)
    return _with_msgspec(tp)


def _plain(value: object, tp: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConstraintError(
            f"{_label(tp)} has the member {value!r}, which has no JSON form: {error}"
        ) from error


def _from_options(values: dict[str, Any], num_options: int, tp: object) -> ValueType:
    if not values:
        raise ConstraintError(f"{_label(tp)} has no members to choose from")
    if len(values) != num_options or "" in values:
        raise ConstraintError(f"{_label(tp)} has members that read the same, or an empty one")
    for text in values:
        check_text(text, f"the member {text!a} of {_label(tp)}")

    def decode(text: str) -> Any:
        if text not in values:
            raise ValueError(f"{text!r} is not one of {', '.join(values)}")
        return values[text]

    return ValueType(Choices(tuple(values)), decode, _label(tp))


def _decode_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text == "true"


def _decode_str(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, str):
        raise ValueError(f"{text!r} is not a JSON string")
    return value


#: what msgspec's schemas leave open or name by formats of their own
_JSON_FORMS: dict[type, dict[str, Any]] = {
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.time: {"type": "string", "format": "time"},
    datetime.timedelta: {"type": "string", "pattern": DURATION_PATTERN},
    Decimal: {"type": "string", "pattern": f"^{FLOAT_PATTERN}$"},  # a number would be rounded
}


def _from_json_form(tp: type) -> ValueType:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(tp)
    return ValueType(JsonSchema(json.dumps(_JSON_FORMS[tp])), decoder.decode, tp.__name__)


_SCALARS: dict[Any, ValueType] = {
    int: ValueType(Regex(INT_PATTERN), int, "int"),
    float: ValueType(Regex(FLOAT_PATTERN), float, "float"),
    bool: ValueType(Choices(("true", "false")), _decode_bool, "bool"),
    str: ValueType(JsonSchema('{"type": "string"}'), _decode_str, "str"),
    **{tp: _from_json_form(tp) for tp in _JSON_FORMS},
}


def _with_msgspec(tp: Any) -> ValueType:
    try:
        schema = msgspec.json.schema(tp)
        decoder = msgspec.json.Decoder(tp)
    except (TypeError, NameError, UnicodeError) as error:
        why = str(error)
        if "schema_hook" in why:  # msgspec's way out, which its last line says nothing of
            why = (
                f"{why.splitlines()[-1]}: make it a dataclass, a TypedDict, a NamedTuple or a "
                "pydantic model"
            )
        raise ConstraintError(f"schema {_label(tp)} can't be used: {why}") from error
    check_json(schema, f"the schema of {_label(tp)}")
    closed = _closed(schema, is_set_unique=False)
    return ValueType(JsonSchema(json.dumps(closed)), decoder.decode, _label(tp))


def _with_pydantic(tp: Any) -> ValueType:
    try:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError
        from pydantic_core import SchemaError
    except ImportError as error:
        raise ConstraintError(f"schema {_label(tp)} needs pydantic: install it") from error

    try:
        adapter = TypeAdapter(tp)
        schema = adapter.json_schema(schema_generator=_schema_generator())
    except (PydanticUserError, SchemaError, TypeError, UnicodeError) as error:
        raise ConstraintError(f"schema {_label(tp)} can't be used: {error}") from error
    check_json(schema, f"the schema of {_label(tp)}")
    return ValueType(JsonSchema(json.dumps(_closed(schema))), adapter.validate_json, _label(tp))


@cache
def _schema_generator() -> Any:
    """Return pydantic's maker of schemas, with forms that can be followed while generating."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def decimal_schema(self, schema: Any) -> dict[str, Any]:
            bounds = {"ge": "minimum", "gt": "exclusiveMinimum"}
            bounds |= {"le": "maximum", "lt": "exclusiveMaximum", "multiple_of": "multipleOf"}
            number = {bounds[key]: float(schema[key]) for key in bounds if key in schema}
            places, digits = schema.get("decimal_places"), schema.get("max_digits")
            if places is not None:
                number.setdefault("multipleOf", float(Decimal(1).scaleb(-places)))
            if digits is not None:
                limit = 10 ** (digits - (places or 0))
                if not {"minimum", "exclusiveMinimum"} & number.keys():
                    number["exclusiveMinimum"] = -limit
                if not {"maximum", "exclusiveMaximum"} & number.keys():
                    number["exclusiveMaximum"] = limit
            return {"type": "number", **number} if number else dict(_JSON_FORMS[Decimal])

        def timedelta_schema(self, schema: Any) -> dict[str, Any]:
            return dict(_JSON_FORMS[datetime.timedelta])

        def set_schema(self, schema: Any) -> dict[str, Any]:
            return _without_unique(super().set_schema(schema))

        def frozenset_schema(self, schema: Any) -> dict[str, Any]:
            return _without_unique(super().frozenset_schema(schema))

    return Generator


def _without_unique(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "uniqueItems"}


def _needs_pydantic(tp: Any, seen: set[int]) -> bool:
    """Say whether a type holds a pydantic model, or what msgspec's schema would leave open."""
    if id(tp) in seen:
        return False
    seen.add(id(tp))
    if any(tp is kind for kind in _JSON_FORMS):
        return True
    if hasattr(tp, "__pydantic_validator__") or hasattr(tp, "__get_pydantic_core_schema__"):
        return True
    inner = list(get_args(tp))
    if get_origin(tp) is Annotated:
        metadata = tp.__metadata__
        if any(not isinstance(item, msgspec.Meta | str) for item in metadata):
            return True
        inner = inner[:1]
    elif get_origin(tp) is Literal:
        return False
    elif isinstance(tp, type) and (dataclasses.is_dataclass(tp) or _has_fields(tp)):
        try:
            inner += typing.get_type_hints(tp, include_extras=True).values()
        except NameError as error:
            raise ConstraintError(f"schema {_label(tp)} can't be used: {error}") from error
    return any(_needs_pydantic(item, seen) for item in inner)


def _has_fields(tp: type) -> bool:
    return typing.is_typeddict(tp) or hasattr(tp, "_fields") or hasattr(tp, "__struct_fields__")


def _closed(schema: Any, is_set_unique: bool = True) -> Any:
    """Close every object whose properties are listed; a type has no others.

    A set takes an item twice, too, where its schema need not say `uniqueItems`.
    """
    if isinstance(schema, list):
        return [_closed(item, is_set_unique) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, dict):
            closed[key] = {name: _closed(item, is_set_unique) for name, item in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            closed[key] = value
        elif is_set_unique or key != "uniqueItems":
            closed[key] = _closed(value, is_set_unique)
    if schema.get("type") == "object" and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _label(tp: object) -> str:
    if isinstance(tp, type) and not isinstance(tp, types.GenericAlias):
        return tp.__qualname__
    if get_origin(tp) in (Union, types.UnionType):
        return " | ".join(_label(arg) for arg in get_args(tp))
    return str(tp).replace("typing.", "")
