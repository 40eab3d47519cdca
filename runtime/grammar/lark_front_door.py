"""The front door for Lark grammars: size, and the JSON schemas inside.

llguidance's Lark may embed `%json {schema}`; such a schema has to pass the same checks as one that
comes alone. The grammar itself is llguidance's to check: its errors have line and column.
"""

from __future__ import annotations

import json
import re

from umbel.lang.errors import ConstraintError
from umbel.lang.unicode_check import lone_surrogate

from .json_schema import check_schema

MAX_GRAMMAR_CHARS = 500_000

_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_OPTIONS = re.compile(r"^\s*%llguidance\b", re.MULTILINE)


def check_lark(text: str) -> str:
    """Return the grammar with its JSON schemas checked. Raises ConstraintError.

    `where` is the line and column of the embedded schema, followed by the pointer inside.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ConstraintError(
            f"grammar has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken"
        )
    if (position := lone_surrogate(text)) is not None:
        place = _place(text, position)
        raise ConstraintError(
            f"a lone surrogate is not a character (grammar, {place})", where=place
        )
    if options := _OPTIONS.search(text):
        raise ConstraintError(
            "a grammar may not set options of llguidance", where=_place(text, options.start())
        )
    result, done = "", 0
    while found := _EMBEDDED.search(text, done):
        place = _place(text, found.end())
        try:
            _, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"%json is not JSON: {error}", where=place) from error
        result += text[done : found.end()] + _checked(text[found.end() : end], place)
        done = end
    return result + text[done:]


def _checked(schema: str, place: str) -> str:
    try:
        checked = check_schema(schema)
    except ConstraintError as error:
        raise ConstraintError(f"%json: {error}", where=f"{place} {error.where}".strip()) from error
    if checked.unenforced:
        first = checked.unenforced[0]
        raise ConstraintError(f"%json: {first.reason}", where=f"{place} {first.pointer}")
    return json.dumps(checked.schema)


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return f"line {line}, column {column}"
