"""Which live prefix is given up first, when only live ones are left; knows no tree and no graph.

Both orders are heaps with an entry for each change of a hold, of which only the last one counts:
O(log n) a change, amortised. They are filled when they are asked: most holds are let go before
that.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .radix_node import Mark

#: rank, version, the hold: the least goes first
_Entry = tuple[float, int, "Hold"]


@dataclass(slots=True, eq=False)
class Hold:
    """A program's claim on one place of its graph, which it will go on from."""

    program_id: int
    place: int
    marks: list[Mark] = field(default_factory=list)  # one a row: they differ, or have grown
    since: int = 0  # the step of its last change
    expected: int | None = None  # the step it is taken to be read in; None: its program knows
    gap: int | None = None  # steps that its program was away for, the last time
    version: int = 0  # of its last change; 0 once it is given up

    @property
    def is_held(self) -> bool:
        """Whether it has not been let go."""
        return self.version > 0


class ReclaimOrder(ABC):
    """Says which hold is given up first. `now` is the step that it is."""

    def __init__(self) -> None:
        self.now = 0
        self._versions = 0
        self._holds: dict[int, Hold] = {}  # by version
        self._changed: dict[int, Hold] = {}  # of these, those with no entry for their version yet

    def update(self, hold: Hold) -> None:
        """Queue a hold, or queue it anew after a change."""
        self.discard(hold)
        self._versions += 1
        hold.version = self._versions
        self._holds[hold.version] = self._changed[hold.version] = hold

    def discard(self, hold: Hold) -> None:
        """Take a hold out. Idempotent."""
        self._holds.pop(hold.version, None)
        self._changed.pop(hold.version, None)
        hold.version = 0

    def first(self) -> Hold | None:
        """Return the hold to be given up first; None if there is none."""
        for hold in self._changed.values():
            self._push(hold)
        self._changed.clear()
        return self._first()

    @abstractmethod
    def came_back(self, away: int) -> None:
        """Note that a place is read again that nobody was known to read for so many steps."""

    def check(self, holds: Iterable[Hold]) -> None:
        """Assert that these holds are queued, and no others."""
        assert set(map(id, holds)) == set(map(id, self._holds.values())), "holds are lost"
        assert all(hold.version == version for version, hold in self._holds.items())

    @abstractmethod
    def _push(self, hold: Hold) -> None:
        """Queue a hold in its place."""

    @abstractmethod
    def _first(self) -> Hold | None:
        """Return the first of what is queued."""

    def _top(self, heap: list[_Entry]) -> Hold | None:
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _add(self, heap: list[_Entry], rank: float, tie: int, hold: Hold) -> None:
        if len(heap) > 2 * len(self._holds) + 64:  # mostly stale
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)
        heapq.heappush(heap, (rank, tie, hold))

    def _is_current(self, entry: _Entry) -> bool:
        return abs(entry[1]) == entry[2].version


class LeastRecentlyUsed(ReclaimOrder):
    """What was used longest ago goes first."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[_Entry] = []

    def came_back(self, away: int) -> None:
        """Take no notice: nothing is used by that."""

    def _push(self, hold: Hold) -> None:
        self._add(self._heap, hold.since, hold.version, hold)

    def _first(self) -> Hold | None:
        return self._top(self._heap)


class NextUse(ReclaimOrder):
    """What will be read last goes first (Belady's choice, on what is known).

    A graph says how many steps are between a place and its next reader. Where it ends, its program
    is with its tools or its Python: the place is taken to be read after as many steps as the
    program took the last time (before it has, as programs do on average), and once that time is
    over, after as many again as it has been away. So those that cycle over more than the pool
    holds keep what fits, where the least recently used would always be the next one needed.
    """

    #: how much the latest time away counts in the mean of all programs
    WEIGHT = 0.1

    def __init__(self) -> None:
        super().__init__()
        self._mean_gap: float | None = None
        self._by_use: list[_Entry] = []  # whatever is read last first
        self._by_age: list[_Entry] = []  # of unknown next use; whoever is away longest first

    def came_back(self, away: int) -> None:
        """Note that a place is read again that nobody was known to read for so many steps."""
        mean = away if self._mean_gap is None else self._mean_gap
        self._mean_gap = mean + self.WEIGHT * (away - mean)

    def _push(self, hold: Hold) -> None:
        self._add(self._by_use, -self._estimate(hold), -hold.version, hold)
        if hold.expected is None:
            self._add(self._by_age, hold.since, hold.version, hold)

    def _first(self) -> Hold | None:
        tops = [self._top(self._by_use), self._top(self._by_age)]
        return max((hold for hold in tops if hold is not None), key=self._use, default=None)

    def _estimate(self, hold: Hold) -> float:
        if hold.expected is not None:
            return hold.expected
        gap = self._mean_gap if hold.gap is None else hold.gap
        return hold.since + (0.0 if gap is None else gap)

    def _use(self, hold: Hold) -> float:
        estimate = self._estimate(hold)
        is_guess = hold.expected is None and self._mean_gap is not None
        is_overdue = is_guess and estimate < self.now
        return 2.0 * self.now - hold.since if is_overdue else estimate


EVICTION_POLICIES: dict[str, Callable[[], ReclaimOrder]] = {
    "lru": LeastRecentlyUsed,
    "next-use": NextUse,
}
