"""Where stop strings end a text (rule 12), for every backend alike; knows no tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class StopSearch(NamedTuple):
    """What a growing text holds so far."""

    found: tuple[int, str] | None  # where the first complete stop begins, and the stop
    held: int  # where the first stop that may still complete begins; the text's end if none may

    @property
    def is_certain(self) -> bool:
        """Whether `found` ends the text whatever comes next."""
        return self.found is not None and self.held >= self.found[0]


def ordered(stops: Iterable[str]) -> list[str]:
    """Return the stops as `search_stops` wants them: at one position the shortest comes first."""
    return sorted(set(stops), key=lambda stop: (len(stop), stop))


def search_stops(text: str, start: int, stops: Sequence[str]) -> StopSearch:
    """Look for stops (in the order of `ordered`) in `text` from `start` on.

    The earliest position over all stops counts, in any list order: a stop that began earlier and
    may still complete is waited for, and only such a proper prefix is to be withheld.
    """
    found: tuple[int, str] | None = None
    held = len(text)
    for stop in stops:
        at = text.find(stop, start)
        if at >= 0 and (found is None or at < found[0]):
            found = (at, stop)
        for size in range(min(len(stop) - 1, len(text) - start), 0, -1):
            if text.endswith(stop[:size]):
                held = min(held, len(text) - size)
                break
    return StopSearch(found, held)
