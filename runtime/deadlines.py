"""Time limits by key, the earliest first; knows no clock and not what a limit is for."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Keeps one time per key. Forgets what is discarded: its memory follows what is in force."""

    def __init__(self) -> None:
        self._times: dict[K, tuple[float, int]] = {}  # the serial number tells entries of a key
        self._heap: list[tuple[float, int, K]] = []  # stale entries too
        self._serial = 0

    def __len__(self) -> int:
        return len(self._times)

    def add(self, key: K, at: float) -> None:
        """Set the time of a key, in place of an earlier one; inf and NaN are none."""
        self.discard(key)
        if not at < math.inf:
            return
        self._serial += 1
        self._times[key] = (at, self._serial)
        heapq.heappush(self._heap, (at, self._serial, key))

    def discard(self, key: K) -> None:
        """Forget a key; no error when it has no time."""
        if self._times.pop(key, None) is None:
            return
        if len(self._heap) > 2 * len(self._times) + 16:
            self._heap = [(at, n, key) for key, (at, n) in self._times.items()]
            heapq.heapify(self._heap)

    def earliest(self) -> float | None:
        """Return the earliest time in force."""
        while self._heap:
            at, serial, key = self._heap[0]
            if self._times.get(key) == (at, serial):
                return at
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[K]:
        """Forget and return the keys whose time has come, the earliest first."""
        due = []
        while (at := self.earliest()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._times[key]
            due.append(key)
        return due
