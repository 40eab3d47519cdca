"""Gives running requests pages and takes them back; knows no queue, no policy and no budget.

A request's slots are in row order: whole pages of the cache first, then pages of its own, of which
the last may have room left. Only whole pages are shared, so where a row ends or leaves another's
inside a page, that page's rows are its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ..kv_cache import Holds, PageAllocator, PrefixProbe, RadixCache, pages_of, slots_of
from ..request import Request
from .rows import max_match, rows_to_keep


class Room:
    """The pool, the cache that shares it, and what live programs hold of the cache."""

    def __init__(
        self,
        cache: RadixCache,
        allocator: PageAllocator,
        holds: Holds,
        *,
        cache_enabled: bool = True,
    ) -> None:
        assert cache.page_size == allocator.page_size, "cache and pool have other pages"
        self.cache = cache
        self.allocator = allocator
        self.holds = holds
        self.page_size = allocator.page_size
        self.cache_enabled = cache_enabled

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return self.allocator.num_free * self.page_size

    @property
    def num_available(self) -> int:
        """Slots to be had without taking them from a running request: free, or in no use."""
        return self.allocator.num_free * self.page_size + self.cache.num_evictable

    def available_to(self, num_running: int) -> int:
        """Return the slots that running requests may take; what is promised goes for a lone one.

        Several would rather make way for each other.
        """
        if num_running > 1:
            return self.num_available - self.cache.num_promised
        return self.num_available

    def in_pages(self, num_rows: int) -> int:
        """Return the slots that so many rows take, in whole pages."""
        size = self.page_size
        return num_rows if size == 1 else -(-num_rows // size) * size

    def probe(self, request: Request) -> PrefixProbe:
        """Return how much of a request's row is in the cache now."""
        if not self.cache_enabled:
            return PrefixProbe(0, None)
        return self.cache.probe(request.token_ids, request.namespace, max_match(request))

    def num_left(self, request: Request) -> int:
        """Return the rows that fit into the last page of a request."""
        return -len(request.slots) % self.page_size

    def grow(self, request: Request, num: int) -> None:
        """Give the next `num` rows of a request slots; they must be available."""
        slots, size = request.slots, self.page_size
        left = min(num, self.num_left(request))
        if left:
            slots.extend(range(slots[-1] + 1, slots[-1] + 1 + left))
        num -= left
        pages = self._alloc(self.in_pages(num) // size)
        slots.extend(slots_of(pages, size)[:num] if size > 1 else pages)

    def grow_by_one(self, requests: Sequence[Request]) -> None:
        """Give the next row of each request a slot; they must be available."""
        size = self.page_size
        if size == 1:
            for request, slot in zip(requests, self._alloc(len(requests)), strict=True):
                request.slots.append(slot)
            return
        full = [request for request in requests if len(request.slots) % size == 0]
        for request in requests:
            if len(request.slots) % size:
                request.slots.append(request.slots[-1] + 1)
        for request, page in zip(full, self._alloc(len(full)), strict=True):
            request.slots.append(page * size)

    def shrink(self, request: Request, num_rows: int) -> None:
        """Take back the slots behind the first `num_rows` rows, which are the request's own."""
        self._free_own(request, self.in_pages(num_rows))
        del request.slots[num_rows:]

    def replace(self, request: Request, num_rows: int, slots: array[int]) -> None:
        """Let shared slots, whole pages of them, stand for the rows from `num_rows` on."""
        end = num_rows + len(slots)
        rest = request.slots[end:]
        del request.slots[end:]
        self._free_own(request, num_rows)
        request.slots = request.slots[:num_rows] + slots + rest

    def release(self, request: Request, keep: Sequence[int]) -> None:
        """Take all that a request holds, leaving the rows `keep` in the cache, in whole pages."""
        size, shared, node = self.page_size, request.num_shared, request.cache_node
        pages = pages_of(request.slots[shared:], size)
        if node is not None:
            rows = self._in_whole_pages(request, rows_to_keep(request, keep))
            if rows:
                if request.tree_parents:
                    slots = array("q", [request.slots[row] for row in rows])
                    tokens = [request.token_ids[row] for row in rows]
                    present, node = self.cache.insert(node, tokens, slots)
                    taken = set(pages_of(slots[present:], size))
                    pages = array("q", [page for page in pages if page not in taken])
                else:  # one run of rows, from the first private one on
                    num = len(rows)
                    slots = request.slots[shared : shared + num]
                    tokens = request.token_ids[shared : shared + num]
                    present, node = self.cache.insert(node, tokens, slots)
                    del pages[present // size : num // size]
            self.cache.unlock(node)
            self.holds.computed(request.token_ids, request.namespace)
        self.allocator.free(pages)
        request.slots = array("q")
        request.cache_node = None
        request.num_shared = request.num_computed = 0

    def _in_whole_pages(self, request: Request, rows: Sequence[int]) -> Sequence[int]:
        """Return the first rows that fill pages: a select's winner may have its rows apart."""
        size = self.page_size
        if size == 1:
            return rows
        whole = len(rows) - len(rows) % size
        for start in range(0, whole, size):
            slots = [request.slots[row] for row in rows[start : start + size]]
            if slots[0] % size or slots != list(range(slots[0], slots[0] + size)):
                return rows[:start]
        return rows[:whole]

    def _free_own(self, request: Request, start: int) -> None:
        """Free the pages from row `start` on, where a page begins."""
        self.allocator.free(pages_of(request.slots[start:], self.page_size))

    def _alloc(self, num: int) -> array[int]:
        while (missing := num - self.allocator.num_free) > 0:
            freed = self.cache.evict(missing)
            self.allocator.free(freed)
            if len(freed) < missing and not self.holds.give_up_one():
                break
        pages = self.allocator.alloc(num)
        assert pages is not None, "num_available promised pages that are not there"
        return pages
