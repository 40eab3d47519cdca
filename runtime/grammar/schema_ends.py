"""Finds schemas without a finite value: a node that requires a node, a `$ref` circle, `false`.

An engine would generate such a value until it is cut off. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from umbel.lang.errors import ConstraintError

_MAX_ROUNDS = 100  # past this a schema counts as sound: only speed is lost


def check_ends(root: Any, schemas: list[dict[str, Any]], targets: dict[int, Any]) -> None:
    """Raise ConstraintError if no finite value can satisfy `root`.

    `schemas` are the subschemas in the order of a walk from the root, `targets` what their
    references lead to, by id. Looks at structure only: what it lets through may still be empty.
    """
    ending: set[int] = set()

    def ends(schema: Any) -> bool:
        return schema is not False and (not isinstance(schema, dict) or id(schema) in ending)

    for _ in range(_MAX_ROUNDS):
        before = len(ending)
        for schema in reversed(schemas):
            if id(schema) not in ending and all(map(ends, _needed(schema, targets))):
                any_of = [schema[k] for k in ("anyOf", "oneOf") if k in schema]
                if all(any(map(ends, options)) for options in any_of):
                    ending.add(id(schema))
        if len(ending) == before:
            break
    else:
        return
    if not ends(root):
        raise ConstraintError("no finite value can satisfy the schema")


def _needed(schema: dict[str, Any], targets: dict[int, Any]) -> Iterator[Any]:
    """Yield the subschemas of which every value holds at least one value."""
    if id(schema) in targets:
        yield targets[id(schema)]
    yield from schema.get("allOf", ())
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        yield from (properties[k] for k in schema.get("required", ()) if k in properties)
    elif schema.get("type") == "array" and schema.get("minItems", 0) > 0:
        items = schema.get("items", True)
        first = [*schema.get("prefixItems", ()), *(items if isinstance(items, list) else ())]
        yield first[0] if first else items
