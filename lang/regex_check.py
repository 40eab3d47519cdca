"""Refuses regular expressions that no automaton can follow, and says where; builds no automaton.

What is read here as the engines read it (`regex_parser`) is what they take: only sizes are left to
them. Before that come the constructs that have a better word than the parser's, and those that it
reads as `re` does, which is rarely what was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .errors import ConstraintError
from .regex_parser import parse, parse_search
from .regex_syntax import NEVER
from .unicode_check import check_text, lone_surrogate

_NOT_REGULAR = (
    "can't be used as a constraint, since it is not regular: rewrite the pattern without it"
)
_MAX_SHOWN = 300  # characters of a pattern in an error
_NO_CHARACTER = "is no character, and no text has it"
_SURROGATE_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F][0-9a-fA-F]{2}")
_GROUPS = {
    "(?=": "a look-ahead",
    "(?!": "a negative look-ahead",
    "(?<=": "a look-behind",
    "(?<!": "a negative look-behind",
    "(?P=": "a back-reference",
    "(?(": "a conditional group",
    "(?>": "an atomic group",
}
_FLAGS = re.compile(r"\(\?[aiLmsux-]+[:)]")
_FLAG_HINTS = {
    "i": "write both cases, such as [Aa]",
    "s": r"write [\s\S] for any character, line ends too",
    "x": "write the pattern without blanks and comments",
    "m": "the whole value has to match, whatever its lines",
}
_ESCAPES = {
    "b": ("a word boundary", "say which characters may stand there, such as [ .,]"),
    "B": ("a word boundary", "say which characters may stand there, such as [a-z]"),
    "p": ("a Unicode property", "list the characters, such as [A-Z]"),
    "P": ("a Unicode property", "list the characters, such as [^A-Z]"),
    "N": ("a character's name", "write the character itself"),
}
_OCTAL = re.compile(r"[0-3][0-7]{2}")
_COMMENT = re.compile(r"\(\?#(?:[^\\)]|\\.)*\)", re.DOTALL)
_POSIX = re.compile(r"\[[:.=]\^?(\w+)[:.=]\]")
_POSIX_HINTS = {
    "alpha": "A-Za-z", "digit": "0-9", "alnum": "A-Za-z0-9", "upper": "A-Z", "lower": "a-z",
    "space": r"\s", "word": r"\w", "xdigit": "0-9A-Fa-f", "blank": r" \t",
}  # fmt: skip
_REPEAT = r"\{(?:\d+(?:,\d*)?|,\d*)\}"
_POSSESSIVE = re.compile(rf"(?:[*+?]|{_REPEAT})\+")
_BROKEN_REPEAT = re.compile(rf"(?!{_REPEAT})\{{\s*,?\s*\d[\d,\s]*\}}?")


def _instead(hint: str) -> str:
    return f"can't be used as a constraint: {hint}"


class _Found(NamedTuple):
    """A construct that can't be used, and the rest of the sentence on it."""

    position: int
    construct: str
    verdict: str
    in_stops: bool = True  # a stop is searched for with an engine that knows more

    @property
    def where(self) -> str:
        return f"position {self.position}"

    @property
    def sentence(self) -> str:
        return f"{self.construct} at {self.where} {self.verdict}"


@lru_cache(maxsize=1024)
def check_regex(pattern: str, *, is_stop: bool = False) -> None:
    """Raise ConstraintError for bad syntax, and for what is beyond the engines, with its place.

    A lone surrogate is no character; two escapes that make one, as in JSON, are. With `is_stop`
    flags, word boundaries and anchors are taken, as they are where text is searched.
    """
    check_text(pattern, f"regex {_shown(pattern)}")
    for found in _unusable(pattern):
        if found.in_stops or not is_stop:
            raise _refused(pattern, found.sentence, found.where)
    check_python_regex(pattern)
    if not is_stop:
        _check_as_read(pattern)


def check_python_regex(pattern: str) -> None:
    """Raise ConstraintError for what `re` doesn't take, which reads what is checked afterwards."""
    try:
        re.compile(pattern)
    except re.error as error:
        where = "" if error.pos is None else f"position {error.pos}"
        raise _refused(pattern, f"{error.msg}{where and f' at {where}'}", where) from None
    except (RecursionError, OverflowError) as error:
        raise _refused(pattern, f"it is too large: {error}") from None


def check_search_pattern(pattern: str) -> None:
    """Raise ConstraintError for a schema's `pattern` that no engine can follow, with its place.

    It is searched for, and read as the engines read it: what a whole match would make of it, and
    what `re` would warn of, says nothing here.
    """
    try:
        parse_search(pattern)
    except ConstraintError as error:
        named = next((f for f in _unusable(pattern) if f.where == error.where), None)
        raise _refused(pattern, named.sentence if named else str(error), error.where) from None
    except RecursionError:
        return  # of a stack that is nearly full: the engines have their own


def _check_as_read(pattern: str) -> None:
    try:
        node = parse(pattern)
    except ConstraintError as error:
        raise _refused(pattern, str(error), error.where) from None
    except RecursionError:
        return
    if node == NEVER:
        raise _refused(pattern, "no text matches it, as one of its classes holds no character")


def _refused(pattern: str, why: str, where: str = "") -> ConstraintError:
    return ConstraintError(f"regex {_shown(pattern)}: {why}", where=where)


def _shown(pattern: str) -> str:
    start = pattern[:_MAX_SHOWN]
    text = ascii(start) if lone_surrogate(start) is not None else repr(start)
    return text + "..." * (len(pattern) > len(start))


def _unusable(pattern: str) -> Iterator[_Found]:
    """Yield what can't be used, from the left; the pattern may be broken in other ways."""
    i, class_start = 0, None
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            yield from _escape(pattern, i, in_class=class_start is not None)
            pair = _SURROGATE_PAIR.match(pattern, i)
            i = i + 2 if pair is None else pair.end()
        elif class_start is not None:
            if char == "]" and i > class_start:
                class_start = None
            else:
                yield from _class_item(pattern, i, class_start)
            i += 1
        elif char == "[":
            yield from _bare_posix_class(pattern, i)
            i += 2 if pattern.startswith("[^", i) else 1
            class_start = i  # a ] here is a character
        elif pattern.startswith("(?#", i):
            comment = _COMMENT.match(pattern, i)
            i = len(pattern) if comment is None else comment.end()
        else:
            yield from _group_or_repeat(pattern, i)
            i += 1


def _escape(pattern: str, i: int, *, in_class: bool) -> Iterator[_Found]:
    name = pattern[i + 1 : i + 2]
    surrogate = _SURROGATE.match(pattern, i)
    if surrogate is not None and not _SURROGATE_PAIR.match(pattern, i):
        yield _Found(i, f"the lone surrogate {surrogate[0]}", _NO_CHARACTER)
    octal = _OCTAL.match(pattern, i + 1)
    if not in_class and name and name in "123456789" and octal is None:
        yield _Found(i, f"a back-reference ({pattern[i : i + 2]})", _NOT_REGULAR)
    elif name in _ESCAPES and not (in_class and name in "bB"):
        construct, hint = _ESCAPES[name]
        yield _Found(i, f"{construct} (\\{name})", _instead(hint), in_stops=False)


def _bare_posix_class(pattern: str, i: int) -> Iterator[_Found]:
    """Yield `[:alpha:]` without its outer brackets: a class of a colon and four letters."""
    posix = _POSIX.match(pattern, i)
    if posix is not None and (chars := _POSIX_HINTS.get(posix[1])):
        yield _Found(i, f"a POSIX class ({posix[0]})", _instead(f"write [{chars}]"))


def _class_item(pattern: str, i: int, start: int) -> Iterator[_Found]:
    """Yield what other engines read as more than a character, and `re` warns of."""
    posix = _POSIX.match(pattern, i)
    if posix is not None:
        chars = _POSIX_HINTS.get(posix[1])
        hint = "list the characters" + (f": {chars}" if chars else "")
        yield _Found(i, f"a POSIX class ({posix[0]})", _instead(hint))
    elif pattern[i] == "[" and i == start:
        yield _Found(i, "a class in a class ([[)", _instead(r"write \[ for the character"))
    elif i > start and pattern[i] in "-&~|" and pattern.startswith(pattern[i] * 2, i):
        hint = rf"write \{pattern[i]} for the character"
        yield _Found(i, f"an operation on classes ({pattern[i] * 2})", _instead(hint))


def _group_or_repeat(pattern: str, i: int) -> Iterator[_Found]:
    for start, construct in _GROUPS.items():
        if pattern.startswith(start, i):
            yield _Found(i, f"{construct} ({start})", _NOT_REGULAR)
    if (flags := _FLAGS.match(pattern, i)) is not None:
        hints = [hint for flag, hint in _FLAG_HINTS.items() if flag in flags[0]]
        hint = "; ".join(hints) or "leave it out"
        yield _Found(i, f"a flag ({flags[0]})", _instead(hint), in_stops=False)
    elif (quantifier := _POSSESSIVE.match(pattern, i)) is not None:
        yield _Found(i, f"a possessive quantifier ({quantifier[0]})", _NOT_REGULAR)
    elif (broken := _BROKEN_REPEAT.match(pattern, i)) is not None:
        hint = r"write {m}, {m,} or {m,n} without blanks, or \{ for the character"
        yield _Found(i, f"a repeat that is none ({broken[0]})", _instead(hint), in_stops=False)
