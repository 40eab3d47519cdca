"""Refuses Lark grammars that no engine can follow, with line and column; compiles nothing.

Reads llguidance's dialect as far as names go. What it doesn't know it lets pass: that is the
engine's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .errors import ConstraintError
from .lark_lexer import Token, lark_error, lark_tokens
from .unicode_check import lone_surrogate

MAX_GRAMMAR_CHARS = 500_000
_MAX_DEPTH = 60
_MAX_ROUNDS = 100  # past this a grammar counts as one that ends: only speed is lost
_CASES = "a name is in small letters, for a rule, or in capitals, for a terminal"
_ESCAPES = re.compile(r"\\(?P<kind>.)", re.DOTALL)
_PLAIN_CLASS = re.compile(r"\[(?:\\.|[^\[\]\\])*\]", re.DOTALL)
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


class Ref(NamedTuple):
    """A name that is asked for, and where."""

    name: str
    position: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a text is made of: one of `options`, each of them whole; no option means any text."""

    options: tuple[tuple[Ref | Needs, ...], ...]


_ANYTHING = Needs(((),))


class Definition(NamedTuple):
    """A rule or a terminal."""

    position: int
    body: Needs
    references: tuple[Ref, ...]
    tokens: list[Token]


class _OpaqueError(Exception):
    """Something that is not read here."""


@lru_cache(maxsize=64)
def check_lark_text(text: str) -> None:
    """Raise ConstraintError, with line and column, for a grammar that can't be used.

    That is: what is no token, names without a definition or with two, no `start`, terminals in a
    circle, a `start` that can never end, look-around, special tokens, options, and JSON schemas
    that are none.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ConstraintError(
            f"grammar has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken"
        )
    if (position := lone_surrogate(text)) is not None:
        raise lark_error(text, "a lone surrogate is not a character,", position)
    _Grammar(text).check()


class _Grammar:
    """The definitions of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = lark_tokens(text)
        self._at = 0
        self._depth = 0
        self._definitions: dict[str, Definition] = {}
        self._imported: set[str] = set()
        self._ignored: list[Definition] = []

    def check(self) -> None:
        while self._peek().kind != "end":
            self._item()
        start = self._definitions.get("start")
        if start is None:
            rules = [name for name in self._definitions if name.islower()]
            what = "there is no rule named start, where every text begins"
            raise self._error(what + _meant("start", rules), 0)
        reached = self._reach([start, *self._ignored])
        used = [self._definitions[name] for name in reached if name in self._definitions]
        for definition in (start, *self._ignored, *used):
            for token in definition.tokens:
                self._check_token(token)
        for ref in _circles(self._definitions, reversed(reached)):
            what = f"terminal {ref.name!r} holds itself, which only rules (in small letters) may,"
            raise self._error(what, ref.position)
        if not self._can_end(reached):
            what = "rule 'start' can never end: each of its options needs itself again"
            raise self._error(what, start.position)

    def _error(self, what: str, position: int) -> ConstraintError:
        return lark_error(self._text, what, position)

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _take(self, kind: str) -> bool:
        is_next = self._peek().kind == kind
        self._at += is_next
        return is_next

    def _check_token(self, token: Token) -> None:
        if token.kind == "regex":
            _check_regex(self._text, token)
        elif token.kind == "special" and not token.text.startswith("<["):
            what = (
                f"{token.text} names a special token, which no value holds (its text is a string)"
            )
            raise self._error(what, token.position)
        elif token.kind == "grammar":
            raise self._error(
                f"{token.text} is a grammar elsewhere: write its rules", token.position
            )
        elif token.text == "%json":
            _check_json(self._text, token)

    def _item(self) -> None:
        """Read a definition or a directive."""
        if self._take("newline"):
            return
        first = self._peek()
        self._at += 1
        if first.kind in ("rule", "terminal"):
            self._definition(first)
        elif first.text == "%ignore":
            self._ignored.append(self._body())
        elif first.text == "%llguidance":
            raise self._error("a grammar may not set options of llguidance", first.position)
        elif first.kind == "directive":
            while self._peek().kind not in ("newline", "end"):
                if self._peek().kind in ("rule", "terminal"):
                    self._imported.add(self._peek().text)
                self._at += 1
        else:
            hint = " (an option goes on at the line after the last one)" * (first.kind == "|")
            raise self._error(f"expected a rule, not {first.text!r}{hint}", first.position)

    def _definition(self, first: Token) -> None:
        has_options = False  # such as max_tokens, which ends what has no end of its own
        while not self._take(":"):
            token = self._peek()
            word = self._word(first.position)
            if token.position == first.end and token.kind in ("rule", "terminal"):
                raise self._error(f"{word!r} is no name: {_CASES}", first.position)
            if token.kind in ("newline", "end"):
                raise self._error(f"expected a colon after {word!r}", token.position)
            has_options |= token.kind == "["
            self._at += 1
        name = first.text.lstrip("!")
        if first.kind == "rule":
            name = name.lstrip("?")
        if name in self._definitions:
            raise self._error(f"{name!r} is defined twice", first.position)
        read = self._body()
        body = _ANYTHING if has_options else read.body
        self._definitions[name] = read._replace(position=first.position, body=body)

    def _body(self) -> Definition:
        start = self._at
        try:
            body = self._options()
            self._expect_end()
        except _OpaqueError:
            body, self._depth = _ANYTHING, 0
            while not self._is_end():
                self._at += 1
        used = self._tokens[start : self._at]
        references = tuple(
            Ref(token.text, token.position)
            for before, token in zip([None, *used], used, strict=False)
            if token.kind in ("rule", "terminal") and (before is None or before.kind != "arrow")
        )
        return Definition(0, body, references, used)

    def _is_end(self) -> bool:
        """Whether a definition ends here: at a line's end, unless the next begins with `|`."""
        if self._peek().kind == "newline":
            return self._peek(1).kind != "|"
        return self._peek().kind == "end"

    def _expect_end(self) -> None:
        if self._peek().kind in (")", "]", "}"):
            raise self._error(f"{self._peek().text} closes nothing", self._peek().position)
        if not self._is_end():
            raise _OpaqueError

    def _options(self) -> Needs:
        options = [self._sequence()]
        while self._peek().kind == "|" or (self._peek().kind == "newline" and not self._is_end()):
            self._take("newline")
            self._take("|")
            options.append(self._sequence())
        return Needs(tuple(options))

    def _sequence(self) -> tuple[Ref | Needs, ...]:
        parts: list[Ref | Needs] = []
        while self._peek().kind not in ("newline", "end", "|", "arrow", ")", "]", "}"):
            part = self._atom()
            parts.append(_ANYTHING if self._may_be_left_out() else part)
        if self._take("arrow") and not self._take("rule"):
            raise _OpaqueError
        return tuple(parts)

    def _atom(self) -> Ref | Needs:
        token = self._peek()
        self._at += 1
        if token.kind in ("(", "["):
            return self._group(token)
        if token.kind in ("rule", "terminal"):
            is_template = self._peek().kind == "{" and self._peek(1).kind not in ("number", ",")
            if is_template or self._peek().kind == ":":
                raise _OpaqueError
            return Ref(token.text, token.position)
        if token.kind == "string" and self._take("dots"):
            self._take("string")
        elif token.kind not in ("string", "regex", "special", "directive"):
            raise _OpaqueError
        return _ANYTHING

    def _group(self, opening: Token) -> Needs:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _OpaqueError
        inner = self._options()
        if not self._take(")" if opening.kind == "(" else "]"):
            if self._is_end():
                what = (
                    f"{opening.text} is not closed: a line goes on at one that begins with | only"
                )
                raise self._error(what, opening.position)
            raise _OpaqueError
        self._depth -= 1
        return inner if opening.kind == "(" else _ANYTHING

    def _may_be_left_out(self) -> bool:
        """Read what follows an atom; whether it lets there be none."""
        sign = self._peek()
        if self._take("sign"):
            return sign.text in "*?"
        if self._take("~"):
            low = self._number()
            if self._take("dots"):
                self._number()
            return low == 0
        if self._take("{"):
            low = 0 if self._peek().kind == "," else self._number()
            if self._take(",") and self._peek().kind != "}":
                self._number()
            if not self._take("}"):
                raise _OpaqueError
            return low == 0
        return False

    def _number(self) -> int:
        token = self._peek()
        if not self._take("number") or len(token.text) > 9:
            raise _OpaqueError
        return int(token.text)

    def _reach(self, roots: list[Definition]) -> dict[str, None]:
        """Return the names that a text may need, each after what it needs, but for circles.

        Raises ConstraintError for one without a definition.
        """
        reached: dict[str, None] = {}
        entered: set[str] = set()
        todo = [(ref, False) for root in roots[1:] for ref in root.references]
        todo.append((Ref("start", 0), False))
        while todo:
            ref, leaving = todo.pop()
            if leaving:
                reached[ref.name] = None
            elif ref.name in self._definitions and ref.name not in entered:
                entered.add(ref.name)
                todo.append((ref, True))
                needed = self._definitions[ref.name].references
                todo += [(inner, False) for inner in reversed(needed)]
            elif ref.name not in entered and ref.name not in self._imported:
                word = self._word(ref.position)
                known = [*self._definitions, *self._imported]
                hint = _meant(word, known) if word == ref.name else f" ({_CASES})"
                raise self._error(f"{word!r} is not defined{hint},", ref.position)
        return reached

    def _word(self, position: int) -> str:
        start = position
        while start and re.match(r"[\w-]", self._text[start - 1]):
            start -= 1
        found = re.compile(r"[!?]?[\w-]+").match(self._text, start)
        return found[0] if found else self._text[position]

    def _can_end(self, names: Iterable[str]) -> bool:
        """Whether a finite text fits `start`."""
        ending = {name for name in self._definitions if name.isupper()}

        def ends(part: Ref | Needs) -> bool:
            if isinstance(part, Ref):
                return part.name in ending or part.name not in self._definitions
            return any(all(map(ends, option)) for option in part.options)

        for _ in range(_MAX_ROUNDS):
            before = len(ending)
            ending.update(n for n in names if n not in ending and ends(self._definitions[n].body))
            if "start" in ending or len(ending) == before:
                return "start" in ending
        return True


def _meant(word: str, known: Iterable[str]) -> str:
    """Return what may have been meant by a name, as the middle of a sentence."""
    import difflib  # only errors need it

    found = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _circles(definitions: dict[str, Definition], names: Iterable[str]) -> Iterator[Ref]:
    """Yield references between terminals that close a circle."""
    is_done: dict[str, bool] = {}
    for name in names:
        stack = [(Ref(name, 0), False)]
        while stack:
            ref, leaving = stack.pop()
            if leaving:
                is_done[ref.name] = True
            elif not is_done.get(ref.name, True):
                yield ref
            elif ref.name.isupper() and ref.name in definitions and ref.name not in is_done:
                is_done[ref.name] = False
                stack.append((ref, True))
                stack += [(inner, False) for inner in definitions[ref.name].references]


def _check_regex(text: str, token: Token) -> None:
    """Refuse what is not regular; where a class holds classes, the engine finds it."""
    pattern, _, flags = token.text[1:].rpartition("/")
    if "x" in flags:
        return
    for kind in _ESCAPES.finditer(pattern):
        if kind["kind"] in "123456789" and not _PLAIN_CLASS.search(pattern):
            what = f"a back-reference ({kind[0]}) is not regular, and can't be used,"
            raise lark_error(text, what, token.position + 1 + kind.start())
    bare = _ESCAPES.sub("..", pattern)
    bare = _PLAIN_CLASS.sub(lambda found: "." * len(found[0]), bare)
    found = _LOOK_AROUND.search(bare)
    if found is not None and "[" not in bare:
        what = f"look-around ({found[0]}) is not regular, and can't be used,"
        raise lark_error(text, what, token.position + 1 + found.start())


def _check_json(text: str, token: Token) -> None:
    from .schema_check import check_json_schema, check_spelling  # most grammars have none
    from .schema_patterns import check_patterns

    schema = text[token.position + len("%json") : token.end].lstrip()
    try:
        if schema.startswith("{"):
            check_json_schema(schema)
            check_spelling(schema)
            check_patterns(schema, strict=True)
    except ConstraintError as error:
        where = lark_error(text, "", token.end - len(schema)).where
        raise ConstraintError(
            f"grammar: %json at {where}: {error}", where=f"{where} {error.where}"
        ) from None
