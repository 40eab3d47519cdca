"""Finds stops in text that arrives in pieces; knows no tokens.

Two kinds, and what each means, so that no split of the text into deltas changes the result:

- A stop string ends the text where it first appears, over all strings and in any list order. A
  longer string that began earlier and may still complete is waited for: only a proper prefix of a
  stop at the end of the text is ever withheld, and it is released when it does not complete.
- A stop pattern ends the text at the first character after which the text so far holds a match,
  and keeps what comes before the leftmost one. Look-ahead and `$` see the text so far. What is
  withheld is the leftmost place from which a match could still be reached (the `regex` module's
  partial matching), so for an unbounded pattern such as `a.*b` that is everything from the first
  "a" on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import regex

from umbel.lang.errors import ConstraintError, ProgramError
from umbel.lang.stop_strings import ordered, search_stops

# A pattern is searched on the engine's thread: one that explodes must fail its own node only.
_MAX_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a text ends and why."""

    length: int  # characters of the whole text that are kept
    stop: str  # the stop string, or the pattern, as it was given


class StopMatcher:
    """Takes text in deltas and releases what no stop can take back.

    Raises ProgramError for an empty stop string, ConstraintError for a pattern that can't be
    compiled or that matches the empty text. `push` raises ConstraintError for a pattern that
    takes too long.
    """

    def __init__(self, stops: Sequence[str] = (), regexes: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ProgramError("a stop is the empty string, which would end every text at once")
        self._stops = ordered(stops)
        self._firsts = frozenset(stop[0] for stop in stops)
        self._patterns = [_compile(pattern) for pattern in regexes]
        self._text = ""  # only its end, from `_base` on, unless a pattern may look behind
        self._base = 0
        self._released = 0
        self._found: StopMatch | None = None  # the best match so far, until nothing can beat it
        self._match: StopMatch | None = None

    @property
    def match(self) -> StopMatch | None:
        """The stop that ended the text; None while none has."""
        return self._match

    @property
    def num_released(self) -> int:
        """Characters of the whole text that were released so far."""
        return self._released

    def push(self, delta: str) -> str:
        """Add text; return what is released by it. After a match everything is dropped."""
        if not self._patterns:
            is_waiting = self._text or self._match is not None
            if not is_waiting and self._firsts.isdisjoint(delta):  # no stop can begin in it
                self._base = self._released = self._released + len(delta)
                return delta
            return self._step(delta) if delta else ""
        # A pattern is decided after each character: its meaning must not depend on the split.
        return "".join([self._step(char) for char in delta])

    def flush(self) -> str:
        """Return what was withheld, for nothing more will come; a match may become certain."""
        if self._match is not None:
            return ""
        self._match = self._found
        end = self._base + len(self._text) if self._match is None else self._match.length
        return self._release(end)

    def _step(self, delta: str) -> str:
        if self._match is not None:
            return ""
        self._text += delta
        end = self._base + len(self._text)
        held = self._find_stops()
        held_by_pattern = self._find_patterns(end)
        # What a string may still become is waited for, what a pattern may become is not: a match
        # that is there ends the text.
        if self._found is not None and held >= self._found.length:
            self._match = self._found
            return self._release(self._match.length)
        return self._release(min(held, held_by_pattern))

    def _offer(self, length: int, stop: str) -> None:
        if self._found is None or length < self._found.length:
            self._found = StopMatch(length, stop)

    def _find_stops(self) -> int:
        """Note the first complete stop; return where the first that may complete begins."""
        found, held = search_stops(self._text, self._released - self._base, self._stops)
        if found is not None:
            self._offer(self._base + found[0], found[1])
        return self._base + held

    def _find_patterns(self, end: int) -> int:
        held = end
        for pattern in self._patterns:
            try:
                found = pattern.search(
                    self._text, self._released - self._base, partial=True, timeout=_MAX_SECONDS
                )
            except TimeoutError as error:
                raise ConstraintError(
                    f"stop_regex {pattern.pattern!r} took over {_MAX_SECONDS:g} s on "
                    f"{len(self._text):,} characters: write it without nested repetition"
                ) from error
            if found is None:
                continue
            if found.partial:
                held = min(held, self._base + found.start())
            else:
                self._offer(self._base + found.start(), pattern.pattern)
        return held

    def _release(self, end: int) -> str:
        released = self._text[self._released - self._base : end - self._base]
        self._released = end
        if not self._patterns:  # a look-behind may need all of the text, a string only its own
            self._text = self._text[end - self._base :]
            self._base = end
        return released


def _compile(source: str) -> regex.Pattern[str]:
    try:
        pattern = regex.compile(source)
    except regex.error as error:
        raise ConstraintError(f"stop_regex {source!r} is no regular expression: {error}") from error
    if pattern.search("") is not None:
        raise ConstraintError(
            f"stop_regex {source!r} matches the empty text, so it would end every text at once"
        )
    return pattern
