r"""Reads regular expressions into trees; knows no engine.

The syntax is Python's `re` with ASCII classes, read as `re.fullmatch` reads it. What is not regular
(look-around, back-references) or has no meaning for a whole match (word boundaries, flags) is
refused by name with its position. Every engine gets its pattern from the tree, so that all of them
agree on what `\d`, `.` or `$` mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import count, takewhile
from typing import assert_never

from .errors import ConstraintError
from .regex_syntax import (
    ANY,
    CLASSES,
    DOT,
    EMPTY,
    MAX_CODE_POINT,
    MAX_REPEAT,
    Alternate,
    Anchor,
    Both,
    Chars,
    Concat,
    Node,
    Ranges,
    Repeat,
    Without,
    alternate,
    character,
    complement,
    concat,
    normalise,
    repeat,
)
from .text_places import Cursor

MAX_PATTERN_LEN = 200_000
MAX_GROUP_DEPTH = 100
MAX_EXPANDED = 200  # options with an anchor inside that are written out, each with all around it


def parse(pattern: str) -> Node:
    """Parse a pattern that has to match the whole text.

    Anchors at the outer edges mean nothing there and are dropped. Raises ConstraintError, with
    `where` as "position" and the character's index, for bad syntax and for what is not regular.
    """
    return _settle(_Parser(pattern).parse(), at_start=True, at_end=True)


def parse_search(pattern: str) -> Node:
    """Parse a pattern that may match anywhere in the text, as JSON schema's `pattern` does."""
    return _search(_Parser(pattern).parse(), count())


def _settle(node: Node, *, at_start: bool, at_end: bool) -> Node:
    """Drop the anchors that always hold; refuse the others."""
    match node:
        case Anchor(is_end, position):
            if at_end if is_end else at_start:
                return EMPTY
            where = "something can follow it" if is_end else "something can come before it"
            hint = "leave it out, or write the options apart in which it stands at the edge"
            raise _error("an anchor inside the pattern", position, f"{where}; {hint}")
        case Concat(parts):
            first = _num_empty(parts)  # up to here nothing was read, and from `last` on neither
            last = len(parts) - 1 - _num_empty(reversed(parts))
            return concat(
                _settle(part, at_start=at_start and i <= first, at_end=at_end and i >= last)
                for i, part in enumerate(parts)
            )
        case Alternate(options):
            return alternate(_settle(o, at_start=at_start, at_end=at_end) for o in options)
        case Repeat(body, low, high):
            once = high == 1
            inner = _settle(body, at_start=at_start and once, at_end=at_end and once)
            return repeat(inner, low, high)
        case Chars() | Both() | Without():
            return node
        case _:
            assert_never(node)


def _num_empty(parts: Iterable[Node]) -> int:
    """Return how many parts that read nothing come before any other."""
    return sum(1 for _ in takewhile(_reads_nothing, parts))


def _reads_nothing(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Concat(parts) | Alternate(parts):
            return all(map(_reads_nothing, parts))
        case Repeat(body):
            return _reads_nothing(body)
        case _:
            return False


def _search(node: Node, expanded: Iterator[int]) -> Node:
    """Allow anything around each top-level option, except where it is anchored.

    `expanded` counts the options that were written out.
    """
    if isinstance(node, Alternate):
        return alternate(_search(option, expanded) for option in node.options)
    parts = node.parts if isinstance(node, Concat) else (node,)
    if len(parts) == 1 and isinstance(parts[0], Alternate):
        return _search(parts[0], expanded)
    starts = 0
    while starts < len(parts) and _is_anchor(parts[starts], is_end=False):
        starts += 1
    ends = len(parts)
    while ends > starts and _is_anchor(parts[ends - 1], is_end=True):
        ends -= 1
    # `(^|_)x` and `x($|_)`: an option that is an anchor decides for itself what surrounds it, where
    # no other anchor has decided that
    for i, is_end, decided in ((starts, False, starts > 0), (ends - 1, True, ends < len(parts))):
        part = parts[i] if starts < ends and not decided else EMPTY
        if isinstance(part, Alternate) and _has_anchor(part, is_end=is_end):
            options = dict.fromkeys(part.options)
            if next(expanded) + len(options) > MAX_EXPANDED:
                raise ConstraintError(
                    f"anchors in more than {MAX_EXPANDED} alternatives are not supported"
                )
            written = (_join((*parts[:i], option, *parts[i + 1 :])) for option in options)
            return alternate(_search(option, expanded) for option in written)
    around = repeat(ANY, 0, None)
    body = _settle(_join(parts[starts:ends]), at_start=starts > 0, at_end=ends < len(parts))
    before = EMPTY if starts else around
    after = EMPTY if ends < len(parts) else around
    return concat((before, body, after))


def _join(parts: tuple[Node, ...]) -> Concat:
    flat: list[Node] = []
    for part in parts:
        flat += part.parts if isinstance(part, Concat) else (part,)
    return Concat(tuple(flat))


def _is_anchor(node: Node, *, is_end: bool) -> bool:
    return isinstance(node, Anchor) and node.is_end == is_end


def _has_anchor(node: Node, *, is_end: bool) -> bool:
    match node:
        case Anchor():
            return node.is_end == is_end
        case Concat(parts) | Alternate(parts):
            return any(_has_anchor(p, is_end=is_end) for p in parts)
        case Repeat(body):
            return _has_anchor(body, is_end=is_end)
        case _:
            return False


def _error(what: str, position: int, why: str = "") -> ConstraintError:
    where = f"position {position}"
    return ConstraintError(f"{what} at {where}" + (f": {why}" if why else ""), where=where)


_LOOK_AROUND = {
    "?=": "look-ahead",
    "?!": "negative look-ahead",
    "?<=": "look-behind",
    "?<!": "negative look-behind",
}
_COMMENT_END = re.compile(r"(?:[^\\)]|\\.)*\)", re.DOTALL)  # as `re`: \) ends none
_SIMPLE_ESCAPES = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class _Parser(Cursor):
    """Recursive descent over the pattern; the same grammar as CPython's `re._parser`."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_LEN:
            raise ConstraintError(
                f"regex has {len(pattern)} characters; at most {MAX_PATTERN_LEN} are taken"
            )
        super().__init__(pattern)
        self.depth = 0

    def parse(self) -> Node:
        node = self._alternation()
        if self.at < len(self.text):
            raise _error("unbalanced parenthesis", self.at)
        return node

    def _alternation(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        # anchors have a position, so they never compare equal here by mistake
        return options[0] if len(options) == 1 else Alternate(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            if self._take("(?#"):
                end = _COMMENT_END.match(self.text, self.at)
                if end is None:
                    raise _error("comment is not closed", self.at - 3)
                self.at = end.end()
                continue
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else _join(tuple(parts))

    def _repeated(self) -> Node:
        start = self.at
        node = self._atom()
        bounds = self._quantifier()
        if bounds is None:
            return node
        if isinstance(node, Anchor):
            raise _error("nothing to repeat but an anchor", start, "leave the repeat out")
        if self._take("?"):  # lazy: the same set of whole matches
            pass
        elif self._peek() == "+":
            raise _error("possessive quantifiers are not supported", self.at)
        position = self.at
        if self._quantifier() is not None:
            raise _error("multiple repeat", position)
        low, high = bounds
        return Repeat(node, low, high)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if self._peek() != "{":
            return None
        start = self.at
        end = self.text.find("}", start)
        low, comma, high = self.text[start + 1 : end].partition(",")
        if end < 0 or (not low and not comma) or not all(_is_digits(n) for n in (low, high)):
            return None  # a literal brace, as in `re`
        self.at = end + 1
        minimum = int(low[:9] or 0)
        maximum = minimum if not comma else int(high[:9]) if high else None
        if minimum > MAX_REPEAT or (maximum or 0) > MAX_REPEAT:
            raise _error(f"a repeat may go up to {MAX_REPEAT}", start)
        if maximum is not None and maximum < minimum:
            raise _error("the repeat's minimum is above its maximum", start)
        return minimum, maximum

    def _atom(self) -> Node:
        start = self.at
        char = self.text[start]
        self.at += 1
        match char:
            case "(":
                return self._group(start)
            case "[":
                return self._set(start)
            case ".":
                return DOT
            case "^":
                return Anchor(False, start)
            case "$":
                return Anchor(True, start)
            case "\\":
                return self._escape(start)
            case "*" | "+" | "?":
                raise _error("nothing to repeat", start)
            case "{":
                self.at = start
                if self._quantifier() is not None:
                    raise _error("nothing to repeat", start)
                self.at = start + 1
        return _one(self._code_point(start), start)

    def _code_point(self, start: int) -> int:
        code = ord(self.text[start])
        if 0xD800 <= code <= 0xDFFF:
            raise _error("a lone surrogate is not a character", start)
        return code

    def _group(self, start: int) -> Node:
        self.depth += 1
        if self.depth > MAX_GROUP_DEPTH:
            raise _error(f"groups nest deeper than {MAX_GROUP_DEPTH}", start)
        for opening, name in _LOOK_AROUND.items():
            if self.text.startswith(opening, self.at):
                raise _error(f"{name} is not supported: it is not regular", start)
        if self._take("?P=") or self._take("?("):
            raise _error("back-references are not supported: they are not regular", start)
        if self._take("?>"):
            raise _error("atomic groups are not supported", start)
        if self._take("?P<") or self._take("?<"):
            end = self.text.find(">", self.at)
            if end < 0 or not self.text[self.at : end].isidentifier():
                raise _error("bad group name", start)
            self.at = end + 1
        elif not self._take("?:") and self._peek() == "?":
            raise _error("inline flags are not supported", start)
        node = self._alternation()
        if not self._take(")"):
            raise _error("missing ), unterminated group", start)
        self.depth -= 1
        # a group is one atom even when it is a sequence: `(ab)*`
        return node

    def _escape(self, start: int) -> Node:
        char = self._peek()
        if char in ("A", "Z", "z"):
            self.at += 1
            return Anchor(char != "A", start)
        if char in ("b", "B"):
            raise _error(f"word boundary \\{char} is not supported", start)
        if char in CLASSES:
            self.at += 1
            return Chars(CLASSES[char])
        if char.isascii() and char.isdigit() and char != "0" and not self._is_octal(3):
            raise _error("back-references are not supported: they are not regular", start)
        return _one(self._escaped_code(start), start)

    def _is_octal(self, num_digits: int) -> bool:
        digits = self.text[self.at : self.at + num_digits]
        return len(digits) == num_digits and all(c in "01234567" for c in digits)

    def _escaped_code(self, start: int) -> int:
        """Read the escape after the backslash as one code point."""
        char = self._peek()
        self.at += 1
        if char == "":
            raise _error("bad escape at the end of the pattern", start)
        if char in _SIMPLE_ESCAPES:
            return _SIMPLE_ESCAPES[char]
        if char in _HEX_ESCAPES:
            code = self._hex(start, _HEX_ESCAPES[char])
            if 0xD800 <= code <= 0xDBFF and self._take("\\u"):  # a pair, as JSON writes it
                low = self._hex(start, 4)
                if not 0xDC00 <= low <= 0xDFFF:
                    raise _error("a lone surrogate is not a character", start)
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            if code > MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF:
                raise _error("the escape is not a character", start)
            return code
        if char in "01234567":
            digits = char
            while len(digits) < 3 and self._peek() and self._peek() in "01234567":
                digits += self._peek()
                self.at += 1
            if int(digits, 8) > 0o377:
                raise _error("octal escape above \\377", start)
            return int(digits, 8)
        if char in ("p", "P"):
            raise _error(f"Unicode properties (\\{char}) are not supported", start)
        if char.isascii() and char.isalnum():
            raise _error(f"unknown escape \\{char}", start)
        return self._code_point(self.at - 1)

    def _hex(self, start: int, num_digits: int) -> int:
        digits = self.text[self.at : self.at + num_digits]
        if len(digits) < num_digits or any(c not in "0123456789abcdefABCDEF" for c in digits):
            raise _error(f"the escape needs {num_digits} hexadecimal digits", start)
        self.at += num_digits
        return int(digits, 16)

    def _set(self, start: int) -> Node:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            if self._peek() == "":
                raise _error("missing ], unterminated character set", start)
            position = self.at
            low = self._set_item(position)
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._set_item(self.at)
                if isinstance(low, tuple) or isinstance(high, tuple):
                    raise _error("a class can't be the end of a range", position)
                if high < low:
                    raise _error("bad character range", position)
                ranges.append((low, high))
            else:
                ranges += low if isinstance(low, tuple) else [(low, low)]
        self.at += 1
        found = normalise(ranges)
        return Chars(complement(found) if negated else found)

    def _set_item(self, start: int) -> int | Ranges:
        if self._take("\\"):
            char = self._peek()
            if char in CLASSES:
                self.at += 1
                return CLASSES[char]
            if char == "b":
                self.at += 1
                return 8
            if char in ("8", "9"):
                raise _error(f"unknown escape \\{char}", start)
            return self._escaped_code(start)
        if self._peek() == "":
            raise _error("missing ], unterminated character set", start)
        self.at += 1
        return self._code_point(start)


def _is_digits(text: str) -> bool:
    return all(c in "0123456789" for c in text)


def _one(code: int, position: int) -> Chars:
    if 0xD800 <= code <= 0xDFFF:
        raise _error("a lone surrogate is not a character", position)
    return character(code)
