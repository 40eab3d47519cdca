"""Reads the closed part of JSON text that is still being written; knows no types."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_BLANKS = " \t\r\n"


class _Read(NamedTuple):
    value: Any
    end: int
    is_closed: bool


class _NothingYet(Exception):
    pass


def closed_part(text: str) -> Any:
    """Return the value of JSON text that may end anywhere; None while nothing is closed.

    Objects and arrays appear as soon as they are opened and hold what is closed in them; strings,
    numbers and words appear when they are complete. Raises ValueError where the text is no JSON.
    """
    try:
        return _value(text, _skip(text, 0)).value
    except _NothingYet:
        return None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at


def _value(text: str, at: int) -> _Read:
    if at >= len(text):
        raise _NothingYet
    if text[at] == "{":
        return _object(text, at + 1)
    if text[at] == "[":
        return _array(text, at + 1)
    return _scalar(text, at)


def _scalar(text: str, at: int) -> _Read:
    if text[at] == '"':
        end = at + 1
        while end < len(text) and text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        if end >= len(text):
            raise _NothingYet
        return _Read(json.loads(text[at : end + 1], strict=False), end + 1, True)
    end = at
    while end < len(text) and text[end] not in ",]}" + _BLANKS:
        end += 1
    if end == len(text):
        raise _NothingYet  # a number could go on
    return _Read(json.loads(text[at:end]), end, True)


def _object(text: str, at: int) -> _Read:
    found: dict[str, Any] = {}
    try:
        at = _skip(text, at)
        while text[at : at + 1] != "}":
            name, at, _ = _value(text, at)
            at = _expect(text, _skip(text, at), ":")
            item = _value(text, _skip(text, at))
            found[name] = item.value
            if not item.is_closed:
                return _Read(found, item.end, False)
            at = _next(text, _skip(text, item.end), "}")
        return _Read(found, at + 1, True)
    except _NothingYet:
        return _Read(found, len(text), False)


def _array(text: str, at: int) -> _Read:
    found: list[Any] = []
    try:
        at = _skip(text, at)
        while text[at : at + 1] != "]":
            item = _value(text, at)
            found.append(item.value)
            if not item.is_closed:
                return _Read(found, item.end, False)
            at = _next(text, _skip(text, item.end), "]")
        return _Read(found, at + 1, True)
    except _NothingYet:
        return _Read(found, len(text), False)


def _expect(text: str, at: int, mark: str) -> int:
    if at >= len(text):
        raise _NothingYet
    if text[at] != mark:
        raise ValueError(f"{mark!r} is due at position {at}, not {text[at]!r}")
    return at + 1


def _next(text: str, at: int, end: str) -> int:
    """Return where the next member starts, or where the container ends."""
    if text[at : at + 1] == end:
        return at
    return _skip(text, _expect(text, at, ","))
