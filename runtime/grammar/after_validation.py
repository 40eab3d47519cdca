"""Checks a finished value against its whole schema: what `strict=False` leaves to the end.

Knows nothing of tokens or engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import jsonschema.exceptions
import jsonschema.validators
import jsonschema_specifications

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import InvalidValueError

from .json_schema import check_schema, parse_json, says_string, shorten, to_pointer, validator_class


def validate_after(constraint: JsonSchema, text: str) -> Any:
    """Return the value of a finished text; raise InvalidValueError if the schema forbids it.

    A text that is no JSON raises ConstraintError. The pointer in `where` leads to the offending
    part of the *value*. A `format` counts where the schema's own `type` names strings; elsewhere it
    is an annotation, as the standard has it.
    """
    value = parse_json(text, "value", exact=False)  # a model writes more digits than count
    checked = check_schema(constraint.schema, strict=False)
    plain = validator_class(checked.draft)
    extend: Any = jsonschema.validators.extend  # its stub has no types
    cls = extend(plain, {"format": _format})
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


def _format(
    validator: Any, name: str, instance: Any, schema: dict[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and says_string(schema):
        try:
            validator.format_checker.check(instance, name)
        except jsonschema.exceptions.FormatError as error:
            yield jsonschema.ValidationError(error.message, cause=error.cause)
