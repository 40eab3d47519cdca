"""GBNF written as Lark for llguidance, and the way back from its places to the user's.

GBNF speaks of characters, Lark of lexemes that take as much as they can; so the Lark made here has
one terminal per character.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import assert_never

from umbel.lang import regex_syntax
from umbel.lang.errors import ConstraintError
from umbel.lang.gbnf import (
    Alternatives,
    Expression,
    GbnfGrammar,
    Repetition,
    RuleRef,
    Sequence,
    Terminal,
)
from umbel.lang.text_places import line_and_column

_MAX_NESTED = 10  # parentheses inside each other; llguidance takes 29
_PLACE = re.compile(r"line (\d+), column (\d+)")
_DERIVED = re.compile(r" \(at .*", re.DOTALL)  # what stands there in the Lark


class LarkText:
    """A grammar as llguidance's Lark, one rule a line, and where each part of it came from."""

    def __init__(self, grammar: GbnfGrammar) -> None:
        self._source = grammar.source
        self._names = {name: f"r{i}" for i, name in enumerate(grammar.rules)}
        self._lines: list[str] = [f"start: {self._names['root']}"]
        self._marks: list[list[tuple[int, int]]] = [[]]  # by line: (column from 0, position)
        for name, rule in grammar.rules.items():
            self._write_rule(self._names[name], rule)
        self.text = "\n".join(self._lines) + "\n"

    def translate(self, error: ConstraintError) -> ConstraintError:
        """Return llguidance's error with the place in the user's grammar."""
        where = self.place_of(error.where)
        what = _DERIVED.sub("", str(error))
        return ConstraintError(f"GBNF: {what}" + (f" at {where}" if where else ""), where=where)

    def place_of(self, where: str) -> str:
        """Return the place in GBNF of one in Lark, both as line and column; "" for none."""
        found = _PLACE.fullmatch(where)
        line, column = (int(found[1]) - 1, int(found[2]) - 1) if found else (-1, 0)
        if not 0 <= line < len(self._lines):
            return ""
        marks = self._marks[line]
        at = bisect_right(marks, column, key=lambda mark: mark[0])
        return line_and_column(self._source, marks[max(0, at - 1)][1]) if marks else ""

    def _write_rule(self, name: str, rule: Expression) -> None:
        number = len(self._lines)
        self._lines.append("")
        self._marks.append([])
        pieces = [f"{name}: "]
        self._write(rule, pieces, number, 0)
        self._lines[number] = "".join(pieces)
        # while it was written, a mark held the number of pieces before it
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece))
        self._marks[number] = [(starts[count], at) for count, at in self._marks[number]]

    def _write(self, expression: Expression, pieces: list[str], line: int, depth: int) -> None:
        match expression:
            case Terminal(node, position):
                self._marks[line].append((len(pieces), position))
                parts = node.parts if isinstance(node, regex_syntax.Concat) else (node,)
                pieces.append(" ".join(f"/{regex_syntax.render(p)}/" for p in parts) or '""')
            case RuleRef(name, position):
                self._marks[line].append((len(pieces), position))
                pieces.append(self._names[name])
            case Sequence(parts):
                self._write_joined(parts, " ", pieces, line, depth)
                if not parts:
                    pieces.append('""')
            case Alternatives():
                self._write_group(expression, pieces, line, depth)
            case Repetition(_, _, 0):
                pieces.append('""')  # llguidance takes no {0}
            case Repetition(body, low, high):
                self._write_group(body, pieces, line, depth)
                bounds = f"{{{low},{'' if high is None else high}}}"
                pieces.append(
                    {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high), bounds)
                )
            case _:
                assert_never(expression)

    def _write_group(self, body: Expression, pieces: list[str], line: int, depth: int) -> None:
        """Write parentheses; where they nest too deep, a rule of their own."""
        if depth >= _MAX_NESTED:
            name = f"g{len(self._lines)}"
            pieces.append(name)
            self._write_rule(name, body)
            return
        pieces.append("(")
        if isinstance(body, Alternatives):
            self._write_joined(body.options, " | ", pieces, line, depth + 1)
        else:
            self._write(body, pieces, line, depth + 1)
        pieces.append(")")

    def _write_joined(
        self, parts: tuple[Expression, ...], sign: str, pieces: list[str], line: int, depth: int
    ) -> None:
        for i, part in enumerate(parts):
            pieces += [sign] if i else []
            self._write(part, pieces, line, depth)
