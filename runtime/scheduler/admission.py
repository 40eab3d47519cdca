"""Decides which waiting request may start, and when it has to wait; gives nothing out itself.

A request may start alone if its row fits. Beside others it must fit with what those are taken to
need still: a share of their bounds, which grows with each retraction and decays with each step.
Siblings of one fork that meet in a join start together, for a while, when their rows fit at once.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from umbel.lang.errors import RequestRejectedError

from ..kv_cache import RadixNode
from ..request import Request, RequestStatus
from .frontiers import Frontiers, common_length
from .limits import SchedulerLimits
from .policy import WaitingQueue
from .room import Room
from .rows import max_match
from .stats import SchedulerStats


class Admitted(NamedTuple):
    """A request that may start, still in the queue, and what it shares: its path is locked."""

    request: Request
    node: RadixNode | None  # None without a cache
    slots: array[int]


class _WaitingGang(NamedTuple):
    """A gang that the queue came to."""

    name: str
    needed: int  # slots that its waiting members take, beside what their first one shares
    since: int  # the step it came to the head in


class Admission:
    """The way from the queue to the running requests, over one pool."""

    #: share of their remaining output that running requests are taken to need
    MIN_OUTPUT_RATIO, MAX_OUTPUT_RATIO = 0.1, 1.0
    #: steps that a gang may hold up the queue for, so that its members start together
    GANG_PATIENCE = 16

    def __init__(
        self,
        room: Room,
        queue: WaitingQueue,
        frontiers: Frontiers,
        running: dict[int, Request],
        limits: SchedulerLimits,
    ) -> None:
        self._room = room
        self._queue = queue
        self._frontiers = frontiers
        self._running = running
        self._max_running = limits.max_running
        self._watermark = int(limits.watermark * room.allocator.num_slots)
        self._output_ratio = self.MIN_OUTPUT_RATIO
        self._gang: _WaitingGang | None = None
        self._rejected: list[tuple[Request, RequestRejectedError]] = []

    def take_rejected(self) -> list[tuple[Request, RequestRejectedError]]:
        """Return requests that turned out never to fit, once each; they are FINISHED."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def step_done(self) -> None:
        """Note that a step went well: outputs are taken to be shorter."""
        self._output_ratio = max(self.MIN_OUTPUT_RATIO, self._output_ratio * 0.995)

    def retracted(self) -> None:
        """Note that a request had to be retracted: outputs are longer than they were thought."""
        self._output_ratio = min(self.MAX_OUTPUT_RATIO, self._output_ratio + 0.1)

    def next(self, reserved: int, stats: SchedulerStats) -> Admitted | None:
        """Return the first waiting request if it may start now.

        On the way requests are parked that wait for a running prefill, and rejected that do not
        fit though nothing runs. A prefetch ends where its row is there without it.
        """
        while (request := self._queue.head()) is not None:
            node: RadixNode | None = None
            slots = array("q")
            if self._room.cache_enabled:
                limit = max_match(request)
                num, node, slots = self._room.cache.match_prefix(
                    request.token_ids, request.namespace, limit
                )
                if request.is_prefetch and num == limit:
                    self._queue.remove(request)
                    request.status = RequestStatus.FINISHED
                    continue
                ahead = self._frontiers.ahead(request, node, num)
                if ahead is not None and num + self._room.page_size <= limit:
                    self._frontiers.park(request, self._queue.remove(request), ahead, limit)
                    stats.deferred += 1
                    continue
                self._room.cache.lock(node)  # what is matched is not there to be evicted
            needed = self._room.in_pages(len(request.token_ids)) - len(slots)
            if self._fits(request, needed, reserved) and not self._waits_for_gang(
                request, needed, reserved
            ):
                return Admitted(request, node, slots)
            if node is not None:
                self._room.cache.unlock(node)
            if self._running:
                return None
            self._reject(request)
        return None

    def may_start(self, request: Request) -> bool:
        """Whether a waiting request could run and would fit beside what does."""
        if len(self._running) >= self._max_running:
            return False
        needed = self._room.in_pages(len(request.token_ids)) - self._room.probe(request).num_tokens
        return self._fits(request, needed, self.reserved())

    def reserved(self) -> int:
        """Return the slots to be kept for what runs."""
        total, ratio, in_pages = self._watermark, self._output_ratio, self._room.in_pages
        # as `reserve` says, written out: every running request is asked at every admission
        if self._room.page_size == 1:
            for request in self._running.values():
                rows = len(request.token_ids)
                output = request.limit - 1 - rows
                total += rows - len(request.slots) + (int(output * ratio) if output > 0 else 0)
            return total
        for request in self._running.values():
            rows = len(request.token_ids)
            output = request.limit - 1 - rows
            rows += int(output * ratio) if output > 0 else 0
            total += in_pages(rows) - in_pages(len(request.slots))
        return total

    def reserve(self, request: Request) -> int:
        """Return how many more slots a running request is taken to need."""
        rows = self._room.in_pages(len(request.token_ids) + self._output(request))
        return rows - self._room.in_pages(len(request.slots))

    def _fits(self, request: Request, needed: int, reserved: int) -> bool:
        """Whether a request may start: alone if it can, beside others if they will not need it.

        So what is promised makes way only where one request needs it.
        """
        if self._running:
            needed += self._output(request) + reserved
        return needed <= self._room.available_to(len(self._running) + 1)

    def _waits_for_gang(self, request: Request, needed: int, reserved: int) -> bool:
        """Whether a request should wait until its waiting siblings fit with it.

        Only where a join waits for all of them as far as is known, only for a while, only for what
        runs to make room, and only if they fit without it; if not, they start one by one.
        """
        if not request.gang or not request.starts_together:
            return False
        if not self._running or not self._queue.policy.by_program:
            return False
        gang = self._gang
        if gang is None or gang.name != request.gang:
            siblings = self._queue.gang(request.gang)
            extra = sum(self._beside(request, sibling) for sibling in siblings)
            gang = self._gang = _WaitingGang(request.gang, extra, self._queue.now)
        if self._queue.now - gang.since >= self.GANG_PATIENCE:
            return False
        together = needed + self._output(request) + gang.needed
        if together + self._watermark > self._room.allocator.num_slots:
            return False
        runs = any(
            running.gang == request.gang and running.starts_together
            for running in self._running.values()
        )
        return not runs and together + reserved > self._room.available_to(2)

    def _beside(self, first: Request, sibling: Request) -> int:
        """Return the slots that a sibling takes beside what it shares with the first."""
        if sibling is first or not sibling.starts_together:
            return 0
        shared = common_length(first, sibling)
        shared -= shared % self._room.page_size
        rows = self._room.in_pages(len(sibling.token_ids)) - shared
        return rows + self._output(sibling)

    def _output(self, request: Request) -> int:
        output = max(0, request.limit - 1 - len(request.token_ids))
        return int(output * self._output_ratio)

    def _reject(self, request: Request) -> None:
        """End a request that does not fit with everything evicted and nothing else running."""
        needed = len(request.token_ids)
        error = RequestRejectedError(
            f"the request needs KV for {needed:,} tokens; with nothing else running "
            f"{self._room.num_available:,} slots of {self._room.allocator.num_slots:,} can be had, "
            "the rest is pinned: unpin prefixes or make the pool larger",
            reason="cannot_fit",
        )
        self._queue.remove(request)
        request.status = RequestStatus.FINISHED
        self._rejected.append((request, error))
