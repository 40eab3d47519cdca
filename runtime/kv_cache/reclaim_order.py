"""Which program lets go of its live prefixes first; knows what a program does, not what it holds.

Both orders are heaps with an entry for each change of a program, of which only the last one counts:
O(log n) a change, amortised.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Owner:
    """A program as the order sees it."""

    program_id: int
    since: int  # the step of its last change
    touched: int = 0  # the step in which it last ran, or came to hold something
    num_waiting: int = 0  # requests
    num_running: int = 0
    key: tuple[Any, ...] = ()  # the least of its waiting requests', in the queue's order
    is_idle: bool = True  # neither waits nor runs, since `since`
    gap: float | None = None  # steps that it was idle for, the last time
    version: int = 0

    @property
    def holds_anything(self) -> bool:
        """Whether there is anything to let go of."""
        raise NotImplementedError


class ReclaimOrder(ABC):
    """Says who is to let go of what it holds. `now` is the step that it is."""

    def __init__(self) -> None:
        self.now = 0
        self._versions = 0
        self._owners: dict[
            int, Owner
        ] = {}  # those that were holding something at their last change

    def update(self, owner: Owner, *, touches: bool = True) -> None:
        """Note that a program has changed: what it holds, or what it does."""
        is_idle = not owner.num_waiting and not owner.num_running
        self._change(owner, is_idle)
        owner.is_idle, owner.since = is_idle, self.now
        if touches:
            owner.touched = self.now
        self._versions += 1
        owner.version = self._versions
        if owner.holds_anything:
            self._owners[owner.program_id] = owner
            self._push(owner)
        else:
            self.discard(owner)

    def discard(self, owner: Owner) -> None:
        """Note that a program holds nothing any more. Idempotent."""
        self._owners.pop(owner.program_id, None)

    @abstractmethod
    def first(self) -> int | None:
        """Return the program to let go first, which holds something; None if none does."""

    def check(self, owners: Iterable[Owner]) -> None:
        """Assert that whoever holds something is queued."""
        holding = {owner.program_id: owner for owner in owners}
        assert self._owners == holding, "the order knows others than those that hold something"

    def _change(self, owner: Owner, is_idle: bool) -> None:
        """Note what a program does from now on."""

    @abstractmethod
    def _push(self, owner: Owner) -> None:
        """Queue a program in its place."""

    def _top(self, heap: list[Any]) -> Owner | None:
        """Return the program of a heap's first entry, (rank, version, program), that counts."""
        while heap:
            _, version, program_id = heap[0]
            owner = self._owners.get(program_id)
            if owner is not None and owner.version == version and owner.holds_anything:
                return owner
            heapq.heappop(heap)
        return None

    def _add(self, heap: list[Any], rank: Any, owner: Owner) -> None:
        if len(heap) > 2 * len(self._owners) + 64:  # mostly stale
            heap[:] = [e for e in heap if self._is_current(e)]
            heapq.heapify(heap)
        heapq.heappush(heap, (rank, owner.version, owner.program_id))

    def _is_current(self, entry: tuple[Any, int, int]) -> bool:
        owner = self._owners.get(entry[2])
        return owner is not None and owner.version == entry[1]


class LeastRecentlyUsed(ReclaimOrder):
    """Whoever has done nothing for the longest time lets go first."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[Any] = []

    def first(self) -> int | None:
        """Return the program to let go first, which holds something; None if none does."""
        owner = self._top(self._heap)
        return None if owner is None else owner.program_id

    def _push(self, owner: Owner) -> None:
        self._add(self._heap, owner.touched, owner)


class NextUse(ReclaimOrder):
    """Whoever will read what it holds last lets go first (Belady's choice, on what is known).

    A program that runs reads now, one that waits in the order of the queue. One that does neither
    is with its tools or its Python: it is taken to come back after as many steps as it did the last
    time (before it has, as programs do on average), and once that time is over, after as many
    again. So those that cycle over more than the cache holds keep what fits, where the least
    recently used would always be the next one needed.
    """

    #: how much the latest time away counts in the mean of all programs
    WEIGHT = 0.1

    def __init__(self) -> None:
        super().__init__()
        self._mean_gap: float | None = None
        self._busy: list[Any] = []  # that wait or run; the last of the queue's order first
        self._by_return: list[Any] = []  # idle ones; whoever is expected last first
        self._by_age: list[Any] = []  # idle ones; whoever is away longest first

    def first(self) -> int | None:
        """Return the program to let go first, which holds something; None if none does."""
        away = [self._top(self._by_return), self._top(self._by_age)]
        latest = max((o for o in away if o is not None), key=self._return, default=None)
        if latest is None:
            latest = self._top(self._busy)
        return None if latest is None else latest.program_id

    def _change(self, owner: Owner, is_idle: bool) -> None:
        away = self.now - owner.since
        if owner.is_idle and not is_idle and away > 0:
            mean = away if self._mean_gap is None else self._mean_gap
            self._mean_gap = mean + self.WEIGHT * (away - mean)
            owner.gap = away

    def _push(self, owner: Owner) -> None:
        if owner.is_idle:
            self._add(self._by_return, -self._expected(owner), owner)
            self._add(self._by_age, owner.since, owner)
        else:
            key = () if owner.num_running else owner.key
            self._add(self._busy, _Last((not owner.num_running, key)), owner)

    def _expected(self, owner: Owner) -> float:
        gap = self._mean_gap if owner.gap is None else owner.gap
        return owner.since + (0.0 if gap is None else gap)

    def _return(self, owner: Owner) -> float:
        expected = self._expected(owner)
        return expected if expected >= self.now else 2.0 * self.now - owner.since


@dataclass(slots=True)
class _Last:
    """Puts what is greatest on top of a heap."""

    value: tuple[Any, ...]

    def __lt__(self, other: _Last) -> bool:
        return other.value < self.value
