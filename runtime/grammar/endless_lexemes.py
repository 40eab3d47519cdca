"""Finds lexemes of a Lark grammar that may repeat one text without end, such as `/b+/`.

llguidance takes as much for a lexeme as it can, and looks ahead as long as there is one way to go
on. Where only more of such a text can follow (`/b+/ /b+/`), that is for ever, inside one call.
"""

from __future__ import annotations

import re

from umbel.lang.errors import ConstraintError
from umbel.lang.lark_lexer import Token, lark_tokens
from umbel.lang.regex_parser import parse
from umbel.lang.regex_syntax import Alternate, Chars, Concat, Node, Repeat

_HAS_NO_BOUND = re.compile(r"[*+]|\{\d*,\}")


def has_endless_lexeme(text: str) -> bool:
    """Whether a sound grammar may have a lexeme that repeats one text; true where that is open."""
    tokens = lark_tokens(text)
    if any(token.text == "&" for token in tokens):  # what both sides leave is not worked out
        return True
    if any(token.kind == "regex" and _repeats_regex(token.text) for token in tokens):
        return True
    terminals = _terminals(tokens)
    fixed = {name for name, body in terminals.items() if not _has_choice(body)}
    return any(_repeats_terminal(body, fixed) for body in terminals.values())


def _terminals(tokens: list[Token]) -> dict[str, list[Token]]:
    found: dict[str, list[Token]] = {}
    body: list[Token] = []
    for i, token in enumerate(tokens):
        is_first = i == 0 or tokens[i - 1].kind == "newline"
        if is_first and token.kind != "|":
            body = []
            if token.kind == "terminal":
                found[token.text] = body
        body.append(token)
    return found


def _repeats_terminal(body: list[Token], fixed: set[str]) -> bool:
    for i, token in enumerate(body):
        is_open = [t.kind for t in body[i : i + 4] if t.kind != "number"][:3] == ["{", ",", "}"]
        if not (is_open or (token.kind == "sign" and token.text in "*+")):
            continue
        repeated = _before(body, i)
        if not _has_choice(repeated) and all(t.text in fixed for t in repeated if _is_name(t)):
            return True
    return False


def _is_name(token: Token) -> bool:
    return token.kind == "terminal"


def _before(body: list[Token], end: int) -> list[Token]:
    """Return the tokens of the item that ends before an index."""
    start, depth = end - 1, 0
    while start > 0:
        depth += (body[start].kind in (")", "]")) - (body[start].kind in ("(", "["))
        if depth == 0 and body[start - 1].kind != "dots":
            break
        start -= 1
    return body[start:end]


def _has_choice(tokens: list[Token]) -> bool:
    """Whether there is more than one character to go on with, somewhere in all the texts."""
    return any(t.kind == "dots" or (t.kind == "regex" and not _is_one(t.text)) for t in tokens)


def _is_one(regex: str) -> bool:
    try:
        return _is_one_text(parse(regex[1:].rpartition("/")[0]))
    except (ConstraintError, RecursionError):
        return True


def _repeats_regex(regex: str) -> bool:
    pattern = regex[1:].rpartition("/")[0]
    if not _HAS_NO_BOUND.search(pattern):
        return False
    try:
        return _repeats(parse(pattern))
    except (ConstraintError, RecursionError):  # Rust's syntax has more
        return True


def _repeats(node: Node) -> bool:
    match node:
        case Repeat(body, _, None):
            return _is_one_text(body) or _repeats(body)
        case Repeat(body):
            return _repeats(body)
        case Concat(parts) | Alternate(parts):
            return any(map(_repeats, parts))
        case _:
            return False


def _is_one_text(node: Node) -> bool:
    """Whether all the way through a node there is but one character to go on with."""
    match node:
        case Chars(ranges):
            return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        case Concat(parts):
            return all(map(_is_one_text, parts))
        case Alternate(options):  # one may begin another: `b|bb`
            return all(map(_is_one_text, options))
        case Repeat(body):
            return _is_one_text(body)
        case _:
            return True
