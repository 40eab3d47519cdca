"""Refuses JSON schemas that are none, and says where; needs no jsonschema and judges no values.

What is most often wrong by a draft's meta-schema: types that don't exist, keywords with values of
the wrong kind, references that lead nowhere. The rest is the runtime's, which has the meta-schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import ConstraintError
from .suggestions import guess, nearest

#: drafts by `$schema`, in the order they came
DRAFTS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
NEWEST = 2020
_META_SCHEMAS = ("http://json-schema.org/", "https://json-schema.org/")  # the runtime has these

Json = Any  # what json.loads gives
Path = tuple[str | int, ...]


class Place(NamedTuple):
    """A subschema, and the keys and indices that lead to it."""

    schema: Json
    path: Path


class _Kind(NamedTuple):
    """What some keywords take; `since` has the draft that each of them came with."""

    takes: str
    is_right: Callable[[Json], bool]
    since: dict[str, int]


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Json) -> bool:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return _is_number(value) and is_whole and value >= 0  # 2.0 is whole to the standard


def _is_names(value: Json) -> bool:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return False
    return len(set(value)) == len(value)


def _is_map_of_names(value: Json) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


_ONE_SCHEMA = {
    "not": 4, "additionalProperties": 4, "additionalItems": 4, "items": 4, "contains": 6,
    "propertyNames": 6, "if": 7, "then": 7, "else": 7, "unevaluatedItems": 2019,
    "unevaluatedProperties": 2019, "contentSchema": 2019,
}  # fmt: skip
_SCHEMA_LISTS = {"allOf": 4, "anyOf": 4, "oneOf": 4, "prefixItems": 2020}
_SCHEMA_MAPS = {
    "properties": 4, "patternProperties": 4, "dependencies": 4, "definitions": 4, "$defs": 2019,
    "dependentSchemas": 2019,
}  # fmt: skip
_SINCE = _ONE_SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS
_COUNTS = {
    "minLength": 4, "maxLength": 4, "minItems": 4, "maxItems": 4, "minProperties": 4,
    "maxProperties": 4, "minContains": 2019, "maxContains": 2019,
}  # fmt: skip
_BOUNDS = {"minimum": 4, "maximum": 4, "exclusiveMinimum": 6, "exclusiveMaximum": 6}
_TEXTS = {"pattern": 4, "format": 4, "$ref": 6, "title": 4, "description": 4, "$comment": 7}
_KINDS = (
    _Kind("a whole number from 0 on", _is_count, _COUNTS),
    _Kind("a number", _is_number, _BOUNDS),
    _Kind("a number above 0", lambda v: _is_number(v) and v > 0, {"multipleOf": 4}),
    _Kind("true or false", lambda v: isinstance(v, bool), {"uniqueItems": 4}),
    _Kind("a string", lambda v: isinstance(v, str), _TEXTS),
    _Kind("a list", lambda v: isinstance(v, list), {"enum": 4, "examples": 6}),
    _Kind("a list of names, each once", _is_names, {"required": 4}),
    _Kind("an object of lists of names", _is_map_of_names, {"dependentRequired": 2019}),
    _Kind("a list of schemas", lambda v: isinstance(v, list) and len(v) > 0, _SCHEMA_LISTS),
    _Kind("an object of schemas", lambda v: isinstance(v, dict), _SCHEMA_MAPS),
)
#: what to write where an older draft's form, or a guess, is most often written
_HINTS = {
    "required": "list the names beside `properties`, as a property can't say it of itself",
    "exclusiveMinimum": "it holds the bound itself, in place of `minimum`",
    "exclusiveMaximum": "it holds the bound itself, in place of `maximum`",
    "enum": 'one value is {"enum": [value]} or {"const": value}',
}

_REMARKS = frozenset({
    "title", "description", "$comment", "examples", "default", "$schema", "$id", "deprecated",
    "readOnly", "writeOnly", "definitions", "$defs",
})  # fmt: skip
#: what says which values there are; a remark that is misspelt does no harm
_ASSERTIONS = frozenset({"type", "const", *_SINCE}.union(*(k.since for k in _KINDS))) - _REMARKS
_NEAR = 0.84  # of difflib: two letters have changed places, one is missing

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_MEANT = {
    "str": "string", "text": "string", "int": "integer", "float": "number", "double": "number",
    "decimal": "number", "bool": "boolean", "dict": "object", "map": "object", "list": "array",
    "tuple": "array", "set": "array", "none": "null", "nil": "null",
}  # fmt: skip


@lru_cache(maxsize=256)
def check_json_schema(text: str) -> None:
    """Raise ConstraintError, with a JSON pointer, for JSON text that is no usable schema.

    A text that passed costs nothing as long as it is remembered: a loop over one gen pays once.
    """
    for place, draft in _places(json.loads(text)):
        _check_keywords(place, draft)


@lru_cache(maxsize=256)
def check_spelling(text: str) -> None:
    """Raise ConstraintError, with a JSON pointer, for a keyword that is none and nearly one.

    `text` is a sound schema. By the standard such a keyword says nothing; those of other
    vocabularies, which are like none, are left alone.
    """
    for place, _ in _places(json.loads(text)):
        for keyword in place.schema.keys() - _ASSERTIONS - _REMARKS:
            meant = _meant(keyword)
            if meant and meant not in place.schema:
                raise _wrong(
                    (*place.path, keyword),
                    f"there is no such keyword: did you mean {meant!r}? (strict=False ignores it)",
                )


def _places(root: Json) -> Iterator[tuple[Place, int]]:
    """Yield each subschema that is an object once, with the draft. Raises ConstraintError."""
    draft = draft_of(root)
    references = References(root)
    seen: set[int] = set()
    # A definition that nothing uses forbids nothing: its references may dangle, as the runtime has
    # it. So what the root leads to comes first.
    used, rest = [Place(root, ())], list[Place]()
    while used or rest:
        is_used = bool(used)
        place = (used or rest).pop()
        if isinstance(place.schema, bool) or id(place.schema) in seen:
            continue
        if not isinstance(place.schema, dict):
            raise _wrong(place.path, f"a schema is an object, not {_shown(place.schema)}")
        seen.add(id(place.schema))
        yield place, draft
        if is_used and (target := references.target(place)) is not None:
            used.append(target)
        for keyword, child in children_of(place, draft):
            is_definition = keyword in ("$defs", "definitions")
            (used if is_used and not is_definition else rest).append(child)


def takes_type(schema: dict[str, Json], name: str) -> bool:
    """Whether a value of the named type can be one of a schema, by its own `type` alone."""
    types = schema.get("type")
    return types == name if isinstance(types, str) else not isinstance(types, list) or name in types


def to_pointer(path: Path) -> str:
    """Return the JSON pointer of a path of keys and indices."""
    return "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in path)


def _wrong(path: Path, what: str) -> ConstraintError:
    pointer = to_pointer(path)
    message = f"schema is not valid at {pointer or 'its root'}: {what}"
    return ConstraintError(message, where=pointer or "#")


def _shown(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def draft_of(root: Json) -> int:
    """Return the draft that a schema is written in. Raises ConstraintError for an unknown one."""
    if not isinstance(root, dict) or "$schema" not in root:
        return NEWEST
    uri = root["$schema"]
    draft = DRAFTS.get(uri.rstrip("#")) if isinstance(uri, str) else None
    if draft is None:
        raise _wrong(("$schema",), f"{_shown(uri)} is unknown; known are {', '.join(DRAFTS)}")
    return draft


@lru_cache(maxsize=1024)  # the same few words stand at every place
def _meant(keyword: str) -> str:
    """Return the assertion that a word is a misspelling of; empty if it is like none."""
    plain = keyword.replace("_", "").lower()
    same = (name for name in _ASSERTIONS if name.lower() == plain)
    is_long = len(keyword) > 4  # `note` is none of `not`
    return next(same, "") or (guess(keyword, _ASSERTIONS, _NEAR) if is_long else "")


def _check_keywords(place: Place, draft: int) -> None:
    schema, path = place
    for takes, is_right, since in _KINDS:
        for keyword in since.keys() & schema.keys():
            value = schema[keyword]
            if since[keyword] <= draft and not is_right(value):
                hint = f" ({_HINTS[keyword]})" if keyword in _HINTS else ""
                raise _wrong((*path, keyword), f"it takes {takes}, not {_shown(value)}{hint}")
    if "type" in schema:
        _check_type(schema["type"], (*path, "type"))
    if schema.get("enum") == []:
        raise _wrong((*path, "enum"), "it is empty: there is nothing to choose from")
    if draft == NEWEST and isinstance(schema.get("items"), list):
        raise _wrong((*path, "items"), "it takes a schema for every item: a list is `prefixItems`")


def _check_type(value: Json, path: Path) -> None:
    if isinstance(value, list):
        if not value:
            raise _wrong(path, "it is empty: no value has a type of none")
        for i, name in enumerate(value):
            _check_type_name(name, (*path, i))
        if not _is_names(value):
            raise _wrong(path, f"a type stands twice in {_shown(value)}")
    else:
        _check_type_name(value, path)


def _check_type_name(name: Json, path: Path) -> None:
    if not isinstance(name, str):
        raise _wrong(path, f"it takes the names of types, not {_shown(name)}")
    if name not in _TYPES:
        meant = _MEANT.get(name.lower())
        words = f"did you mean '{meant}'?" if meant else nearest(name, _TYPES)
        raise _wrong(path, f"{name!r} is no type: {words}")


def children_of(place: Place, draft: int) -> Iterator[tuple[str, Place]]:
    """Yield (keyword, what stands where a schema has to) for each direct subschema."""
    schema, path = place
    for keyword, value in schema.items():
        since = _SINCE.get(keyword)
        if since is None or since > draft:
            continue
        under = (*path, keyword)
        if keyword in _SCHEMA_MAPS:
            for name, child in value.items():
                if keyword != "dependencies" or not _is_names(child):
                    yield keyword, Place(child, (*under, name))
        elif isinstance(value, list) and (keyword in _SCHEMA_LISTS or keyword == "items"):
            for i, child in enumerate(value):
                yield keyword, Place(child, (*under, i))
        else:
            yield keyword, Place(value, under)


class References:
    """Finds what a `$ref` leads to inside one document, for as long as it has one base address."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._has_name = False  # of its own, which references may use
        self._has_bases = False  # embedded documents: `#` is not always this one
        self._anchors: set[str] = set()
        todo = [root]
        while todo:
            item = todo.pop()
            if isinstance(item, dict):
                self._note_names(item)
                todo += item.values()
            elif isinstance(item, list):
                todo += item

    def _note_names(self, item: dict[str, Json]) -> None:
        for key in ("$id", "id"):
            if isinstance(item.get(key), str):
                self._has_name |= item is self._root
                self._has_bases |= item is not self._root
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := item.get(key), str):
                self._anchors.add(anchor)

    def target(self, place: Place) -> Place | None:
        """Return what a subschema's `$ref` leads to; None without one, and where that is open.

        Raises ConstraintError for one that leads nowhere.
        """
        ref = place.schema.get("$ref")
        if not isinstance(ref, str) or self._has_bases:
            return None
        path = (*place.path, "$ref")
        if not ref.startswith("#"):
            if ref and not self._has_name and not ref.startswith(_META_SCHEMAS):
                raise _wrong(path, f"{ref!r} is not found: remote schemas aren't loaded")
            return None
        if ref != "#" and not ref.startswith("#/"):
            if ref[1:] not in self._anchors:
                raise _wrong(path, f"{ref!r} is not found: there is no such $anchor")
            return None
        found = self._look_up(ref, path)
        if not isinstance(found.schema, dict | bool):
            raise _wrong(path, f"{ref!r} leads to {_shown(found.schema)}, which is no schema")
        return found

    def _look_up(self, ref: str, path: Path) -> Place:
        value, walked = self._root, list[str | int]()
        for part in _unquoted(ref).split("/")[1:]:
            key: str | int = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                key = int(part)
            elif not isinstance(value, dict) or key not in value:
                names = ", ".join(list(value)[:8]) if isinstance(value, dict) else ""
                there = "/".join(("#", *map(str, walked)))
                only = f", only {names}" if names else ""
                raise _wrong(path, f"{ref!r} is not found: {there} has no {key!r}{only}")
            value = value[key]
            walked.append(key)
        return Place(value, tuple(walked))


def _unquoted(ref: str) -> str:
    if "%" not in ref:
        return ref
    from urllib.parse import unquote  # hardly ever needed, and slow to load

    return unquote(ref)
