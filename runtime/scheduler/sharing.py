"""Shares context rows as they are scheduled: registers them, takes others', waits for others'."""

from __future__ import annotations

from collections.abc import Iterable

from ..kv_cache import RadixNode, page_key
from ..request import Request
from .batch import ScheduledRequest
from .frontiers import Frontiers, Parked
from .policy import WaitingQueue
from .room import Room
from .rows import max_match
from .stats import SchedulerStats


class Sharing:
    """What running requests have in common, in the cache and in the step that is being made."""

    def __init__(
        self, room: Room, queue: WaitingQueue, frontiers: Frontiers, stats: SchedulerStats
    ) -> None:
        self._room = room
        self._queue = queue
        self._frontiers = frontiers
        self._stats = stats

    def schedule_rows(self, request: Request, num: int) -> ScheduledRequest:
        """Give the next `num` rows slots, and register the whole pages that may be shared."""
        size = self._room.page_size
        start = request.num_computed
        end = start + num
        self._room.grow(request, num)
        node, token_ids, at = request.cache_node, request.token_ids, request.num_shared
        shared = min(end, request.num_context)
        shared -= shared % size
        # a page that is in the tree already holds the last row of the context, whose logits are
        # wanted (it is computed again), or was begun before another request registered it: it
        # stays private
        if node is None or start >= request.num_context or self._is_registered(request):
            self.leave(request)
        elif shared > at:
            tokens, slots = token_ids[at:shared], request.slots[at:shared]
            new = self._room.cache.insert(node, tokens, slots, computed=False).node
            self._share(request, new, shared)
        else:
            self.wake(self._frontiers.advance(request))
        return ScheduledRequest(request, start, end)

    def extend_match(self, request: Request) -> bool:
        """Take what others have computed of a prefill's rest since its last chunk.

        Returns False when another prefill is about to compute the very next page.
        """
        node, start, size = request.cache_node, request.num_shared, self._room.page_size
        limit = min(max_match(request), request.num_context)
        if node is None or request.num_computed >= limit or start + size > limit:
            return True
        token_ids = request.token_ids
        if page_key(token_ids, start, size) in node.children:
            end, node, slots = self._room.cache.extend_match(node, token_ids, start, limit)
            self._room.replace(request, start, slots)
            self._room.cache.lock(node, until=request.cache_node)
            self._stats.cached_tokens += max(0, end - request.num_computed)
            request.num_computed = max(request.num_computed, end)
            self._share(request, node, end)
        if request.num_shared < request.num_computed:
            return True  # it has begun the page
        ahead = self._frontiers.ahead(request)
        return ahead is None or ahead is request

    def leave(self, request: Request) -> None:
        """Let nobody wait for a request any more."""
        self.wake(self._frontiers.leave(request))

    def wake(self, parked: Iterable[Parked]) -> None:
        """Queue again who waits no more for a prefill."""
        for entry in parked:
            self._queue.push(entry.request, entry.since)

    def _is_registered(self, request: Request) -> bool:
        """Whether the next page to be shared is in the tree."""
        node, at, size = request.cache_node, request.num_shared, self._room.page_size
        if node is None or at + size > request.num_context:
            return False
        return page_key(request.token_ids, at, size) in node.children

    def _share(self, request: Request, node: RadixNode, num_shared: int) -> None:
        """Note that what a request shares ends at `node`, which it has a lock on."""
        request.cache_node = node
        request.num_shared = num_shared
        self.wake(self._frontiers.advance(request))
