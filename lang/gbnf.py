"""GBNF (llama.cpp's grammar format), read into rules; knows no engine.

A grammar without recursion becomes a regex, which is exact and fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from . import regex_syntax
from .errors import ConstraintError
from .regex_syntax import Node
from .text_places import Cursor, line_and_column
from .unicode_check import lone_surrogate

MAX_GRAMMAR_CHARS = 500_000
MAX_DEPTH = 100
MAX_ROUNDS = 100  # past this a grammar counts as one that ends: only speed is lost
MAX_REGEX_NODES = 20_000  # a larger grammar is kept as Lark, where shared rules stay shared


@dataclass(frozen=True, slots=True)
class Terminal:
    """A character or a literal, and where it is written."""

    node: Node
    position: int


@dataclass(frozen=True, slots=True)
class RuleRef:
    """Another rule, by name, and where it is asked for."""

    name: str
    position: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Any of the options."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """The body `low` to `high` times (None: no upper bound)."""

    body: Expression
    low: int
    high: int | None


Expression = Terminal | RuleRef | Sequence | Alternatives | Repetition


@dataclass(frozen=True, slots=True)
class GbnfGrammar:
    """The rules by name; `root` is where a sentence starts."""

    rules: dict[str, Expression]
    source: str

    def as_regex(self) -> Node | None:
        """Return the grammar as a regex; None if it is recursive or grows too large."""
        done: dict[str, Node] = {}
        sizes: dict[str, int] = {}
        for name in self._dependencies_first():
            if name is None:
                return None
            sizes[name] = _size(self.rules[name], sizes)
            if sizes[name] > MAX_REGEX_NODES:
                return None
            done[name] = _to_regex(self.rules[name], done)
        return done["root"]

    def _dependencies_first(self) -> list[str | None]:
        """Return the rules under root, each after what it uses; None stands for a cycle."""
        order: list[str | None] = []
        state: dict[str, bool] = {}  # False while on the stack
        stack: list[tuple[str, bool]] = [("root", False)]
        while stack:
            name, leaving = stack.pop()
            if leaving:
                state[name] = True
                order.append(name)
            elif name not in state:
                state[name] = False
                stack.append((name, True))
                stack += [(ref.name, False) for ref in _references(self.rules[name])]
            elif not state[name]:
                return [None]
        return order


@lru_cache(maxsize=64)
def check_gbnf(text: str) -> None:
    """Raise ConstraintError, with line and column, for a grammar that can't be used.

    A text that passed costs nothing as long as it is remembered.
    """
    parse_gbnf(text)


def parse_gbnf(text: str) -> GbnfGrammar:
    """Parse a grammar. Raises ConstraintError with `where` as line and column."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ConstraintError(
            f"grammar has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken"
        )
    parser = _Parser(text)
    if (position := lone_surrogate(text)) is not None:
        raise parser.error("a lone surrogate is not a character,", position)
    rules = parser.parse()
    if "root" not in rules:
        what = "there is no rule named root, where every text begins,"
        raise parser.error(what, min(parser.starts.values(), default=0))
    for rule in rules.values():
        for ref in _references(rule):
            if ref.name not in rules:
                raise parser.error(f"rule {ref.name!r} is not defined", ref.position)
    if not _can_end(rules):
        what = "rule 'root' can never end, as each of its options needs itself again,"
        raise parser.error(what, parser.starts["root"])
    return GbnfGrammar(rules, text)


def _can_end(rules: dict[str, Expression]) -> bool:
    """Whether a finite text fits `root`."""
    ending: set[str] = set()

    def ends(expression: Expression) -> bool:
        match expression:
            case RuleRef(name):
                return name in ending
            case Sequence(parts):
                return all(map(ends, parts))
            case Alternatives(options):
                return any(map(ends, options))
            case Repetition(body, low):
                return low == 0 or ends(body)
            case Terminal():
                return True
            case _:
                assert_never(expression)

    # last rules first: what is used mostly comes after what uses it
    names = list(reversed(rules))
    for _ in range(MAX_ROUNDS):
        before = len(ending)
        ending.update(name for name in names if name not in ending and ends(rules[name]))
        if "root" in ending or len(ending) == before:
            return "root" in ending
    return True


def _references(expression: Expression) -> list[RuleRef]:
    match expression:
        case RuleRef():
            return [expression]
        case Sequence(children) | Alternatives(children):
            return [ref for child in children for ref in _references(child)]
        case Repetition(body):
            return _references(body)
        case Terminal():
            return []
        case _:
            assert_never(expression)


def _size(expression: Expression, sizes: dict[str, int]) -> int:
    match expression:
        case RuleRef(name):
            return sizes[name]
        case Sequence(children) | Alternatives(children):
            return 1 + sum(_size(child, sizes) for child in children)
        case Repetition(body):
            return 1 + _size(body, sizes)
        case Terminal():
            return 1
        case _:
            assert_never(expression)


def _to_regex(expression: Expression, done: dict[str, Node]) -> Node:
    match expression:
        case Terminal(node):
            return node
        case RuleRef(name):
            return done[name]
        case Sequence(parts):
            return regex_syntax.concat(_to_regex(p, done) for p in parts)
        case Alternatives(options):
            return regex_syntax.alternate(_to_regex(o, done) for o in options)
        case Repetition(body, low, high):
            return regex_syntax.repeat(_to_regex(body, done), low, high)
        case _:
            assert_never(expression)


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class _Parser(Cursor):
    """Recursive descent, as llama.cpp's: a rule ends at a newline outside parentheses."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.starts: dict[str, int] = {}  # where each rule is defined
        self._height = 0  # how many repetitions nest in what was parsed last

    def error(self, message: str, position: int) -> ConstraintError:
        where = line_and_column(self.text, position)
        return ConstraintError(f"GBNF: {message} at {where}", where=where)

    def parse(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._space(newlines=True)
        while self.at < len(self.text):
            start = self.at
            name = self._name()
            self._space(newlines=False)
            if not self._take("::="):
                raise self.error("expected ::=", self.at)
            self._space(newlines=True)
            if name in rules:
                raise self.error(f"rule {name!r} is defined twice", start)
            self.starts[name] = start
            rules[name] = self._alternatives(nested=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self.error("expected the end of the rule", self.at)
            self._space(newlines=True)
        return rules

    def _space(self, *, newlines: bool) -> None:
        while (char := self._peek()) and char in (" \t\r\n#" if newlines else " \t#"):
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                self.at += 1

    def _name(self) -> str:
        start = self.at
        while (char := self._peek()) and ((char.isascii() and char.isalnum()) or char in "-_"):
            self.at += 1
        if self.at == start:
            raise self.error("expected a rule name", start)
        return self.text[start : self.at]

    def _alternatives(self, *, nested: bool) -> Expression:
        options, height = [self._sequence(nested=nested)], self._height
        while self._take("|"):
            self._space(newlines=True)
            options.append(self._sequence(nested=nested))
            height = max(height, self._height)
        self._height = height
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def _sequence(self, *, nested: bool) -> Expression:
        parts: list[Expression] = []
        height = 0
        while (char := self._peek()) and char not in "|)\r\n":
            parts.append(self._repeated(nested=nested))
            height = max(height, self._height)
        self._height = height
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, *, nested: bool) -> Expression:
        self._height = 0
        item = self._item()
        self._space(newlines=nested)
        while self._peek() and self._peek() in "*+?{":
            position = self.at
            low, high = self._bounds()
            if high is not None and (high < low or high > regex_syntax.MAX_REPEAT):
                raise self.error("bad repetition bounds", position)
            self._height += 1
            if self._height > MAX_DEPTH:
                raise self.error(f"repetitions nest deeper than {MAX_DEPTH}", position)
            item = Repetition(item, low, high)
            self._space(newlines=nested)
        return item

    def _bounds(self) -> tuple[int, int | None]:
        start = self.at
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        end = self.text.find("}", start)
        low, comma, high = self.text[start + 1 : end].replace(" ", "").partition(",")
        digits = "0123456789"
        if end < 0 or not low or any(c not in digits for c in low + high) or len(low + high) > 14:
            raise self.error("bad repetition bounds", start)
        self.at = end + 1
        return int(low), int(low) if not comma else int(high) if high else None

    def _item(self) -> Expression:
        start = self.at
        if self._take('"'):
            return self._literal(start)
        if self._take("["):
            return self._class(start)
        if self._take("."):
            return Terminal(regex_syntax.ANY, start)
        if self._take("("):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise self.error(f"parentheses nest deeper than {MAX_DEPTH}", start)
            self._space(newlines=True)
            inner = self._alternatives(nested=True)
            if not self._take(")"):
                raise self.error("expected )", self.at)
            self.depth -= 1
            return inner
        return RuleRef(self._name(), start)

    def _character(self, start: int) -> str:
        char = self._peek()
        if not char:
            raise self.error("not closed", start)
        self.at += 1
        if char != "\\":
            return char
        kind = self._peek()
        self.at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind in _HEX_ESCAPES:
            digits = self.text[self.at : self.at + _HEX_ESCAPES[kind]]
            self.at += _HEX_ESCAPES[kind]
            is_hex = all(c in "0123456789abcdefABCDEF" for c in digits)
            if is_hex and len(digits) == _HEX_ESCAPES[kind]:
                code = int(digits, 16)
                if code <= regex_syntax.MAX_CODE_POINT and not 0xD800 <= code <= 0xDFFF:
                    return chr(code)
        raise self.error("bad escape", self.at - 1)

    def _literal(self, start: int) -> Expression:
        text = ""
        while not self._take('"'):
            text += self._character(start)
        return Terminal(regex_syntax.literal(text), start)

    def _class(self, start: int) -> Expression:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            position = self.at
            low = high = ord(self._character(start))
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = ord(self._character(start))
                if high < low:
                    raise self.error("bad character range", position)
            ranges.append((low, high))
        found = regex_syntax.normalise(ranges)
        node = regex_syntax.Chars(regex_syntax.complement(found) if negated else found)
        if node == regex_syntax.NEVER:
            raise self.error("the character class is empty", start)
        return Terminal(node, start)
