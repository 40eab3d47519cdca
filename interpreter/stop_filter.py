"""Cuts text that arrives in pieces at its first stop string; knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from umbel.lang.stop_strings import ordered, search_stops


class StopFilter:
    """Lets text through up to the first stop, and holds back only what may be a stop's beginning.

    The stop that begins first ends the text, as on every backend (`lang.stop_strings`); the result
    does not depend on the order of the stops or on how the text is cut up.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = ordered(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take more text and return what is certain; nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        search = search_stops(text, 0, self._stops)
        if search.found is not None and search.is_certain:
            start, self.matched = search.found
            self._held = ""
            return text[:start]
        self._held = text[search.held :]
        return text[: search.held]

    def finish(self) -> str:
        """Return what was held back, up to a stop in it: nothing more comes that could beat it."""
        rest, self._held = self._held, ""
        if self.matched is None and self._stops:
            found, _ = search_stops(rest, 0, self._stops)
            if found is not None:
                end, self.matched = found
                return rest[:end]
        return rest
