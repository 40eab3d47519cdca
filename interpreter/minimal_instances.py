"""Makes a short value that satisfies a constraint, where that is easy; searches for nothing.

For scripted answers that nobody scripted. A constraint that this can't follow is a ValueError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from re import _constants, _parser  # type: ignore[attr-defined]  # the only regex parser there is
from typing import Any

from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex


def minimal_instance(constraint: Constraint) -> str:
    """Return a short text that satisfies the constraint; raises ValueError if none was found."""
    match constraint:
        case Choices(choices=choices):
            return choices[0]
        case Regex(pattern=pattern):
            return minimal_match(pattern)
        case JsonSchema(schema=schema):
            root = json.loads(schema)
            return json.dumps(minimal_json(root, root))
        case Grammar():
            raise ValueError("a grammar needs a scripted answer")


def minimal_match(pattern: str) -> str:
    """Return a short string that `re.fullmatch` accepts."""
    found = _match_items(_parser.parse(pattern))
    if re.fullmatch(pattern, found) is None:
        raise ValueError(f"regex {pattern!r} needs a scripted answer")
    return found


def _match_items(items: Any) -> str:
    return "".join(_match_item(str(op), value) for op, value in items)


def _match_item(op: str, value: Any) -> str:
    match op:
        case "LITERAL":
            return chr(value)
        case "NOT_LITERAL":
            return "a" if chr(value) != "a" else "b"
        case "ANY":
            return "a"
        case "IN":
            return _match_set(value)
        case "BRANCH":
            return min((_match_items(branch) for branch in value[1]), key=len)
        case "SUBPATTERN":
            return _match_items(value[-1])
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, _, inner = value
            return _match_items(inner) * int(least) if least else ""
        case "AT":
            return ""
        case _:
            raise ValueError(f"a regex with {op} needs a scripted answer")


def _match_set(members: Any) -> str:
    if members[0][0] is _constants.NEGATE:
        parts = members[1:]
        return next(c for c in "ab0 -_.~\n" if not any(_in_part(c, part) for part in parts))
    op, value = members[0]
    if str(op) == "LITERAL":
        return chr(value)
    if str(op) == "RANGE":
        return chr(value[0])
    return next(c for c in "a0 -" if _in_part(c, (op, value)))


def _in_part(char: str, part: Any) -> bool:
    op, value = str(part[0]), part[1]
    if op == "LITERAL":
        return ord(char) == int(value)
    if op == "RANGE":
        return bool(value[0] <= ord(char) <= value[1])
    classes = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
    _, negation, name = str(value).rpartition("NOT_") if "NOT_" in str(value) else ("", "", "")
    name = name or str(value).removeprefix("CATEGORY_")
    return (re.match(classes[name], char) is None) == bool(negation)


def minimal_json(schema: Any, root: Any, depth: int = 0) -> Any:
    """Return a small value under a JSON schema; raises ValueError for what it can't follow."""
    if depth > 32:
        raise ValueError("a schema without a finite small value needs a scripted answer")
    if schema is True or schema == {}:
        return {}
    if schema is False:
        raise ValueError("schema `false` has no values")
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "$ref" in schema:
        return minimal_json(_resolve(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _first_that_ends(schema[key], root, depth)
    if len(schema.get("allOf", ())) == 1:
        return minimal_json(schema["allOf"][0], root, depth + 1)
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        return _first_that_ends([{**schema, "type": one} for one in kind], root, depth)
    match kind:
        case "object":
            properties: Mapping[str, Any] = schema.get("properties", {})
            required = schema.get("required", ())
            return {
                name: minimal_json(properties.get(name, {}), root, depth + 1) for name in required
            }
        case "array":
            fixed = schema.get("prefixItems", [])
            size = max(schema.get("minItems", 0), 0)
            kinds = [*fixed, *[schema.get("items", {})] * size][:size]
            return [minimal_json(kind, root, depth + 1) for kind in kinds]
        case "string":
            if "pattern" in schema:
                return minimal_match(schema["pattern"].removeprefix("^").removesuffix("$"))
            return "a" * schema.get("minLength", 0)
        case "integer" | "number":
            return _number(schema, whole=kind == "integer")
        case "boolean":
            return False
        case "null":
            return None
        case _:
            raise ValueError(f"a schema of type {kind!r} needs a scripted answer")


def _first_that_ends(options: list[Any], root: Any, depth: int) -> Any:
    for option in options:
        try:
            return minimal_json(option, root, depth + 1)
        except ValueError:
            continue
    raise ValueError("a schema without a small value in any option needs a scripted answer")


def _number(schema: Mapping[str, Any], *, whole: bool) -> int | float:
    step = 1 if whole else 0.5
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    candidates: list[Any] = [0]
    if low is not None:
        candidates += [low, low + step]
    if high is not None:
        candidates += [high, high - step]
    for value in candidates:
        is_inside = (
            value >= schema.get("minimum", value)
            and value <= schema.get("maximum", value)
            and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        )
        if is_inside and value % schema.get("multipleOf", 1 if whole else value or 1) == 0:
            return int(value) if whole else value
    raise ValueError("a schema with these bounds needs a scripted answer")


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        raise ValueError(f"$ref {reference!r} needs a scripted answer")
    found = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found[int(name)] if isinstance(found, list) else found[name]
    return found
