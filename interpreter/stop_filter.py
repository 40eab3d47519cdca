"""Finds stop strings in text that arrives in pieces; knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop, and holds back only what may be a stop's beginning.

    The stop that is complete first ends the text; of several that end at one place the longest
    counts. So the result does not depend on the order of the stops or on how the text is cut up.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take more text and return what is certain; nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = min(
            (
                (start + len(stop), start, stop)
                for stop in self._stops
                if (start := text.find(stop)) >= 0
            ),
            default=None,
        )
        if found is not None:
            _, start, self.matched = found
            self._held = ""
            return text[:start]
        keep = len(text) - self._longest_beginning(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """Return what was held back and turned out to be no stop."""
        rest, self._held = self._held, ""
        return rest

    def _longest_beginning(self, text: str) -> int:
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for size in range(longest, 0, -1):
            tail = text[len(text) - size :]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                return size
        return 0
