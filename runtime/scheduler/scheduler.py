"""Decides what runs next: budgets, chunks, retracts; never touches a tensor.

A step is `schedule`, the forward pass, then `complete` (or `fail`). One budget of rows bounds the
step: requests that decode come first, then the prefills that have begun, then new ones in the
order of the policy. Context rows enter the radix cache when they are scheduled, so requests of
one step share them; sampled rows enter it when their request ends or is retracted.

Who may start is `Admission`'s to say, who makes way `Pressure`'s; `Lifecycle` takes requests in and
out, `Sharing` shares prefixes, and `Room` gives out pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from umbel.lang.errors import EngineError, RequestRejectedError

from ..kv_cache import Holds, PageAllocator, RadixCache, RadixNode
from ..request import Request, RequestStatus
from .accounting import check_slots
from .admission import Admission
from .batch import Batch, ScheduledRequest
from .frontiers import Frontiers
from .lifecycle import Lifecycle
from .limits import SchedulerLimits
from .policy import WaitingQueue, get_policy
from .pressure import Pressure, Work
from .room import Room
from .rows import computed_rows, max_rows
from .sharing import Sharing
from .stats import SchedulerStats


class Scheduler:
    """Continuous batching over one pool of KV pages and one radix cache.

    The caller appends sampled tokens to `request.token_ids` after `complete`, and calls `finish`
    for what has ended; a prefetch ends by itself when its row is there. A running request without
    a pending row is left alone. One step is in flight at a time; `abort`, `finish` and `retract`
    are allowed while it is.

    Raises EngineConfigError if the policy or the eviction is unknown.

    Args:
        cache: holds shared prefixes; nobody else inserts into it or evicts from it.
        allocator: the pool's pages, all of them free.
        limits: what bounds a step, and what runs.
        policy: a name in `POLICIES`.
        eviction: a name in `EVICTION_POLICIES`.
        cache_enabled: False shares nothing and leaves nothing in the cache.

    """

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        limits: SchedulerLimits,
        *,
        policy: str = "program",
        eviction: str = "next-use",
        cache_enabled: bool = True,
    ) -> None:
        self.cache = cache
        self.allocator = allocator
        self.cache_enabled = cache_enabled
        self.holds = Holds(cache, eviction)
        self.stats = SchedulerStats()
        self._max_step_tokens = self._budget = limits.max_step_tokens
        self._max_running = limits.max_running
        self._max_chunk = limits.max_chunk
        self._room = Room(cache, allocator, self.holds, cache_enabled=cache_enabled)
        self._queue = WaitingQueue(get_policy(policy), self._room.probe, limits.max_wait_steps)
        self._frontiers = Frontiers(allocator.page_size)
        self._sharing = Sharing(self._room, self._queue, self._frontiers, self.stats)
        self._lives = Lifecycle(self._room, self._queue, self._frontiers, self._sharing, self.stats)
        self._running = self._lives.running
        self._admission = Admission(self._room, self._queue, self._frontiers, self._running, limits)
        self._pressure = Pressure(
            self._room,
            self._queue,
            self._admission,
            self._running,
            self._lives.keys,
            limits.max_step_tokens,
        )
        self._batch: Batch | None = None  # in flight

    # ---- what the engine asks

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self._room.num_free

    @property
    def num_available(self) -> int:
        """Slots to be had without retracting a request: free, or locked by none."""
        return self._room.num_available

    @property
    def num_running(self) -> int:
        """Requests that hold slots."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none yet, or none any more."""
        return self._lives.num_waiting

    def take_rejected(self) -> list[tuple[Request, RequestRejectedError]]:
        """Return requests that `schedule` found can never run, once each; they are FINISHED."""
        return self._admission.take_rejected()

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestRejectedError if its row can outgrow the whole pool."""
        assert request.token_ids, "a request needs a token to compute"
        assert request.num_context >= 1, "a select needs a context row to score its roots from"
        needed = max_rows(request)
        if self._room.in_pages(needed) > self.allocator.num_slots:
            raise RequestRejectedError(
                f"the request may need KV for {needed:,} tokens; the pool holds "
                f"{self.allocator.num_slots:,}: shorten the prompt, lower max_tokens or make the "
                "pool larger",
                reason="cannot_fit",
            )
        self._lives.enqueue(request)

    def limit_step(self, max_tokens: int | None) -> None:
        """Let steps compute fewer rows than `max_step_tokens` until further notice; None: no."""
        limit = self._max_step_tokens if max_tokens is None else max_tokens
        self._budget = min(limit, self._max_step_tokens)

    def schedule(self, only: Sequence[Request] | None = None) -> Batch | None:
        """Choose the rows of the next step and give them slots; None when nothing can run.

        With `only` no waiting request but these is started, in their order. Requests that turn out
        never to fit are finished and left for `take_rejected`.
        """
        assert self._batch is None, "the last step is not over: call complete or fail"
        self._queue.only = only
        self._queue.now += 1
        self.holds.begin_step(self._queue.now)
        self._queue.refresh()
        while (victim := self._pressure.preempted()) is not None:
            self.retract(victim)
        decodes, prefills = self._make_room()
        rows: list[ScheduledRequest] = []
        budget = self._budget
        if decodes:
            if len(decodes) > budget:
                decodes = self._take_turns(decodes, budget)
            self._room.grow_by_one(decodes)
            rows = [ScheduledRequest(r, r.num_computed, r.num_computed + 1) for r in decodes]
            budget -= len(decodes)
        num_decodes = len(rows)
        for request in prefills:
            if budget <= 0:
                break
            if not self._sharing.extend_match(request):
                continue
            room = self._room.num_left(request) + self._room.available_to(len(self._running))
            num = min(request.num_pending, budget, self._max_chunk, room)
            if num > 0:
                rows.append(self._sharing.schedule_rows(request, num))
                budget -= num
        self._lives.end_prefetches()  # others may have begun to compute all that was left of one
        if budget > 0 and self._queue and len(self._running) < self._max_running:
            self._admit(budget, rows)
        if not rows:
            return None
        self._lives.in_flight = {s.request.request_id: s for s in rows}
        self._batch = Batch(tuple(rows), num_decodes)
        return self._batch

    def complete(self, batch: Batch) -> None:
        """Note that the step has run: its rows are computed; requests that left are skipped."""
        assert batch is self._batch, "this step is not in flight"
        num_decoded = 0
        for scheduled in self._lives.in_flight.values():
            request, end = scheduled.request, scheduled.end
            request.num_computed = end
            if scheduled.start >= request.num_prompt:
                num_decoded += end - scheduled.start
            else:
                request.num_prefilled += self.stats.count_prefill(scheduled)
        self.stats.tokens_decoded += num_decoded
        self._batch, self._lives.in_flight = None, {}
        self.cache.mark_computed()
        self._lives.end_prefetches()
        self.stats.steps += 1
        self._admission.step_done()

    def fail(self, batch: Batch) -> None:
        """Take the step back: nothing that it registered or allocated survives.

        Its requests run on from where they were; those whose prefix went with the step are
        queued again. All count as retracted: the slots that their rows get next are others.
        """
        assert batch is self._batch, "this step is not in flight"
        lost: list[Request] = []
        for scheduled in self._lives.in_flight.values():
            request = scheduled.request
            node = request.cache_node
            if node is not None and not all(n.computed for n in node.path()):
                lost.append(request)
            else:
                request.retracted()
                self._room.shrink(request, request.num_computed)
        self._batch, self._lives.in_flight = None, {}
        for request in lost:
            self._lives.requeue(request, ())
        self.allocator.free(self.cache.drop_uncomputed())
        self.stats.failed_steps += 1

    def finish(self, request: Request, keep: Sequence[int] | None = None) -> None:
        """End a request and release all it holds: the one way out.

        `keep` names computed rows to leave in the cache: for a gen a run that starts at or before
        the first row of its own, for a select the winner's path through the tree. Rows that the
        cache has already are skipped, and a select's own context rows come along. None keeps
        every computed row of a gen, and the context of a select.
        """
        self._lives.finish(request, computed_rows(request) if keep is None else keep)

    def abort(self, request: Request) -> None:
        """End a request in any state, leaving nothing of its own; no error when it has ended."""
        if request.status is not RequestStatus.FINISHED:
            self.finish(request, ())

    def retract(self, request: Request) -> None:
        """Take a running request's slots and queue it again; what is computed stays cached."""
        self._lives.requeue(request, computed_rows(request))
        self.stats.retractions += 1
        self._admission.retracted()

    def requeue_running(self) -> None:
        """Queue every running request again, as `retract` does, but for no want of room."""
        for request in list(self._running.values()):
            self._lives.requeue(request, computed_rows(request))

    def retract_program(self, program_id: int) -> None:
        """Retract every running request of a program, and let it hold nothing.

        What it has sampled stays; it goes on from there when there is room.
        """
        for request in list(self._running.values()):
            if request.program_id == program_id:
                self.retract(request)
        self.holds.retract(program_id)

    def reset_cache(self) -> int:
        """Drop every cached prefix that nobody has locked; return how many slots came free.

        What programs hold and what is promised goes too. Raises EngineError while requests are
        running.
        """
        if self._running or self._batch is not None:
            raise EngineError(
                f"reset_cache was called with {len(self._running)} requests running: wait for "
                "them or abort them"
            )
        while self.holds.give_up_one():
            pass
        freed = self.cache.evict(self.cache.num_evictable // self.allocator.page_size)
        self.allocator.free(freed)
        return len(freed) * self.allocator.page_size

    # ---- one step's parts

    def _make_room(self) -> Work:
        """Retract from the policy's tail until every decode has a slot, or a prefill has.

        The last one that runs goes too if it must, to be rejected when it should start again.
        """
        while (work := self._pressure.work()) is None:
            tail = self._pressure.tail()
            if self._pressure.takes_programs():
                self.stats.program_retractions += 1
                self.retract_program(tail.program_id)
            else:
                self.retract(tail)
        return work

    def _take_turns(self, decodes: list[Request], budget: int) -> list[Request]:
        """Take the decodes the budget allows and move them to the end of the next step's order."""
        taken = decodes[:budget]
        for request in taken:
            self._running[request.request_id] = self._running.pop(request.request_id)
        return taken

    def _admit(self, budget: int, rows: list[ScheduledRequest]) -> None:
        """Admit waiting requests, best first, until one does not fit."""
        reserved = self._admission.reserved()
        while budget > 0 and len(self._running) < self._max_running:
            admitted = self._admission.next(reserved, self.stats)
            if admitted is None:
                return
            request = admitted.request
            self._lives.start(admitted)
            num = min(request.num_pending, budget, self._max_chunk)
            rows.append(self._sharing.schedule_rows(request, num))
            budget -= num
            reserved += self._admission.reserve(request)

    # ---- invariants

    def check(self, pins: Iterable[RadixNode] = ()) -> None:
        """Assert the accounting identity and that no request or slot is lost or held twice.

        `pins` are the nodes that others have locked, once per lock.
        """
        self._lives.check()
        self.holds.check()
        in_flight = self._lives.in_flight
        check_slots(self.allocator, self.cache, self._running.values(), in_flight, pins)
