"""The front door for JSON schemas: strict parsing, meta-schema, references, keywords.

Knows what llguidance enforces, so that what it would ignore or refuse is found here with its JSON
pointer; compiles nothing. `validate_after` checks finished text against the whole schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, cast

import jsonschema
import jsonschema.validators
import referencing
import referencing.exceptions
import referencing.jsonschema

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import ConstraintError

from . import regex_syntax

MAX_SCHEMA_CHARS = 1_000_000
MAX_JSON_DEPTH = 64
MAX_SUBSCHEMAS = 20_000
MAX_EXACT_INTEGER = 2**53

JsonValue = Any  # what json.loads gives: dict, list, str, int, float, bool, None
Schema = dict[str, JsonValue] | bool

_DRAFTS = {
    "http://json-schema.org/draft-04/schema": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
}
_DEFAULT_DRAFT = "https://json-schema.org/draft/2020-12/schema"

_ONE_SCHEMA = (
    "additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
# Definitions are visited where a reference leads to them: an unused one forbids nothing.
_SCHEMA_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")

# Keywords that llguidance 1.9 can't follow while generating.
_NOT_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems",
    "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_HARMLESS_WITHOUT = {
    "then": "if",
    "else": "if",
    "minContains": "contains",
    "maxContains": "contains",
}
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


@dataclass(frozen=True, slots=True)
class Unenforced:
    """A keyword that can't be followed while generating, and where it is."""

    pointer: str
    keyword: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckedSchema:
    """A schema that is sound by itself, and what llguidance can't enforce of it.

    `schema` is for engines: without `x-guidance`, patterns spelled out for a whole match.
    `source` is as given.
    """

    schema: Schema
    source: Schema
    draft: str
    unenforced: tuple[Unenforced, ...]


def parse_json(text: str, what: str = "schema") -> JsonValue:
    """Parse JSON strictly. Raises ConstraintError.

    Refused: NaN and infinities, duplicate keys, numbers that a float can't hold as written,
    nesting deeper than 64, more than a million characters.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        raise ConstraintError(
            f"{what} has {len(text)} characters; at most {MAX_SCHEMA_CHARS} are taken"
        )
    _check_depth(text, what)
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_exact_float,
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConstraintError(f"{what} is not JSON: {error.msg} at {where}", where=where) from error
    except ConstraintError:
        raise
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ConstraintError(f"{what} is not usable JSON: {error}") from error


def check_schema(text: str) -> CheckedSchema:
    """Parse and check a schema given as JSON text. Raises ConstraintError with a JSON pointer."""
    source = parse_json(text)
    if not isinstance(source, dict | bool):
        raise ConstraintError(f"a schema is an object or a boolean, not {type(source).__name__}")
    draft = _draft(source)
    _check_meta_schema(source, draft)
    schema = parse_json(text)  # a second copy, to be rewritten for engines
    walk = _Walk(draft, schema)
    walk.run()
    return CheckedSchema(schema, source, draft, tuple(walk.unenforced))


def without_unenforced(checked: CheckedSchema) -> Schema:
    """Return the engines' schema without the keywords that can't be enforced."""
    schema = json.loads(json.dumps(checked.schema))
    for item in checked.unenforced:
        owner: JsonValue = schema
        *path, last = [unescape_pointer(part) for part in item.pointer.split("/")[1:]]
        for part in path:
            owner = owner[int(part)] if isinstance(owner, list) else owner.get(part)
            if owner is None:
                break
        if isinstance(owner, dict):
            owner.pop(last, None)
    return cast(Schema, schema)


def validate_after(constraint: JsonSchema, text: str) -> JsonValue:
    """Return the value of a finished text; raise ConstraintError if the schema forbids it.

    The pointer in `where` leads to the offending part of the *value*.
    """
    value = parse_json(text, "value")
    checked = check_schema(constraint.schema)
    validator = _validator_class(checked.draft)(
        checked.source,
        registry=referencing.Registry(),
        format_checker=_validator_class(checked.draft).FORMAT_CHECKER,
    )
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is not None:
        raise ConstraintError(
            f"value does not fit the schema: {_short(error.message)}",
            where=to_pointer(error.absolute_path),
        )
    return value


def to_pointer(path: Any) -> str:
    """Return the JSON pointer of a path of keys and indices."""
    return "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in path)


def unescape_pointer(part: str) -> str:
    """Return one part of a JSON pointer as the key it stands for."""
    return part.replace("~1", "/").replace("~0", "~")


def _check_depth(text: str, what: str) -> None:
    depth, in_string, escaped = 0, False, False
    for i, char in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise ConstraintError(
                    f"{what} nests deeper than {MAX_JSON_DEPTH} (character {i})", where=str(i)
                )
        elif char in "]}":
            depth -= 1


def _unique_pairs(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConstraintError(f"duplicate key {twice!r} in an object", where=twice)
    return result


def _refuse_constant(name: str) -> JsonValue:
    raise ConstraintError(f"{name} is not JSON")


def _exact_float(text: str) -> float:
    value = float(text)
    if math.isinf(value) or Decimal(text) != Decimal(repr(value)):
        raise ConstraintError(f"the number {text} has more digits than a 64-bit float holds")
    return value


def _draft(schema: Schema) -> str:
    if isinstance(schema, bool) or "$schema" not in schema:
        return _DEFAULT_DRAFT
    uri = schema["$schema"]
    draft = uri.rstrip("#") if isinstance(uri, str) else ""
    if draft not in _DRAFTS:
        raise ConstraintError(
            f"unknown $schema {uri!r}: known are {', '.join(sorted(_DRAFTS))}", where="/$schema"
        )
    return draft


def _validator_class(draft: str) -> Any:
    return _DRAFTS[draft]


def _check_meta_schema(schema: Schema, draft: str) -> None:
    cls = _validator_class(draft)
    meta = cls(cls.META_SCHEMA)
    error = jsonschema.exceptions.best_match(meta.iter_errors(schema))
    if error is not None:
        pointer = to_pointer(error.absolute_path)
        raise ConstraintError(
            f"schema is not valid at {pointer or 'its root'}: {_short(error.message)}",
            where=pointer,
        )


def _short(message: str) -> str:
    return message if len(message) <= 300 else message[:297] + "..."


@dataclass(slots=True)
class _Walk:
    """Visits every subschema once, references included; notes what can't be enforced."""

    draft: str
    root: Schema
    unenforced: list[Unenforced] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    def run(self) -> None:
        specification = referencing.jsonschema.specification_with(self.draft)
        resource = referencing.Resource(contents=self.root, specification=specification)
        registry: Any = referencing.Registry().with_resource("", resource).crawl()
        identity = resource.id()
        if identity:
            registry = registry.with_resource(identity, resource).crawl()
        self._visit(self.root, "", registry.resolver(identity or ""), specification)

    def _visit(self, schema: JsonValue, pointer: str, resolver: Any, specification: Any) -> None:
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if len(self._seen) > MAX_SUBSCHEMAS:
            raise ConstraintError(f"schema has more than {MAX_SUBSCHEMAS} subschemas")
        schema.pop("x-guidance", None)
        if pointer:
            resource = specification.create_resource(schema)
            resolver = resolver.in_subresource(resource)
        self._note_keywords(schema, pointer)
        for keyword, part, child in _children(schema):
            child_pointer = f"{pointer}/{keyword}" + to_pointer(part)
            self._visit(child, child_pointer, resolver, specification)
        ref = schema.get("$ref")
        if isinstance(ref, str):
            self._follow(ref, f"{pointer}/$ref", resolver, specification)

    def _follow(self, ref: str, pointer: str, resolver: Any, specification: Any) -> None:
        try:
            resolved = resolver.lookup(ref)
        except (referencing.exceptions.Unresolvable, LookupError, ValueError) as error:
            where = (
                "in this schema" if ref.startswith("#") else "here: remote schemas aren't loaded"
            )
            raise ConstraintError(f"$ref {ref!r} is not found {where}", where=pointer) from error
        if not isinstance(resolved.contents, dict | bool):
            raise ConstraintError(f"$ref {ref!r} does not lead to a schema", where=pointer)
        target = ref[1:] if ref.startswith("#/") or ref == "#" else pointer
        self._visit(resolved.contents, target, resolved.resolver, specification)

    def _note(self, pointer: str, keyword: str, reason: str) -> None:
        self.unenforced.append(Unenforced(f"{pointer}/{keyword}", keyword, reason))

    def _note_keywords(self, schema: dict[str, JsonValue], pointer: str) -> None:
        for keyword in _NOT_ENFORCED:
            partner = _HARMLESS_WITHOUT.get(keyword)
            if keyword not in schema or (partner and partner not in schema):
                schema.pop(keyword, None)
            elif keyword == "uniqueItems" and schema[keyword] is False:
                del schema[keyword]
            elif keyword.startswith("unevaluated") and schema[keyword] is True:
                del schema[keyword]
            else:
                self._note(pointer, keyword, f"`{keyword}` can't be followed while generating")
        if "format" in schema and schema["format"] not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            self._note(pointer, "format", f"format {schema['format']!r} is not one of {known}")
        self._note_patterns(schema, pointer)
        for keyword in (*_NUMERIC, "const", "enum"):
            if keyword in schema and any(_is_inexact(n) for n in _numbers(schema[keyword])):
                self._note(pointer, keyword, "an integer beyond 2^53 can't be held exactly")

    def _note_patterns(self, schema: dict[str, JsonValue], pointer: str) -> None:
        if isinstance(schema.get("pattern"), str):
            try:
                node = regex_syntax.parse_search(schema["pattern"])
                schema["pattern"] = f"^(?:{regex_syntax.render(node)})$"
            except (ConstraintError, ValueError) as error:
                self._note(pointer, "pattern", f"pattern {schema['pattern']!r}: {error}")
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict):
            for pattern in patterns:
                try:
                    regex_syntax.parse_search(pattern)
                except ConstraintError as error:
                    self._note(pointer, "patternProperties", f"pattern {pattern!r}: {error}")


def _children(schema: dict[str, JsonValue]) -> Iterator[tuple[str, tuple[Any, ...], JsonValue]]:
    """Yield (keyword, path under it, subschema) for each direct subschema."""
    for keyword in _ONE_SCHEMA:
        if isinstance(schema.get(keyword), dict):
            yield keyword, (), schema[keyword]
    for keyword in _SCHEMA_LISTS:
        if isinstance(schema.get(keyword), list):
            for i, child in enumerate(schema[keyword]):
                yield keyword, (i,), child
    for keyword in _SCHEMA_MAPS:
        if isinstance(schema.get(keyword), dict):
            for key, child in schema[keyword].items():
                yield keyword, (key,), child


def _numbers(value: JsonValue) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _is_inexact(value: int) -> bool:
    return abs(value) > MAX_EXACT_INTEGER
