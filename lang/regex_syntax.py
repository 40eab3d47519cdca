"""Regular expressions as a small tree: build, simplify, print; knows no bytes and no tokens.

Every engine gets its pattern from this tree, so that all of them agree on what it means.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, assert_never

MAX_REPEAT = 1_000_000
MAX_CODE_POINT = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint, inclusive


@dataclass(frozen=True, slots=True)
class Chars:
    """One code point out of a set; the empty set matches nothing."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concat:
    """One after the other; no parts match the empty string."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternate:
    """Any of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The body `low` to `high` times (None: no upper bound)."""

    body: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Both:
    """What both sides match. No engine but our own automaton can take it."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Without:
    """What the left side matches and the right side doesn't. As `Both`, for our automaton only."""

    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$` as written, before the parser resolves it."""

    is_end: bool
    position: int


Node = Chars | Concat | Alternate | Repeat | Both | Without | Anchor

EMPTY = Concat(())
NEVER = Chars(())


def normalise(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges sorted, joined, and without the surrogates (which no text can hold)."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    result: list[tuple[int, int]] = []
    for low, high in joined:
        if low <= 0xD7FF:
            result.append((low, min(high, 0xD7FF)))
        if high >= 0xE000:
            result.append((max(low, 0xE000), high))
    return tuple(result)


def complement(ranges: Ranges) -> Ranges:
    """Return every code point that is not in the ranges."""
    result, start = [], 0
    for low, high in ranges:
        if low > start:
            result.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        result.append((start, MAX_CODE_POINT))
    return normalise(result)


def intersect(left: Ranges, right: Ranges) -> Ranges:
    """Return the code points in both."""
    return complement(normalise(complement(left) + complement(right)))


DIGITS: Ranges = ((0x30, 0x39),)
WORD = normalise([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACE = normalise([(0x09, 0x0D), (0x20, 0x20)])
ANY = Chars(complement(()))
DOT = Chars(complement(((0x0A, 0x0A),)))
CLASSES = {
    "d": DIGITS,
    "D": complement(DIGITS),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(SPACE),
}


def chars(text: str) -> Chars:
    """Return the set of the characters in `text`."""
    return Chars(normalise((ord(c), ord(c)) for c in text))


def literal(text: str) -> Node:
    """Return what matches exactly `text`."""
    return concat(character(ord(c)) for c in text)


@lru_cache(maxsize=4096)  # thousands of choices hold few different characters
def character(code: int) -> Chars:
    """Return what matches one code point."""
    return Chars(((code, code),))


def concat(parts: Iterable[Node]) -> Node:
    """Join parts, flat; NEVER if one of them is."""
    flat: list[Node] = []
    for part in parts:
        if part == NEVER:
            return NEVER
        if isinstance(part, Concat):
            flat += part.parts
        else:
            flat.append(part)
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def alternate(options: Iterable[Node]) -> Node:
    """Return any of the options, flat, single characters as one set; NEVER if there is none."""
    flat: list[Node] = []
    ranges: list[tuple[int, int]] = []
    for option in options:
        for leaf in option.options if isinstance(option, Alternate) else (option,):
            if isinstance(leaf, Chars):
                ranges += leaf.ranges
            else:
                flat.append(leaf)
    if ranges:
        flat.append(Chars(normalise(ranges)))
    if not flat:
        return NEVER
    return flat[0] if len(flat) == 1 else Alternate(tuple(flat))


def repeat(body: Node, low: int, high: int | None) -> Node:
    """Return the body repeated; simplifies what is trivial."""
    if body == EMPTY or high == 0 or (body == NEVER and low == 0):
        return EMPTY
    if body == NEVER or (low == 1 and high == 1):
        return body
    return Repeat(body, low, high)


def optional(body: Node) -> Node:
    """Return the body or nothing."""
    return repeat(body, 0, 1)


Step = tuple[Any, ...]  # (class, own values, numbers of the parts, which come before)


def to_steps(node: Node) -> list[Step]:
    """Return the tree as a flat list, shared parts once: it nests too deeply to be pickled."""
    steps: list[Step] = []
    numbers: dict[int, int] = {}
    todo = [(node, False)]
    while todo:
        item, is_ready = todo.pop()
        if id(item) in numbers:
            continue
        parts, values = _take_apart(item)
        if is_ready or not parts:
            numbers[id(item)] = len(steps)
            steps.append((type(item), values, tuple(numbers[id(p)] for p in parts)))
        else:
            todo.append((item, True))
            todo += ((part, False) for part in parts)
    return steps


def from_steps(steps: list[Step]) -> Node:
    """Return the tree of `to_steps`."""
    nodes: list[Node] = []
    for kind, values, numbers in steps:
        parts = [nodes[n] for n in numbers]
        nodes.append(kind(tuple(parts)) if kind in (Concat, Alternate) else kind(*parts, *values))
    return nodes[-1]


def _take_apart(node: Node) -> tuple[tuple[Node, ...], tuple[Any, ...]]:
    match node:
        case Concat(parts) | Alternate(parts):
            return parts, ()
        case Repeat(body, low, high):
            return (body,), (low, high)
        case Both(left, right) | Without(left, right):
            return (left, right), ()
        case Chars(ranges):
            return (), (ranges,)
        case Anchor(is_end, position):
            return (), (is_end, position)
        case _:
            assert_never(node)


def render(node: Node) -> str:
    r"""Print the tree in the syntax of Rust's regex crate, which both host engines read.

    Classes are spelled out, so the engine's own idea of `\d` or `.` plays no part.
    Raises ValueError for what that syntax lacks: intersection, difference, and NEVER.
    """
    match node:
        case Chars(ranges):
            if not ranges:
                raise ValueError("nothing matches")
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return _render_char(ranges[0][0])
            inside = "".join(
                _render_char(low) if low == high else f"{_render_char(low)}-{_render_char(high)}"
                for low, high in ranges
            )
            return f"[{inside}]"
        case Concat(parts):
            return "".join(
                f"(?:{render(p)})" if isinstance(p, Alternate) else render(p) for p in parts
            )
        case Alternate(options):
            return "|".join(render(o) for o in options)
        case Repeat(body, low, high):
            inner = render(body) if isinstance(body, Chars) else f"(?:{render(body)})"
            return inner + _render_bounds(low, high)
        case Both() | Without() | Anchor():
            raise ValueError(f"{type(node).__name__} has no regex syntax")
        case _:
            assert_never(node)


def _render_bounds(low: int, high: int | None) -> str:
    match low, high:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case _:
            return f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"


def _render_char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"
