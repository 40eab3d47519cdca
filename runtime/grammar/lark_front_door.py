"""The front door for Lark grammars: what lang checks on the line, and the JSON schemas inside.

llguidance's Lark may embed `%json {schema}`; such a schema has to pass the same checks as one that
comes alone. The rest is llguidance's to check: its errors have line and column.
"""

from __future__ import annotations

import json
import re

from umbel.lang.errors import ConstraintError
from umbel.lang.lark_check import check_lark_text
from umbel.lang.text_places import line_and_column

from .endless_lexemes import has_endless_lexeme
from .json_schema import check_schema
from .llguidance import NO_LOOKING_AHEAD

_EMBEDDED = re.compile(r"%json\s*(?=\{)")


def check_lark(text: str) -> str:
    """Return the grammar with its JSON schemas checked. Raises ConstraintError.

    `where` is the line and column of the embedded schema, followed by the pointer inside.
    """
    check_lark_text(text)
    result, done = "", 0
    while found := _EMBEDDED.search(text, done):
        place = line_and_column(text, found.end())
        try:
            _, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise ConstraintError(f"%json is not JSON: {error}", where=place) from error
        result += text[done : found.end()] + _checked(text[found.end() : end], place)
        done = end
    result += text[done:]
    return result + NO_LOOKING_AHEAD if has_endless_lexeme(text) else result


def with_place(error: ConstraintError) -> ConstraintError:
    """Return llguidance's error with its line and column in the message."""
    return ConstraintError(f"grammar: {error} at {error.where}", where=error.where)


def _checked(schema: str, place: str) -> str:
    try:
        checked = check_schema(schema)
    except ConstraintError as error:
        raise ConstraintError(f"%json: {error}", where=f"{place} {error.where}".strip()) from error
    if checked.unenforced:
        first = checked.unenforced[0]
        raise ConstraintError(f"%json: {first.reason}", where=f"{place} {first.pointer}")
    return json.dumps(checked.schema)
