"""Checks a finished value against its whole schema: what `strict=False` leaves to the end.

Knows nothing of tokens or engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import jsonschema.exceptions
import jsonschema.validators
import jsonschema_specifications
import regex

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import ConstraintError, InvalidValueError

from .json_schema import check_schema, parse_json, says_string, shorten, to_pointer, validator_class

# A value is checked on the engine's thread: patterns that explode must fail its node only.
_MAX_SECONDS = 1.0

_Errors = Iterator[jsonschema.ValidationError]


def validate_after(constraint: JsonSchema, text: str) -> Any:
    """Return the value of a finished text; raise InvalidValueError if the schema forbids it.

    A text that is no JSON raises ConstraintError, as does a pattern that can't be searched for, or
    not in time. The pointer in `where` leads to the offending part of the *value*. A `format`
    counts where the schema's own `type` names strings; elsewhere it is an annotation, as the
    standard has it.
    """
    value = parse_json(text, "value", exact=False)  # a model writes more digits than count
    checked = check_schema(constraint.schema, strict=False)
    plain = validator_class(checked.draft)
    patterns = _Patterns(plain.VALIDATORS, time.monotonic() + _MAX_SECONDS)
    extend: Any = jsonschema.validators.extend  # its stub has no types
    cls = extend(plain, {"format": _format, **patterns.keywords})
    validator = cls(
        checked.source,
        registry=jsonschema_specifications.REGISTRY,
        format_checker=plain.FORMAT_CHECKER,
    )
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is not None:
        raise InvalidValueError(
            f"value does not fit the schema: {shorten(error.message)}",
            where=to_pointer(error.absolute_path),
            text=text,
        )
    return value


class _Patterns:
    """The keywords that search for patterns, all of them together until a deadline.

    They search with a library that keeps time, and that knows what the standard's own dialect has
    and Python's doesn't.
    """

    def __init__(self, plain: dict[str, Any], deadline: float) -> None:
        self._additional = plain["additionalProperties"]
        self._deadline = deadline
        self.keywords: dict[str, Callable[..., _Errors]] = {
            "pattern": self._pattern,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
        }
        if "unevaluatedProperties" in plain:  # not in older drafts
            self._unevaluated = plain["unevaluatedProperties"]
            self.keywords["unevaluatedProperties"] = self._unevaluated_properties

    def _finds(self, pattern: str, text: str) -> bool:
        try:
            seconds = max(self._deadline - time.monotonic(), 1e-3)
            return regex.search(pattern, text, timeout=seconds) is not None
        except regex.error as error:
            raise ConstraintError(f"pattern {pattern!r} can't be checked: {error}") from None
        except TimeoutError:
            raise ConstraintError(
                f"checking pattern {pattern!r} took more than {_MAX_SECONDS:g} s: simplify it"
            ) from None

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> _Errors:
        if validator.is_type(instance, "string") and not self._finds(pattern, instance):
            yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")

    def _pattern_properties(
        self, validator: Any, patterns: dict[str, Any], instance: Any, schema: Any
    ) -> _Errors:
        if validator.is_type(instance, "object"):
            for pattern, inner in patterns.items():
                for key, value in instance.items():
                    if self._finds(pattern, key):
                        yield from validator.descend(value, inner, path=key, schema_path=pattern)

    def _additional_properties(
        self, validator: Any, rest: Any, instance: Any, schema: dict[str, Any]
    ) -> _Errors:
        patterns = schema.get("patternProperties", {})
        if patterns and validator.is_type(instance, "object"):
            instance = {
                key: value
                for key, value in instance.items()
                if not any(self._finds(pattern, key) for pattern in patterns)
            }
            schema = {key: schema[key] for key in schema if key != "patternProperties"}
        yield from self._additional(validator, rest, instance, schema)

    def _unevaluated_properties(
        self, validator: Any, rest: Any, instance: Any, schema: dict[str, Any]
    ) -> _Errors:
        patterns = schema.get("patternProperties", {})
        if patterns and validator.is_type(instance, "object"):
            # by name: the library would search for the patterns itself, for as long as that takes
            found = {key: True for key in instance if any(self._finds(p, key) for p in patterns)}
            schema = {key: schema[key] for key in schema if key != "patternProperties"}
            schema["properties"] = found | schema.get("properties", {})
        yield from self._unevaluated(validator, rest, instance, schema)


def _format(validator: Any, name: str, instance: Any, schema: dict[str, Any]) -> _Errors:
    if isinstance(instance, str) and says_string(schema):
        try:
            validator.format_checker.check(instance, name)
        except jsonschema.exceptions.FormatError as error:
            yield jsonschema.ValidationError(error.message, cause=error.cause)
