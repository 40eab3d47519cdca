"""The front door for JSON schemas: strict parsing, meta-schema, references, keywords.

Knows what llguidance enforces, so that what it would ignore or refuse is found here with its JSON
pointer. Compiles nothing, and judges no values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import jsonschema
import jsonschema.exceptions
import jsonschema.validators
import jsonschema_specifications
import referencing
import referencing.exceptions
import referencing.jsonschema

from umbel.lang import regex_parser, regex_syntax
from umbel.lang.errors import ConstraintError
from umbel.lang.json_text import unique_pairs
from umbel.lang.schema_check import DRAFTS, NEWEST, takes_type
from umbel.lang.unicode_check import check_json

from .schema_ends import check_ends

MAX_SCHEMA_CHARS = 1_000_000
MAX_JSON_DEPTH = 64
MAX_SUBSCHEMAS = 20_000
MAX_EXACT_INTEGER = 2**53
MAX_COUNT = 2**63 - 1

JsonValue = Any  # what json.loads gives: dict, list, str, int, float, bool, None
Schema = dict[str, JsonValue] | bool

_DRAFTS: dict[str, Any] = {
    uri: jsonschema.validators.validator_for({"$schema": uri}) for uri in DRAFTS
}
_DEFAULT_DRAFT = next(uri for uri, draft in DRAFTS.items() if draft == NEWEST)

_ONE_SCHEMA = (
    "additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema",
)  # fmt: skip
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
# Definitions are visited where a reference leads to them: an unused one forbids nothing.
_SCHEMA_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies")

# Keywords that llguidance 1.9 can't follow while generating.
_NOT_ENFORCED = (
    "not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef",
    "$recursiveRef",
)  # fmt: skip
# Keywords that mean nothing without another one.
_PARTNERS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "minContains", "maxContains",
)  # fmt: skip
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
    places: dict[str, list[str]]  # each keyword's pointers

    @property
    def has_prefix_items(self) -> bool:
        """Whether `prefixItems` is a keyword of the schema's draft."""
        return _has_prefix_items(self.draft)

    def places_of(self, message: str) -> list[str]:
        """Return the pointers of the first keyword that an engine's message names; [] for none."""
        named = (self.places.get(word) for word in re.findall(r"[$A-Za-z]+", message))
        return next((places for places in named if places is not None), [])


def parse_json(text: str, what: str = "schema", *, exact: bool = True) -> JsonValue:
    """Parse JSON strictly. Raises ConstraintError.

    Refused: NaN and infinities, duplicate keys, nesting deeper than 64, more than a million
    characters; and, unless `exact` is False, numbers that a float can't hold as written.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        raise ConstraintError(
            f"{what} has {len(text)} characters; at most {MAX_SCHEMA_CHARS} are taken"
        )
    _check_depth(text, what)
    try:
        return json.loads(
            text,
            object_pairs_hook=unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_exact_float if exact else float,
        )
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConstraintError(f"{what} is not JSON: {error.msg} at {where}", where=where) from error
    except ConstraintError:
        raise
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ConstraintError(f"{what} is not usable JSON: {error}") from error


def check_schema(text: str, *, strict: bool = True) -> CheckedSchema:
    """Parse and check a schema given as JSON text. Raises ConstraintError with a JSON pointer.

    With `strict=False` the engines' schema lacks the keywords that can't be enforced, and `format`
    counts only beside `type: string`: elsewhere it is an annotation, as the standard has it.
    """
    source = parse_json(text)
    if not isinstance(source, dict | bool):
        raise ConstraintError(f"a schema is an object or a boolean, not {type(source).__name__}")
    check_json(source, "schema")
    draft = _draft(source)
    _check_meta_schema(source, draft)
    schema = parse_json(text)  # a second copy, to be rewritten for engines
    walk = _Walk(draft, schema, drop=not strict)
    walk.run()
    return CheckedSchema(schema, source, draft, tuple(walk.unenforced), walk.places)


def validator_class(draft: str) -> Any:
    """Return the jsonschema class for a draft's URI."""
    return _DRAFTS[draft]


def _has_prefix_items(draft: str) -> bool:
    return "prefixItems" in _DRAFTS[draft].VALIDATORS


def says_string(schema: JsonValue) -> bool:
    """Whether a schema's own `type` names strings."""
    types = schema.get("type", ())
    return types == "string" or (isinstance(types, list) and "string" in types)


def to_pointer(path: Any) -> str:
    """Return the JSON pointer of a path of keys and indices."""
    return "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in path)


def unescape_pointer(part: str) -> str:
    """Return one part of a JSON pointer as the key it stands for."""
    return part.replace("~1", "/").replace("~0", "~")


def without_keyword(schema: JsonValue, pointer: str) -> JsonValue:
    """Return a schema without the keyword at a pointer; as it is, where the pointer leads nowhere.

    Only the objects and lists on the way are copied.
    """
    part, _, rest = pointer[1:].partition("/")
    key: Any = unescape_pointer(part)
    if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
        key = int(key)
    elif not isinstance(schema, dict) or key not in schema:
        return schema
    copy = schema.copy()
    if rest:
        copy[key] = without_keyword(schema[key], f"/{rest}")
    else:
        del copy[key]
    return copy


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


def _check_meta_schema(schema: Schema, draft: str) -> None:
    cls = validator_class(draft)
    meta = cls(cls.META_SCHEMA)
    error = jsonschema.exceptions.best_match(meta.iter_errors(schema))
    if error is not None:
        pointer = to_pointer(error.absolute_path)
        raise ConstraintError(
            f"schema is not valid at {pointer or 'its root'}: {shorten(error.message)}",
            where=pointer,
        )


def shorten(message: str) -> str:
    """Return a message short enough for an error."""
    return message if len(message) <= 300 else message[:297] + "..."


class _Place(NamedTuple):
    """A subschema on the walk."""

    schema: JsonValue
    pointer: str
    resolver: Any


class _Walk:
    """Visits every subschema once, references included; notes what can't be enforced.

    Rewrites the schema for llguidance on the way, and with `drop` takes out what it notes.
    """

    def __init__(self, draft: str, root: Schema, *, drop: bool) -> None:
        self.unenforced: list[Unenforced] = []
        self.places: dict[str, list[str]] = {}
        self._root = root
        self._drop = drop
        self._has_prefix_items = _has_prefix_items(draft)
        self._specification = referencing.jsonschema.specification_with(draft)
        self._seen: set[int] = set()
        self._todo: list[_Place] = []
        self._own: set[int] = set()  # subschemas of this document, not of a meta-schema
        self._visited: list[dict[str, JsonValue]] = []
        self._targets: dict[int, JsonValue] = {}  # what the `$ref` of a visited one leads to

    def run(self) -> None:
        resource: Any = self._specification.create_resource(self._root)
        identity = resource.id() or ""
        registry: Any = jsonschema_specifications.REGISTRY.with_resource(identity, resource)
        self._todo.append(_Place(self._root, "", registry.crawl().resolver(identity)))
        self._own = set(map(id, _all_objects(self._root)))
        while self._todo:
            self._visit(self._todo.pop())
        check_ends(self._root, self._visited, self._targets)

    def _visit(self, place: _Place) -> None:
        schema, pointer, resolver = place
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        self._visited.append(schema)
        for keyword in schema:
            self.places.setdefault(keyword, []).append(f"{pointer}/{keyword}")
        if len(self._seen) > MAX_SUBSCHEMAS:
            raise ConstraintError(f"schema has more than {MAX_SUBSCHEMAS} subschemas")
        if pointer:
            resolver = resolver.in_subresource(self._specification.create_resource(schema))
        children = list(_children(schema))
        self._follow_reference(schema, pointer, resolver)
        _rewrite(schema)
        self._note_keywords(schema, pointer)
        for keyword, part, child in children:
            path = f"{pointer}/{keyword}" + to_pointer(part)
            self._todo.append(_Place(child, path, resolver))

    def _follow_reference(self, schema: dict[str, JsonValue], pointer: str, resolver: Any) -> None:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return
        try:
            resolved = resolver.lookup(ref)
        except (referencing.exceptions.Unresolvable, LookupError, ValueError) as error:
            place = (
                "in this schema" if ref.startswith("#") else "here: remote schemas aren't loaded"
            )
            raise ConstraintError(
                f"$ref {ref!r} is not found {place}", where=f"{pointer}/$ref"
            ) from error
        target = resolved.contents
        if not isinstance(target, dict | bool):
            raise ConstraintError(f"$ref {ref!r} is no schema", where=f"{pointer}/$ref")
        if isinstance(target, dict) and id(target) not in self._own:
            self._note(schema, pointer, "$ref", "a meta-schema can't be followed while generating")
            return
        self._targets[id(schema)] = target
        path = ref[1:] if ref.startswith("#/") or ref == "#" else f"{pointer}/$ref"
        self._todo.append(_Place(target, path, resolved.resolver))

    def _note(self, schema: JsonValue, pointer: str, keyword: str, reason: str) -> None:
        self.unenforced.append(Unenforced(f"{pointer}/{keyword}", keyword, reason))
        if self._drop:
            del schema[keyword]
            _drop_idle(schema)

    def _note_keywords(self, schema: dict[str, JsonValue], pointer: str) -> None:
        for keyword in _NOT_ENFORCED:
            if keyword in schema:
                reason = f"`{keyword}` can't be followed while generating"
                self._note(schema, pointer, keyword, reason)
        if "prefixItems" in schema and not self._has_prefix_items:
            reason = (
                "`prefixItems` means nothing in the draft that `$schema` names: write `items` as a "
                "list, or name draft 2020-12"
            )
            self._note(schema, pointer, "prefixItems", reason)
        if self._drop and "format" in schema and not says_string(schema):
            del schema["format"]
        if "format" in schema and schema["format"] not in FORMATS:
            known = ", ".join(sorted(FORMATS))
            reason = f"format {schema['format']!r} is not one of {known}"
            self._note(schema, pointer, "format", reason)
        for keyword in (*_NUMERIC, "const", "enum"):
            if keyword in schema and any(_is_inexact(n) for n in _numbers(schema[keyword])):
                reason = "an integer beyond 2^53 can't be held exactly"
                self._note(schema, pointer, keyword, reason)
        for keyword in _COUNTS:
            if keyword in schema and schema[keyword] > MAX_COUNT:
                self._note(schema, pointer, keyword, "a count must fit into 64 bits")
        self._note_patterns(schema, pointer)

    def _note_patterns(self, schema: dict[str, JsonValue], pointer: str) -> None:
        for keyword, speaks_of in (("pattern", "string"), ("patternProperties", "object")):
            if not takes_type(schema, speaks_of):
                schema.pop(keyword, None)  # it says nothing here, whatever it is
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            try:
                node = regex_parser.parse_search(pattern)
                schema["pattern"] = f"^(?:{regex_syntax.render(node)})$"
            except (ConstraintError, ValueError) as error:
                self._note(schema, pointer, "pattern", f"pattern {pattern!r}: {error}")
        for pattern in schema.get("patternProperties", ()):
            try:
                regex_parser.parse_search(pattern)
            except ConstraintError as error:
                self._note(schema, pointer, "patternProperties", f"pattern {pattern!r}: {error}")
                return


def _rewrite(schema: dict[str, JsonValue]) -> None:
    """Take out what means nothing, and write the rest as llguidance reads it."""
    schema.pop("x-guidance", None)  # options of llguidance that a caller has no business with
    for keyword in ("default", "examples"):  # notes to readers, with values of any size
        schema.pop(keyword, None)
    _drop_idle(schema)
    for keyword, idle in (("uniqueItems", False), ("unevaluatedItems", True),
                          ("unevaluatedProperties", True)):  # fmt: skip
        if schema.get(keyword) is idle:
            del schema[keyword]
    for keyword in _COUNTS:
        if isinstance(schema.get(keyword), float):  # 2.0 is an integer to the standard
            schema[keyword] = int(schema[keyword])
    if isinstance(anchor := schema.pop("$dynamicAnchor", None), str):
        schema.setdefault("$anchor", anchor)


def _drop_idle(schema: dict[str, JsonValue]) -> None:
    for keyword, partner in _PARTNERS.items():
        if partner not in schema:
            schema.pop(keyword, None)


def _all_objects(value: JsonValue) -> Iterator[dict[str, JsonValue]]:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            yield item
            todo += item.values()
        elif isinstance(item, list):
            todo += item


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
