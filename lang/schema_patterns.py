"""Refuses the regular expressions of JSON schemas that no engine can follow, with their place.

Knows which subschemas an engine looks at, and not how it follows them: a pattern where no string
can stand (`type: integer`) says nothing, so it is left alone, as the engines leave it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from .errors import ConstraintError
from .regex_check import check_python_regex, check_search_pattern
from .schema_check import (
    Path,
    Place,
    References,
    children_of,
    draft_of,
    takes_type,
    to_pointer,
)

# keywords of subschemas, by the one type of value that they speak of
_OF_TYPE = {
    "items": "array", "prefixItems": "array", "additionalItems": "array", "contains": "array",
    "unevaluatedItems": "array", "properties": "object", "patternProperties": "object",
    "additionalProperties": "object", "propertyNames": "object", "dependentSchemas": "object",
    "dependencies": "object", "unevaluatedProperties": "object",
}  # fmt: skip
_NO_VALUE = frozenset(("$defs", "definitions", "contentSchema"))  # no value is held against these
# What no grammar can follow is refused for itself, whatever stands in it; without `strict` it is
# checked afterwards, and so are the patterns in it.
_ONLY_AFTERWARDS = frozenset(
    (
        "not", "if", "then", "else", "contains", "propertyNames", "dependentSchemas",
        "dependencies", "unevaluatedItems", "unevaluatedProperties",
    )
)  # fmt: skip
# The standard's own dialect has what `re` lacks, and `re` warns of what others read as operations
# on classes: whether such a pattern can be checked shows when it is.
_OTHER_DIALECT = re.compile(r"\\[pPkc]|\(\?<(?![=!])|\[\^?[\]\[]|--|&&|~~|\|\|")


@lru_cache(maxsize=256)
def check_patterns(text: str, *, strict: bool) -> None:
    """Raise ConstraintError for a `pattern`, or a key of `patternProperties`, that can't be used.

    `text` is a sound schema. `where` is the keyword's JSON pointer; the message has the position
    in the pattern. Without `strict` a pattern only has to be one: it is checked afterwards.
    """
    root = json.loads(text)
    draft, references = draft_of(root), References(root)
    todo = [Place(root, ())]
    seen: set[int] = set()
    while todo:
        place = todo.pop()
        if not isinstance(place.schema, dict) or id(place.schema) in seen:
            continue
        seen.add(id(place.schema))
        for keyword, pattern in _patterns(place.schema):
            _check_pattern(pattern, (*place.path, keyword), strict)
        if (target := references.target(place)) is not None:
            todo.append(target)
        for keyword, child in children_of(place, draft):
            if _is_met(place.schema, keyword) and not (strict and keyword in _ONLY_AFTERWARDS):
                todo.append(child)


def _check_pattern(pattern: str, path: Path, strict: bool) -> None:
    pointer = to_pointer(path)
    try:
        if strict:
            check_search_pattern(pattern)
        elif not _OTHER_DIALECT.search(pattern):
            check_python_regex(pattern)
    except ConstraintError as error:
        hint = "; with strict=False it is checked afterwards" if _is_python(pattern) else ""
        message = f"schema can't be used at {pointer}: {error}{hint}"
        raise ConstraintError(message, where=pointer) from None


def _is_python(pattern: str) -> bool:
    try:
        if _OTHER_DIALECT.search(pattern):
            return False
        check_python_regex(pattern)
    except ConstraintError:
        return False
    return True


def _patterns(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if takes_type(schema, "string") and _may_have_length(schema) and "pattern" in schema:
        yield "pattern", schema["pattern"]
    if takes_type(schema, "object"):
        for pattern in schema.get("patternProperties", ()):
            yield "patternProperties", pattern


def _may_have_length(schema: dict[str, Any]) -> bool:
    return bool(schema.get("minLength", 0) <= schema.get("maxLength", float("inf")))


def _is_met(schema: dict[str, Any], keyword: str) -> bool:
    """Whether an engine holds a value against the subschemas of a keyword."""
    of_type = _OF_TYPE.get(keyword)
    if keyword in _NO_VALUE or (of_type is not None and not takes_type(schema, of_type)):
        return False
    if keyword == "properties" and schema.get("additionalProperties") is False:
        names = schema["properties"].keys()
        return all(name in names for name in schema.get("required", ()))  # else no value is one
    items = schema.get("items")
    prefix = items if isinstance(items, list) else schema.get("prefixItems", [])
    if keyword == "additionalItems" or (keyword == "items" and items is not prefix):
        is_rest = keyword == "items" or items is prefix
        return is_rest and bool(schema.get("maxItems", float("inf")) > len(prefix))
    return True
