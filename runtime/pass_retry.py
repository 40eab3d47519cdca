"""What becomes of a forward pass that raised: taken back, made smaller, or searched for its cause.

Out of memory: the step's budget is halved, and grows again with the passes that succeed. Any other
error: the pass's requests run again in halves, apart from all others, until the one that raises
runs alone and fails alone. So a request that nothing can be done for costs its own node, and the
others go on as if nothing had been. Knows requests and budgets; never touches a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from umbel.lang.errors import EngineError, UmbelError

from .device_errors import error_of, free_cached_memory, is_out_of_memory
from .request import Request, RequestStatus
from .scheduler import Batch, Scheduler

logger = logging.getLogger(__name__)

#: passes that must succeed before the budget doubles again
RECOVERY_PASSES = 32
#: failed passes without one that succeeds, after which a request fails with the next one: more than
#: the halvings of any budget and of any batch take together
MAX_STRIKES = 40


class _Suspect(NamedTuple):
    """A request of a failed pass, and the row that it had come to there."""

    request: Request
    end: int

    @property
    def is_cleared(self) -> bool:
        """Whether it has got as far without an error, or has ended."""
        has_ended = self.request.status is RequestStatus.FINISHED
        return has_ended or self.request.num_computed >= self.end


class PassRetry:
    """Chooses each pass, and sees to those that fail. Lives on the engine's thread.

    `fail` ends the node of one request.
    """

    def __init__(
        self, scheduler: Scheduler, fail: Callable[[Request, UmbelError], None], budget: int
    ) -> None:
        self.num_memory_shortages = 0
        self.num_retried = 0  # requests that ran again after a failed pass, once for each
        self._scheduler = scheduler
        self._fail = fail
        self._budget = budget
        self._limit: int | None = None  # rows of a pass, while memory is short
        self._num_good = 0  # passes since the limit was set
        self._strikes: dict[Request, int] = {}  # failed passes since the last that succeeded
        self._groups: list[list[_Suspect]] = []  # to be run apart, the last one first
        self._num_searched = 0  # rows of the pass whose cause is searched
        self._is_found = False

    @property
    def limit(self) -> int | None:
        """Rows that a pass may have for now; None: the whole budget."""
        return self._limit

    def schedule(self) -> Batch | None:
        """Return the next pass: that of the scheduler, or one of suspects alone."""
        while self._groups:
            suspects = [s.request for s in self._groups[-1] if not s.is_cleared]
            if suspects:
                batch = self._scheduler.schedule(suspects)
                if batch is not None:
                    return batch
            self._groups.pop()
            if self._groups:
                self._scheduler.requeue_running()
            elif not self._is_found:  # each half went well: it was the whole that did not
                self._set_limit(max(1, self._num_searched // 2))
        return self._scheduler.schedule()

    def passed(self, batch: Batch) -> None:
        """Note that a pass went well."""
        self._scheduler.complete(batch)
        if self._strikes:
            for scheduled in batch.requests:
                self._strikes.pop(scheduled.request, None)
            for request in [r for r in self._strikes if r.status is RequestStatus.FINISHED]:
                del self._strikes[request]
        if self._limit is not None:
            self._num_good += 1
            if self._num_good >= RECOVERY_PASSES:
                self._set_limit(2 * self._limit)

    def failed(self, batch: Batch, cause: BaseException) -> None:
        """Take a pass back that raised `cause`, and see to it that its requests run again.

        Raises nothing of its own: a request that has no way to go on fails.
        """
        self._scheduler.fail(batch)  # first: nothing of the pass may outlive it
        left = [s for s in batch.requests if s.request.status is not RequestStatus.FINISHED]
        suspects = [_Suspect(scheduled.request, scheduled.end) for scheduled in left]
        exhausted = []
        for request, _ in suspects:
            strikes = self._strikes.get(request, 0) + 1
            self._strikes[request] = strikes
            if strikes > MAX_STRIKES:
                exhausted.append(request)
        self.num_retried += len(suspects) - len(exhausted)
        if is_out_of_memory(cause):
            self._make_smaller(batch.num_tokens, suspects, cause)
        else:
            self._search(batch.num_tokens, suspects, cause)
        for request in exhausted:
            self._end(request, _error_of(batch.num_tokens, cause))

    def _make_smaller(
        self, num_tokens: int, suspects: list[_Suspect], cause: BaseException
    ) -> None:
        self.num_memory_shortages += 1
        cause.__traceback__ = None  # its frames hold the pass's tensors
        free_cached_memory()
        if num_tokens <= 1:
            error = EngineError(
                f"the device ran out of memory in a pass of one token ({cause}): lower kv_tokens "
                "or kv_memory_fraction, or max_seq_len"
            )
            for request, _ in suspects:
                self._end(request, error)
            return
        limit = num_tokens // 2
        logger.warning(
            "a pass of %d tokens ran out of memory (%s); passes have %d at most for now",
            num_tokens,
            cause,
            limit,
        )
        self._set_limit(limit)

    def _search(self, num_tokens: int, suspects: list[_Suspect], cause: BaseException) -> None:
        if not self._groups:
            logger.error("a forward pass of %d tokens failed", num_tokens, exc_info=cause)
            self._num_searched, self._is_found = num_tokens, False
        else:
            group = self._groups.pop()
            tried = {suspect.request.request_id for suspect in suspects}
            rest = [s for s in group if s.request.request_id not in tried]
            if rest:
                self._groups.append(rest)
        if len(suspects) == 1:
            self._is_found = True
            self._end(suspects[0].request, _error_of(num_tokens, cause))
        else:
            middle = len(suspects) // 2
            self._groups += [half for half in (suspects[middle:], suspects[:middle]) if half]
        self._scheduler.requeue_running()  # a group has the pool, and its passes, to itself

    def _end(self, request: Request, error: UmbelError) -> None:
        self._strikes.pop(request, None)
        if request.status is not RequestStatus.FINISHED:  # a sibling's end may have taken it along
            self._fail(request, error)

    def _set_limit(self, limit: int) -> None:
        self._limit = None if limit >= self._budget else limit
        self._num_good = 0
        self._scheduler.limit_step(self._limit)


def _error_of(num_tokens: int, cause: BaseException) -> UmbelError:
    return error_of(f"a forward pass of {num_tokens} tokens", cause)
