"""The scheduler's invariants, in one place: every slot has one owner, every request one place."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ..kv_cache import PageAllocator, RadixCache, RadixNode, pages_of, slots_of
from ..request import Request, RequestStatus
from .batch import ScheduledRequest


def check_slots(
    allocator: PageAllocator,
    cache: RadixCache,
    running: Iterable[Request],
    in_flight: Mapping[int, ScheduledRequest],
    pins: Iterable[RadixNode],
) -> None:
    """Assert free + evictable + protected + in flight == total, and that nothing is held twice.

    In flight are the pages that running requests hold beside the cache. `pins` are the nodes that
    others have locked, once per lock.
    """
    allocator.check()
    cache.check()
    locks = Counter(node for pin in pins for node in pin.path())
    size = allocator.page_size
    own = array("q")  # pages
    for request in running:
        scheduled = in_flight.get(request.request_id)
        rows = request.num_computed if scheduled is None else scheduled.end
        assert len(request.slots) == rows, "a row without a slot, or a slot without a row"
        path = [] if request.cache_node is None else request.cache_node.path()
        locks.update(path)
        shared = [slot for node in path for slot in node.slots]
        assert shared == request.slots[: request.num_shared].tolist(), (
            "shared slots are not the tree's"
        )
        tokens = [token_id for node in path for token_id in node.key]
        assert tokens == request.token_ids[: request.num_shared], "shared rows are not its own"
        assert request.num_shared % size == 0, "a part of a page is shared"
        rest = request.slots[request.num_shared :]
        pages = pages_of(rest, size)
        assert rest == slots_of(pages, size)[: len(rest)], "a torn page"
        own += pages
    held = [*own, *(page for node in cache.nodes() for page in pages_of(node.slots, size))]
    assert len(held) == len(set(held)), "a page is held twice"
    assert not any(map(allocator.is_free, held)), "a page is held and free"
    in_cache = (cache.num_evictable + cache.num_protected) // size
    assert allocator.num_free + in_cache + len(own) == allocator.num_pages, "pages were lost"
    for node in cache.nodes():
        assert node.lock_count == locks[node], "a lock without a holder, or the reverse"


def check_requests(running: Mapping[int, Request], waiting: Collection[Request]) -> None:
    """Assert that each request runs or waits once, and that its state agrees."""
    for request in running.values():
        assert request.status is RequestStatus.RUNNING, "a running request is not marked so"
    assert len({r.request_id for r in waiting}) == len(waiting), "a request waits twice"
    for request in waiting:
        assert request.status is RequestStatus.WAITING, "a waiting request is not marked so"
        assert not request.slots, "a waiting request holds slots"
        assert request.request_id not in running, "a request waits and runs"
