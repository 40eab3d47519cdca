"""Work on a pass's rows of logits, tried again in smaller pieces where it raises.

A row of logits is as wide as the vocabulary, so what is made of many of them may run out of memory
after a pass that did not. Only a row that can't be worked on alone fails. Knows rows by their
numbers; nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from umbel.lang.errors import EngineError, UmbelError

from .device_errors import ends_engine, error_of, free_cached_memory, is_out_of_memory
from .watchdog import StepWatch

logger = logging.getLogger(__name__)


class RowPieces:
    """Runs one engine's work on rows of logits. Lives on its thread."""

    def __init__(self, watch: StepWatch) -> None:
        self.num_memory_shortages = 0
        self._watch = watch

    def run(
        self,
        what: str,
        num_rows: int,
        most: int,
        work: Callable[[int, int], None],
        fail: Callable[[int, UmbelError], None],
    ) -> None:
        """Call `work(start, end)` for rows [0, num_rows) in order, up to `most` of them at a time.

        Where that raises, the pieces are half as large from there on, down to a row; one that
        raises by itself goes to `fail`. So `work` must leave nothing behind when it raises. Raises
        what is no row's own failure, and what `fail` raises.
        """
        start = 0
        while start < num_rows:
            end = min(num_rows, start + most)
            try:
                with self._watch.phase(what):
                    work(start, end)
            except BaseException as cause:  # panics of native libraries are no Exception
                if ends_engine(cause):
                    raise
                is_short, error = is_out_of_memory(cause), self._error(what, end - start, cause)
            else:
                start = end
                continue
            if is_short:  # out here, where nothing holds the piece's tensors any more
                self.num_memory_shortages += 1
                free_cached_memory()
            if end - start > 1:
                most = (end - start) // 2
            else:
                fail(start, error)
                start = end

    def _error(self, what: str, num_rows: int, cause: BaseException) -> UmbelError:
        """Log that a piece failed, and return what its row fails with if it was a single one."""
        if is_out_of_memory(cause):
            logger.warning("%s: %d rows of logits ran out of memory (%s)", what, num_rows, cause)
            return EngineError(
                f"{what} failed: the device ran out of memory over a single row of logits "
                f"({cause}): lower kv_tokens or kv_memory_fraction"
            )
        if not isinstance(cause, UmbelError):
            logger.error("%s: %d rows of logits failed", what, num_rows, exc_info=cause)
        return error_of(what, cause)
