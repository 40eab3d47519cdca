"""Decides what runs next: admits, chunks, shares, retracts; never touches a tensor.

A step is `schedule`, the forward pass, then `complete` (or `fail`). One budget of rows bounds the
step: requests that decode come first, then the prefills that have begun, then new ones in the
order of the policy. Context rows enter the radix cache when they are scheduled, so requests of
one step share them; sampled rows enter it when their request ends or is retracted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from umbel.lang.errors import EngineConfigError, EngineError, RequestRejectedError

from ..kv_cache import PageAllocator, PrefixProbe, RadixCache, RadixNode
from ..request import Request, RequestStatus
from .accounting import check_requests, check_slots
from .batch import Batch, ScheduledRequest
from .frontiers import Frontiers, Parked
from .policy import Key, WaitingQueue, get_policy
from .rows import computed_rows, max_match, max_rows, rows_to_keep
from .stats import SchedulerStats


class Scheduler:
    """Continuous batching over one pool of KV slots and one radix cache.

    The caller appends sampled tokens to `request.token_ids` after `complete`, and calls `finish`
    for what has ended. A running request without a pending row is left alone. One step is in
    flight at a time; `abort`, `finish` and `retract` are allowed while it is.

    Raises EngineConfigError if a bound is not positive or the policy is unknown.

    Args:
        cache: holds shared prefixes; nobody else inserts into it or evicts from it.
        allocator: the pool's slots, all of them free.
        max_step_tokens: rows that one step may compute.
        max_running: requests that may hold slots at once.
        policy: a name in `POLICIES`.
        cache_enabled: False shares nothing and leaves nothing in the cache.
        max_chunk_tokens: rows of one request in one step; None for the whole budget.
        watermark: share of the pool kept free for running requests when one is admitted.
        max_wait_steps: after so many steps in the queue a request goes first.

    """

    #: share of their remaining output that running requests are taken to need, at an admission
    MIN_OUTPUT_RATIO, MAX_OUTPUT_RATIO = 0.1, 1.0

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        *,
        max_step_tokens: int,
        max_running: int,
        policy: str = "program",
        cache_enabled: bool = True,
        max_chunk_tokens: int | None = None,
        watermark: float = 0.01,
        max_wait_steps: int = 1024,
    ) -> None:
        chunk = max_step_tokens if max_chunk_tokens is None else max_chunk_tokens
        for name, value in (
            ("max_step_tokens", max_step_tokens),
            ("max_running", max_running),
            ("max_chunk_tokens", chunk),
            ("max_wait_steps", max_wait_steps),
        ):
            if value < 1:
                raise EngineConfigError(f"{name} is {value}: it must be at least 1")
        if not 0 <= watermark < 1:
            raise EngineConfigError(f"watermark is {watermark}: it must be in [0, 1)")
        self.cache = cache
        self.allocator = allocator
        self.cache_enabled = cache_enabled
        self.stats = SchedulerStats()
        self._budget = max_step_tokens
        self._max_running = max_running
        self._max_chunk = min(chunk, max_step_tokens)
        self._watermark = int(watermark * allocator.num_slots)
        self._output_ratio = self.MIN_OUTPUT_RATIO
        self._queue = WaitingQueue(get_policy(policy), self._probe, max_wait_steps)
        self._running: dict[int, Request] = {}
        self._keys: dict[int, Key] = {}  # of running requests; the greatest is retracted first
        self._batch: Batch | None = None  # in flight
        self._in_flight: dict[int, ScheduledRequest] = {}  # what of it has not left meanwhile
        self._rejected: list[tuple[Request, RequestRejectedError]] = []
        self._frontiers = Frontiers()

    # ---- what the engine asks

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self.allocator.num_free

    @property
    def num_available(self) -> int:
        """Slots that can be had without retracting anything: free, or evictable."""
        return self.allocator.num_free + self.cache.num_evictable

    @property
    def num_running(self) -> int:
        """Requests that hold slots."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none yet, or none any more."""
        return len(self._queue) + self._frontiers.num_parked

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._running or self.num_waiting)

    def take_rejected(self) -> list[tuple[Request, RequestRejectedError]]:
        """Return requests that `schedule` found can never run, once each; they are FINISHED."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestRejectedError if its row can outgrow the whole pool."""
        assert request.token_ids, "a request needs a token to compute"
        assert request.num_context >= 1, "a select needs a context row to score its roots from"
        needed = max_rows(request)
        if needed > self.allocator.num_slots:
            raise RequestRejectedError(
                f"the request may need KV for {needed:,} tokens; the pool holds "
                f"{self.allocator.num_slots:,}: shorten the prompt, lower max_tokens or make the "
                "pool larger",
                reason="cannot_fit",
            )
        request.status = RequestStatus.WAITING
        self._queue.push(request)

    def schedule(self) -> Batch | None:
        """Choose the rows of the next step and give them slots; None when nothing can run.

        Requests that turn out never to fit are finished and left for `take_rejected`.
        """
        assert self._batch is None, "the last step is not over: call complete or fail"
        self._queue.now += 1
        self._queue.refresh()
        if self._queue.policy.preempts:
            self._preempt()
        decodes, prefills = self._make_room()
        rows: list[ScheduledRequest] = []
        budget = self._budget
        if decodes:
            if len(decodes) > budget:
                decodes = self._take_turns(decodes, budget)
            slots = self._alloc(len(decodes))
            for request, slot in zip(decodes, slots, strict=True):
                request.slots.append(slot)
                start = request.num_computed
                rows.append(ScheduledRequest(request, start, start + 1))
            budget -= len(decodes)
        num_decodes = len(rows)
        for request in prefills:
            if budget <= 0:
                break
            if not self._extend_match(request):
                continue
            num = min(request.num_pending, budget, self._max_chunk, self.num_available)
            if num > 0:
                rows.append(self._schedule_rows(request, num))
                budget -= num
        if budget > 0 and self._queue and len(self._running) < self._max_running:
            self._admit(budget, rows)
        if not rows:
            return None
        self._in_flight = {s.request.request_id: s for s in rows}
        self._batch = Batch(tuple(rows), num_decodes)
        return self._batch

    def complete(self, batch: Batch) -> None:
        """Note that the step has run: its rows are computed; requests that left are skipped."""
        assert batch is self._batch, "this step is not in flight"
        for scheduled in self._in_flight.values():
            scheduled.request.num_computed = scheduled.end
            scheduled.request.num_prefilled += self.stats.count_computed(scheduled)
        self._batch, self._in_flight = None, {}
        self.cache.mark_computed()
        self.stats.steps += 1
        self._output_ratio = max(self.MIN_OUTPUT_RATIO, self._output_ratio * 0.995)

    def fail(self, batch: Batch) -> None:
        """Take the step back: nothing that it registered or allocated survives.

        Its requests run on from where they were; those whose prefix went with the step are
        queued again.
        """
        assert batch is self._batch, "this step is not in flight"
        lost: list[Request] = []
        for scheduled in self._in_flight.values():
            request = scheduled.request
            node = request.cache_node
            if node is not None and not all(n.computed for n in node.path()):
                lost.append(request)
            else:
                self.allocator.free(request.slots[request.num_computed :])
                del request.slots[request.num_computed :]
        self._batch, self._in_flight = None, {}
        for request in lost:
            self._release(request, ())
            self._requeue(request)
        self.allocator.free(self.cache.drop_uncomputed())
        self.stats.failed_steps += 1

    def finish(self, request: Request, keep: Sequence[int] | None = None) -> None:
        """End a request and release all it holds: the one way out.

        `keep` names computed rows to leave in the cache: for a gen a run that starts at or before
        the first row of its own, for a select the winner's path through the tree. Rows that the
        cache has already are skipped, and a select's own context rows come along. None keeps
        every computed row of a gen, and the context of a select.
        """
        if request.status is RequestStatus.RUNNING:
            self._release(request, computed_rows(request) if keep is None else keep)
        else:
            self._leave_queue(request)
        request.status = RequestStatus.FINISHED

    def abort(self, request: Request) -> None:
        """End a request in any state, leaving nothing of its own; no error when it has ended."""
        if request.status is not RequestStatus.FINISHED:
            self.finish(request, ())

    def retract(self, request: Request) -> None:
        """Take a running request's slots and queue it again; what is computed stays cached."""
        self._release(request, computed_rows(request))
        request.num_retractions += 1
        self.stats.retractions += 1
        self._output_ratio = min(self.MAX_OUTPUT_RATIO, self._output_ratio + 0.1)
        self._requeue(request)

    def reset_cache(self) -> int:
        """Drop every cached prefix that nobody has locked; return how many slots came free.

        Raises EngineError while requests are running.
        """
        if self._running or self._batch is not None:
            raise EngineError(
                f"reset_cache was called with {len(self._running)} requests running: wait for "
                "them or abort them"
            )
        freed = self.cache.evict(self.cache.num_evictable)
        self.allocator.free(freed)
        return len(freed)

    # ---- one step's parts

    def _make_room(self) -> tuple[list[Request], list[Request]]:
        """Sort the running requests into decodes and prefills, and make sure some of them can run.

        Retracts from the policy's tail until every decode has a slot, or the first prefill has; the
        last one that runs goes too if it must, for `_admit` to reject it.
        """
        while True:
            decodes: list[Request] = []
            prefills: list[Request] = []
            for request in self._running.values():
                computed = request.num_computed
                pending = len(request.token_ids) - computed
                if pending == 1 and computed >= request.num_context and not request.tree_parents:
                    decodes.append(request)
                elif pending > 0:
                    prefills.append(request)
            needed = min(len(decodes), self._budget) or min(len(prefills), 1)
            if needed <= self.num_available:
                prefills.sort(key=lambda r: self._keys[r.request_id])
                return decodes, prefills
            self.retract(self._tail())

    def _take_turns(self, decodes: list[Request], budget: int) -> list[Request]:
        """Take the decodes the budget allows and move them to the end of the next step's order."""
        taken = decodes[:budget]
        for request in taken:
            self._running[request.request_id] = self._running.pop(request.request_id)
        return taken

    def _preempt(self) -> None:
        """Retract requests of lower priority than the first waiting one, until that one fits."""
        head = self._queue.head()
        while head is not None and self._running:
            victim = self._tail()
            needed = len(head.token_ids) - self._probe(head).num_tokens
            if victim.priority >= head.priority or (
                len(self._running) < self._max_running
                and self._fits(head, needed, self._reserved_by_running())
            ):
                return
            self.retract(victim)

    def _admit(self, budget: int, rows: list[ScheduledRequest]) -> None:
        """Admit waiting requests, best first, until one does not fit."""
        reserved = self._reserved_by_running()
        while budget > 0 and len(self._running) < self._max_running:
            request = self._queue.head()
            if request is None:
                return
            node: RadixNode | None = None
            cached: list[int] = []
            if self.cache_enabled:
                limit = max_match(request)
                num, node, cached = self.cache.match_prefix(
                    request.token_ids, request.namespace, limit
                )
                ahead = self._frontiers.ahead(node, request.token_ids[num])
                if ahead is not None and num < limit:
                    self._frontiers.park(request, self._queue.remove(request), ahead, limit)
                    self.stats.deferred += 1
                    continue
                self.cache.lock(node)  # what is matched is not there to be evicted
            needed = len(request.token_ids) - len(cached)
            if not self._fits(request, needed, reserved):
                if node is not None:
                    self.cache.unlock(node)
                if self._running:
                    return
                self._reject(request)
                continue
            self._start(request, node, cached)
            num = min(needed, budget, self._max_chunk)
            rows.append(self._schedule_rows(request, num))
            budget -= num
            reserved += self._reserve(request)

    def _start(self, request: Request, node: RadixNode | None, cached: list[int]) -> None:
        (self._keys[request.request_id],) = self._queue.policy.keys((request,), self._queue)
        self._queue.remove(request)
        self._running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        if not request.tree_parents:
            request.num_context = len(request.token_ids)
        request.cache_node = node
        request.slots = array("q", cached)
        request.num_cached = request.num_computed = request.num_shared = len(cached)
        self.stats.cached_tokens += len(cached)

    def _schedule_rows(self, request: Request, num: int) -> ScheduledRequest:
        """Give the next `num` rows slots, and register those that may be shared."""
        start = request.num_computed
        end = start + num
        slots = self._alloc(num)
        request.slots.extend(slots)
        node, token_ids = request.cache_node, request.token_ids
        shared = min(end, request.num_context)
        # a row that is in the tree already is the last of the context, whose logits are wanted: it
        # is computed again and stays private
        if node is not None and start < shared and token_ids[start] not in node.children:
            assert request.num_shared == start, "context rows beside the cache"
            tokens = token_ids[start:shared]
            new = self.cache.insert(node, tokens, slots[: shared - start], computed=False).node
            self._share(request, new, shared)
        else:
            self._wake(self._frontiers.leave(request))
        return ScheduledRequest(request, start, end)

    def _extend_match(self, request: Request) -> bool:
        """Take what others have computed of a prefill's rest since its last chunk.

        Returns False when another prefill is about to compute the very next row.
        """
        node, start, token_ids = request.cache_node, request.num_shared, request.token_ids
        limit = max_match(request)
        if node is None or start != request.num_computed or start >= limit:
            return True
        if token_ids[start] in node.children:
            end, node, slots = self.cache.extend_match(node, token_ids, start, limit)
            request.slots.extend(slots)
            request.num_computed = end
            self.stats.cached_tokens += len(slots)
            self._share(request, node, end)
        ahead = self._frontiers.ahead(node, token_ids[request.num_shared])
        return ahead is None or ahead is request

    def _share(self, request: Request, node: RadixNode, num_shared: int) -> None:
        """Move the end of what a request shares down to `node`."""
        self.cache.lock(node, until=request.cache_node)
        request.cache_node = node
        request.num_shared = num_shared
        self._wake(self._frontiers.advance(request))

    def _wake(self, parked: Iterable[Parked]) -> None:
        for entry in parked:
            self._queue.push(entry.request, entry.since)

    def _alloc(self, num: int) -> list[int]:
        missing = num - self.allocator.num_free
        if missing > 0:
            self.allocator.free(self.cache.evict(missing))
        slots = self.allocator.alloc(num)
        assert slots is not None, "num_free promised slots that are not there"
        return slots

    def _tail(self) -> Request:
        """Return the running request that is the first to make way."""
        return max(self._running.values(), key=lambda r: self._keys[r.request_id])

    def _fits(self, request: Request, needed: int, reserved: int) -> bool:
        """Whether a request may start: alone if it can, beside others if they will not need it."""
        if self._running:
            needed += self._reserved_output(request) + reserved
        return needed <= self.num_available

    def _reserved_by_running(self) -> int:
        return self._watermark + sum(map(self._reserve, self._running.values()))

    def _reserve(self, request: Request) -> int:
        """Return how many more slots a running request is taken to need."""
        return len(request.token_ids) - len(request.slots) + self._reserved_output(request)

    def _reserved_output(self, request: Request) -> int:
        output = max(0, request.limit - 1 - len(request.token_ids))
        return int(output * self._output_ratio)

    def _probe(self, request: Request) -> PrefixProbe:
        if not self.cache_enabled:
            return PrefixProbe(0, None)
        return self.cache.probe(request.token_ids, request.namespace, max_match(request))

    # ---- ways out

    def _release(self, request: Request, keep: Sequence[int]) -> None:
        """Give back all that a running request holds, leaving the rows `keep` in the cache."""
        shared, node = request.num_shared, request.cache_node
        own = request.slots[shared:].tolist()
        if node is not None:
            rows = rows_to_keep(request, keep)
            if rows:
                slots = [request.slots[row] for row in rows]
                tokens = [request.token_ids[row] for row in rows]
                present, end = self.cache.insert(node, tokens, slots)
                taken = set(slots[present:])
                own = [slot for slot in own if slot not in taken]
                self.cache.lock(end, until=node)
                node = end
            self.cache.unlock(node)
        self.allocator.free(own)
        request.slots = array("q")
        request.cache_node = None
        request.num_shared = request.num_computed = 0
        del self._running[request.request_id]
        del self._keys[request.request_id]
        self._in_flight.pop(request.request_id, None)
        self._wake(self._frontiers.leave(request))

    def _requeue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._queue.push(request)

    def _leave_queue(self, request: Request) -> None:
        if request in self._queue:
            self._queue.remove(request)
        else:
            self._frontiers.unpark(request)

    def _reject(self, request: Request) -> None:
        """End a request that does not fit with everything evicted and nothing else running."""
        needed = len(request.token_ids)
        error = RequestRejectedError(
            f"the request needs KV for {needed:,} tokens; with nothing else running "
            f"{self.num_available:,} slots of {self.allocator.num_slots:,} can be had, the rest "
            "is pinned: unpin prefixes or make the pool larger",
            reason="cannot_fit",
        )
        self.finish(request)
        self._rejected.append((request, error))

    # ---- invariants

    def check(self, pins: Iterable[RadixNode] = ()) -> None:
        """Assert the accounting identity and that no request or slot is lost or held twice.

        `pins` are the nodes that others have locked, once per lock.
        """
        waiting = self._queue.requests()
        for ahead, request in self._frontiers.parked():
            assert ahead in self._running, "a request waits for one that left"
            waiting.append(request)
        check_requests(self._running, waiting)
        self._frontiers.check(self._running)
        check_slots(self.allocator, self.cache, self._running.values(), self._in_flight, pins)
