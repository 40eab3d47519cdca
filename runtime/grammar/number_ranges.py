"""Integers in a range as regular expressions, exact for any size; knows no schema."""

from __future__ import annotations

from umbel.lang import regex_syntax as rx
from umbel.lang.regex_syntax import Node

_DIGIT = rx.Chars(((0x30, 0x39),))


def integer_range(low: int | None, high: int | None) -> Node:
    """Return the decimal integers from `low` to `high`, both included (None: no bound).

    Written as JSON writes them: no leading zeros; -0 is zero.
    """
    if low is not None and high is not None and low > high:
        return rx.NEVER
    options: list[Node] = []
    if low is None or low <= 0:  # -high .. -low, and -0
        smallest = 0 if high is None or high >= 0 else -high
        options.append(rx.concat((rx.literal("-"), _unsigned(smallest, _negate(low)))))
    if high is None or high >= 0:
        options.append(_unsigned(max(0, low or 0), high))
    return rx.alternate(options)


def _negate(value: int | None) -> int | None:
    return None if value is None else -value


def _unsigned(low: int, high: int | None) -> Node:
    """Return the integers low..high, where 0 <= low; NEVER if there is none."""
    if high is None:
        width = len(str(low))
        longer = rx.concat((_digits(1, 9), rx.repeat(_DIGIT, width, None)))
        return rx.alternate((_unsigned(low, 10**width - 1), longer))
    if low > high:
        return rx.NEVER
    options = []
    for width in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (width - 1) if width > 1 else 0)
        last = min(high, 10**width - 1)
        options.append(_same_width(str(first), str(last)))
    return rx.alternate(options)


def _same_width(low: str, high: str) -> Node:
    """Return the digit strings from low to high, of one width."""
    if not low:
        return rx.EMPTY
    first, last = int(low[0]), int(high[0])
    rest = len(low) - 1
    if first == last:
        return rx.concat((_digits(first, first), _same_width(low[1:], high[1:])))
    options: list[Node] = []
    if low[1:] != "0" * rest:
        options.append(rx.concat((_digits(first, first), _same_width(low[1:], "9" * rest))))
        first += 1
    ending: list[Node] = []
    if high[1:] != "9" * rest:
        ending.append(rx.concat((_digits(last, last), _same_width("0" * rest, high[1:]))))
        last -= 1
    if first <= last:
        options.append(rx.concat((_digits(first, last), rx.repeat(_DIGIT, rest, rest))))
    return rx.alternate(options + ending)


def _digits(low: int, high: int) -> Node:
    return rx.Chars(((0x30 + low, 0x30 + high),))
