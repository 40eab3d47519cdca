"""Takes requests from waiting to running, back, and out, with all that each of them holds.

Knows no budget and no policy of its own: who starts and who makes way is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request, RequestStatus
from .accounting import check_requests
from .admission import Admitted
from .batch import ScheduledRequest
from .frontiers import Frontiers
from .policy import Key, WaitingQueue
from .room import Room
from .sharing import Sharing
from .stats import SchedulerStats


class Lifecycle:
    """The requests that wait, those that run, and those of the step in flight."""

    def __init__(
        self,
        room: Room,
        queue: WaitingQueue,
        frontiers: Frontiers,
        sharing: Sharing,
        stats: SchedulerStats,
    ) -> None:
        self.running: dict[int, Request] = {}
        self.keys: dict[int, Key] = {}  # of what runs; the greatest is retracted first
        self.in_flight: dict[int, ScheduledRequest] = {}  # what of the step has not left meanwhile
        self._room = room
        self._queue = queue
        self._frontiers = frontiers
        self._sharing = sharing
        self._stats = stats
        self._prefetches: list[Request] = []  # that run, or did since the last step

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the queue, or for a prefill that runs."""
        return len(self._queue) + self._frontiers.num_parked

    def enqueue(self, request: Request) -> None:
        """Let a request that holds nothing wait."""
        request.status = RequestStatus.WAITING
        self._queue.push(request)

    def start(self, admitted: Admitted) -> None:
        """Let a request of the queue run, on what was found of it in the cache."""
        request, node, cached = admitted
        (self.keys[request.request_id],) = self._queue.policy.keys((request,), self._queue)
        self._queue.remove(request)
        self.running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        if not request.has_private_rows:
            request.num_context = request.num_known
        request.cache_node = node
        request.slots = cached
        request.num_cached = request.num_computed = request.num_shared = len(cached)
        if request.is_prefetch:
            self._prefetches.append(request)
        else:
            self._stats.cached_tokens += len(cached)

    def requeue(self, request: Request, keep: Sequence[int]) -> None:
        """Let a running request wait again, leaving the rows `keep` in the cache."""
        self._release(request, keep)
        request.retracted()
        self.enqueue(request)

    def finish(self, request: Request, keep: Sequence[int]) -> None:
        """End a request that runs or waits, leaving the rows `keep` in the cache."""
        if request.status is RequestStatus.RUNNING:
            self._release(request, keep)
        elif request in self._queue:
            self._queue.remove(request)
        else:
            self._frontiers.unpark(request)
        request.status = RequestStatus.FINISHED

    def end_prefetches(self) -> None:
        """End the prefetches whose rows are there: they are the cache's."""
        if not self._prefetches:
            return
        for request in self._prefetches:
            if request.status is RequestStatus.RUNNING and not request.num_pending:
                self.finish(request, ())
        self._prefetches = [r for r in self._prefetches if r.status is RequestStatus.RUNNING]

    def check(self) -> None:
        """Assert that no request is lost, or in two places."""
        waiting = self._queue.requests()
        for ahead, request in self._frontiers.parked():
            assert ahead in self.running, "a request waits for one that left"
            waiting.append(request)
        check_requests(self.running, waiting)
        self._frontiers.check(self.running)

    def _release(self, request: Request, keep: Sequence[int]) -> None:
        self._room.release(request, keep)
        del self.running[request.request_id]
        del self.keys[request.request_id]
        self.in_flight.pop(request.request_id, None)
        self._sharing.leave(request)
