"""How large a constraint is and how long its values can get; builds no automaton."""

from __future__ import annotations

import re
import warnings
from re import _parser  # type: ignore[attr-defined]  # the only regex parser there is
from typing import Any, assert_never

from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.lang.plan import ConstraintSize

#: bytes of a character in UTF-8
_MOST_BYTES = 4


def constraint_size(constraint: Constraint) -> ConstraintSize:
    """Return a constraint's size."""
    match constraint:
        case Regex(pattern=pattern):
            return ConstraintSize("regex", len(pattern), _longest_match(pattern))
        case JsonSchema(schema=schema):
            return ConstraintSize("schema", len(schema))
        case Grammar(text=text):
            return ConstraintSize("grammar", len(text))
        case Choices(choices=choices):
            longest = max((len(choice.encode()) for choice in choices), default=0)
            return ConstraintSize("choices", sum(map(len, choices)), longest, len(choices))
        case _:
            assert_never(constraint)


def _longest_match(pattern: str) -> int | None:
    """Return a bound on the bytes of a match, or None if a match has no longest length."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever wrote the pattern was warned
            longest = _longest_of(_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError):  # another dialect's, or too deep to measure
        return None
    # without regard to case, a letter may stand for one outside ASCII (K and the Kelvin sign)
    return longest * _MOST_BYTES if longest and re.search(r"\(\?[a-z]*i", pattern) else longest


def _longest_of(items: Any) -> int | None:
    total = 0
    for op, value in items:
        longest = _longest_item(str(op), value)
        if longest is None:
            return None
        total += longest
    return total


def _longest_item(op: str, value: Any) -> int | None:
    match op:
        case "LITERAL":
            return len(chr(value).encode("utf-8", "replace"))
        case "IN":
            return _longest_in_set(value)
        case "BRANCH":
            longest = [_longest_of(branch) for branch in value[1]]
            return None if None in longest else max(size for size in longest if size is not None)
        case "SUBPATTERN":
            return _longest_of(value[-1])
        case "MAX_REPEAT" | "MIN_REPEAT":
            _, most, inner = value
            inside = _longest_of(inner)
            if inside == 0 or most == 0:
                return 0
            return None if inside is None or most == _parser.MAXREPEAT else inside * int(most)
        case "AT" | "ASSERT" | "ASSERT_NOT":
            return 0
        case "ANY" | "NOT_LITERAL":
            return _MOST_BYTES
        case _:  # a group once more, for example
            return None


def _longest_in_set(members: Any) -> int:
    longest = 1
    for op, value in members:
        match str(op):
            case "LITERAL":
                longest = max(longest, len(chr(value).encode("utf-8", "replace")))
            case "RANGE":
                longest = max(longest, len(chr(value[1]).encode("utf-8", "replace")))
            case "CATEGORY":
                # classes are ASCII, so what they leave out is not
                longest = max(longest, _MOST_BYTES if "NOT" in str(value) else 1)
            case _:
                longest = _MOST_BYTES
    return longest
