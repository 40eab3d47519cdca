"""Random JSON schemas, and instances that are often valid and often just not."""

from __future__ import annotations

import random
from typing import Any

_KEYS = ("name", "age", "a", "b", 'k"q', "é")
_STRINGS = ("", "a", "ab", "name", 'q"\\', "é", "日本", "12", "2024-02-29", "x" * 9, "a\nb", "😀")
_NUMBERS = (0, 1, -1, 2, 7, 12, 100, -5, 0.5, -1.25, 10**18, 1e3)
_PATTERNS = ("^a", "b$", "^[a-z]+$", r"\d", "a.b", "^(ab|é)*$", "[^a]")


def random_schema(rng: random.Random, depth: int) -> Any:
    """Return a schema whose subschemas nest at most `depth` deep; most are regular."""
    kinds = ["string", "integer", "number", "simple", "enum", "const"]
    if depth > 0:
        kinds += ["object", "object", "array", "anyOf", "oneOf", "allOf", "ref", "any", "rare"]
    match rng.choice(kinds):
        case "string":
            return {"type": "string", **_some(rng, {
                "minLength": rng.randrange(3), "maxLength": rng.randrange(2, 8),
                "pattern": rng.choice(_PATTERNS), "format": rng.choice(["date", "uuid", "ipv4"]),
            }, 0.3)}  # fmt: skip
        case "integer":
            return {"type": "integer", **_some(rng, {
                "minimum": rng.choice((-100, -1, 0, 3, 10**17)),
                "maximum": rng.choice((0, 9, 12, 255, 10**19)),
                "exclusiveMinimum": rng.choice((-2, 0)), "exclusiveMaximum": rng.choice((5, 1000)),
                "multipleOf": rng.choice((1, 5)),
            }, 0.3)}  # fmt: skip
        case "number":
            bounds = {"minimum": rng.choice((-1.5, 0)), "maximum": rng.choice((0.5, 10))}
            return {"type": "number", **_some(rng, bounds, 0.3)}
        case "simple":
            return {
                "type": rng.choice(["null", "boolean", ["string", "null"], ["integer", "boolean"]])
            }
        case "enum":
            return {
                "enum": [
                    *{str(v): v for v in rng.choices((*_STRINGS, *_NUMBERS, None), k=3)}.values()
                ]
            }
        case "const":
            return {"const": random_value(rng, 1)}
        case "object":
            return _object(rng, depth)
        case "array":
            bounds = {"minItems": rng.randrange(3), "maxItems": rng.randrange(1, 4)}
            return {"type": "array", "items": random_schema(rng, depth - 1),
                    **_some(rng, {**bounds, "prefixItems": [random_schema(rng, depth - 1)],
                                  "uniqueItems": True}, 0.3)}  # fmt: skip
        case "ref":
            return {"$defs": {"d": random_schema(rng, depth - 1)}, "$ref": "#/$defs/d"}
        case "any":
            return rng.choice([True, {}, {"not": random_schema(rng, 0)}])
        case "rare":
            keyword = rng.choice(["if", "contains", "propertyNames", "dependentRequired"])
            return {keyword: {"a": ["b"]} if keyword[0] == "d" else random_schema(rng, 0)}
        case keyword:
            return {keyword: [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(_KEYS, rng.randrange(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: random_schema(rng, depth - 1) for key in keys},
        "required": [key for key in keys if rng.random() < 0.5],
    }
    if rng.random() < 0.75:
        schema["additionalProperties"] = False
    return schema


def _some(rng: random.Random, keywords: dict[str, Any], share: float) -> dict[str, Any]:
    return {k: v for k, v in keywords.items() if rng.random() < share}


def random_value(rng: random.Random, depth: int) -> Any:
    """Return any JSON value."""
    kind = rng.randrange(6 if depth > 0 else 4)
    if kind < 2:
        return rng.choice((*_STRINGS, *_NUMBERS))
    if kind < 4:
        return rng.choice((None, True, False, rng.choice(_NUMBERS)))
    if kind == 4:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {rng.choice(_KEYS): random_value(rng, depth - 1) for _ in range(rng.randrange(3))}


def random_instance(rng: random.Random, schema: Any, root: Any = None) -> Any:
    """Return a value that follows the schema's outline, with a slip now and then."""
    root = schema if root is None else root
    if rng.random() < 0.08 or not isinstance(schema, dict):
        return random_value(rng, 2)
    if "$ref" in schema:
        return random_instance(rng, schema["$defs"]["d"], root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return random_instance(rng, rng.choice(schema[keyword]), root)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = rng.choice(kind)
    match kind:
        case "string":
            return rng.choice(_STRINGS)
        case "integer":
            edges = [
                schema.get(k, 3)
                for k in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            ]
            return rng.choice(edges) + rng.choice((-1, 0, 0, 1))
        case "number":
            return rng.choice(_NUMBERS)
        case "null":
            return None
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [random_instance(rng, schema["items"], root) for _ in range(rng.randrange(4))]
        case "object":
            required = schema.get("required", ())
            return {
                key: random_instance(rng, child, root)
                for key, child in schema["properties"].items()
                if rng.random() < (0.97 if key in required else 0.5)
            }
    return random_value(rng, 2)
