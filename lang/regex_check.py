"""Refuses regular expressions that no automaton can follow, and says where; builds no automaton."""

from __future__ import annotations

import re
from functools import lru_cache

from .errors import ConstraintError
from .unicode_check import check_text

_GROUPS = {
    "(?=": "a look-ahead",
    "(?!": "a negative look-ahead",
    "(?<=": "a look-behind",
    "(?<!": "a negative look-behind",
    "(?P=": "a back-reference",
    "(?(": "a conditional group",
    "(?>": "an atomic group",
}
_OCTAL = re.compile(r"[0-3][0-7]{2}")
_SURROGATE_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F][0-9a-fA-F]{2}")
_POSSESSIVE = re.compile(r"(?:[*+?]|\{\d*,?\d*\})\+")


@lru_cache(maxsize=1024)
def check_regex(pattern: str) -> None:
    """Raise ConstraintError for bad syntax, look-around, back-references and their like.

    A lone surrogate is no character; two escapes that make one, as in JSON, are.
    """
    check_text(pattern, f"regex {pattern!a}")
    try:
        re.compile(pattern)
    except re.error as error:
        where = "" if error.pos is None else f"position {error.pos}"
        at = f" at {where}" if where else ""
        raise ConstraintError(f"regex {pattern!r}: {error.msg}{at}", where=where) from None
    except (RecursionError, OverflowError) as error:
        raise ConstraintError(f"regex {pattern[:40]!r}... is too large: {error}") from None
    found = _first_irregular(pattern)
    if found is not None:
        position, construct = found
        if _SURROGATE.match(pattern, position):
            raise ConstraintError(
                f"regex {pattern!a}: {construct} at position {position} is no character, and no "
                "text has it",
                where=f"position {position}",
            )
        raise ConstraintError(
            f"regex {pattern!r}: {construct} at position {position} can't be used as a constraint, "
            "since it is not regular: rewrite the pattern without it",
            where=f"position {position}",
        )


def _first_irregular(pattern: str) -> tuple[int, str] | None:
    i, in_class = 0, False
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            pair = _SURROGATE_PAIR.match(pattern, i)
            if pair is None and (surrogate := _SURROGATE.match(pattern, i)) is not None:
                return i, f"the lone surrogate {surrogate[0]}"
            octal = _OCTAL.match(pattern, i + 1)
            if not in_class and pattern[i + 1] in "123456789" and octal is None:
                return i, f"a back-reference ({pattern[i : i + 2]})"
            i = i + 2 if pair is None else pair.end()
        elif in_class:
            in_class = char != "]"
            i += 1
        elif char == "[":
            in_class = True
            i += 2 if pattern[i + 1] == "^" else 1
            if pattern[i] == "]":  # a literal ] where the class starts
                i += 1
        elif pattern.startswith("(?#", i):
            i = pattern.index(")", i) + 1
        elif char == "(":
            for start, construct in _GROUPS.items():
                if pattern.startswith(start, i):
                    return i, f"{construct} ({start})"
            i += 1
        elif (quantifier := _POSSESSIVE.match(pattern, i)) is not None:
            return i, f"a possessive quantifier ({quantifier[0]})"
        else:
            i += 1
    return None
