"""The results of a batch between their run's end and whoever takes them; starts nothing.

Not thread-safe: a batch guards it as it guards the rest of its state.
"""

from __future__ import annotations

from typing import Any

from umbel.lang.run_result import Result
from umbel.lang.runner import BatchOptions


class BatchResults:
    """What has ended and was not taken yet, and what ends the batch instead."""

    __slots__ = ("_broken", "_ended", "_failed", "_options", "num_ended")

    def __init__(self, options: BatchOptions) -> None:
        self._options = options
        self._ended: dict[int, Result[Any]] = {}
        self._failed: Result[Any] | None = None  # the first failure
        #: what broke the batch itself: a row could not be made, or its result not be saved
        self._broken: BaseException | None = None
        self.num_ended = 0  # those that were taken included

    def add(self, result: Result[Any]) -> None:
        """Keep a row's result."""
        self._ended[result.row] = result
        self.num_ended += 1
        if result.error is not None and self._failed is None:
            self._failed = result

    def break_off(self, error: BaseException | None) -> None:
        """Note what went wrong in the batch, if anything did; the first error counts."""
        self._broken = self._broken or error

    def check(self) -> None:
        """Raise what ends the batch: its own error, or with ``on_error="raise"`` a row's."""
        if self._broken is not None:
            raise self._broken
        if self._failed is not None and self._options.on_error == "raise":
            assert self._failed.error is not None, "only failures are kept here"
            self._failed.error.add_note(f"in row {self._failed.row} of the batch")
            raise self._failed.error

    def take(self, num_taken: int) -> Result[Any] | None:
        """Return the next result for who has taken so many, or None as long as it is not there."""
        row = num_taken if self._options.ordered else next(iter(self._ended), None)
        return None if row is None else self._ended.pop(row, None)
