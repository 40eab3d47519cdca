"""Lark's tokens, as llguidance's dialect has them, with their places; knows no rules."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from .errors import ConstraintError
from .json_text import unique_pairs
from .text_places import line_and_column

_PATTERNS = {
    "blank": r"[ \t]+|(?:#|//)[^\n]*",
    "newline": r"(?:\r?\n)+",
    "string": r'"(?:\\.|[^"\\\x00-\x1f\x7f])*"i?',
    "regex": r"/(?:\\.|[^/\\])+/[imslux]*",
    "directive": r"%[a-z]+",
    "rule": r"!?[_?]?[a-z][_a-z0-9\-]*",
    "terminal": r"_?[A-Z][_A-Z0-9\-]*",
    "number": r"[+-]?[0-9]+",
    "special": r"<[^<>\s]+>",
    "grammar": r"@[a-zA-Z0-9_\-]+",
    "arrow": r"->",
    "dots": r"\.\.",
    "sign": r"[+*?]",
    "mark": r"[:|()\[\]{},.~]",
    "rare": r"[&=_@<>]",
}
_TOKEN = re.compile("|".join(f"(?P<{kind}>{found})" for kind, found in _PATTERNS.items()), re.S)
_HINTS = {
    '"': 'the string is not closed on its line, or holds a control character (write " as \\")',
    "'": "strings stand in double quotes",
    "/": r"the regex is not closed (write / inside as \/)",
    ";": "a rule ends with its line",
}
_WITH_JSON = ("%json", "%regex", "%llguidance")


class Token(NamedTuple):
    """A token: its kind (a mark is its own), its text, and where it begins and ends."""

    kind: str
    text: str
    position: int
    end: int


def lark_error(text: str, what: str, position: int) -> ConstraintError:
    """Return the error of a grammar, with line and column."""
    where = line_and_column(text, position)
    return ConstraintError(f"grammar: {what} at {where}", where=where)


def lark_tokens(text: str) -> list[Token]:
    """Return the tokens without blanks and comments, and an `end`; JSON is part of its directive.

    Raises ConstraintError, with line and column, for what no token begins with.
    """
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            hint = _HINTS.get(text[at])
            what = f"{text[at]!r} begins nothing" + (f": {hint}," if hint else "")
            raise lark_error(text, what, at)
        kind, at = found.lastgroup or "", found.end()
        if kind == "directive" and found[0] in _WITH_JSON:
            at = _json_end(text, found[0], at)
        if kind != "blank":
            kind = found[0] if kind == "mark" else kind
            tokens.append(Token(kind, found[0], found.start(), at))
    tokens.append(Token("end", "", len(text), len(text)))
    return tokens


def _json_end(text: str, directive: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    try:
        return json.JSONDecoder(object_pairs_hook=unique_pairs).raw_decode(text, at)[1]
    except ConstraintError as error:
        raise lark_error(text, f"{directive}: {error}", at) from None
    except (ValueError, RecursionError) as error:
        raise lark_error(text, f"{directive} is not JSON: {error}", at) from None
