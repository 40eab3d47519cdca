"""Which KV pages are free; knows neither what the others hold nor who holds them."""

from __future__ import annotations

from array import array

from umbel.lang.errors import EngineConfigError


class PageAllocator:
    """A free list over the pages of `num_slots` KV slots, numbered from 0.

    Page p is the slots [p * page_size, (p + 1) * page_size). Pages are handed out lowest first
    while the pool is fresh and last freed first afterwards, so that a small working set stays in a
    small part of the pool. Slots behind the last whole page are not used.

    Raises EngineConfigError if there is not at least one page.
    """

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        if page_size < 1:
            raise EngineConfigError(f"page_size is {page_size}: it must be at least 1")
        num_pages = num_slots // page_size
        if num_pages < 1:
            raise EngineConfigError(
                f"a KV pool of {num_slots} slots was asked for: it needs at least {page_size}, "
                "one page"
            )
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_pages * page_size
        self._stack = array("q", range(num_pages - 1, -1, -1))  # the first `num_free` are free
        self._num_free = num_pages
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return self._num_free

    def alloc(self, num: int) -> array[int] | None:
        """Hand out `num` pages, or None when fewer are free; never a part of them."""
        left = self._num_free - max(0, num)
        if left < 0:
            return None
        pages = self._stack[left : self._num_free]
        pages.reverse()
        self._num_free = left
        is_free = self._is_free
        for page in pages:
            is_free[page] = 0
        return pages

    def free(self, pages: array[int]) -> None:
        """Take pages back.

        Raises ValueError if a page is free already or not of this pool; those before it are freed.
        """
        is_free, num_pages = self._is_free, self.num_pages
        for at, page in enumerate(pages):
            if not 0 <= page < num_pages or is_free[page]:
                self._push(pages[:at])
                raise ValueError(self._refusal(page))
            is_free[page] = 1
        self._push(pages)

    def is_free(self, page: int) -> bool:
        """Whether nobody holds the page."""
        return bool(self._is_free[page])

    def _push(self, pages: array[int]) -> None:
        end = self._num_free + len(pages)
        self._stack[self._num_free : end] = pages
        self._num_free = end

    def _refusal(self, page: int) -> str:
        if not 0 <= page < self.num_pages:
            return f"page {page} was freed; this pool has 0 to {self.num_pages - 1}"
        return f"page {page} was freed twice: two owners released it"

    def check(self) -> None:
        """Assert that the free list and the flags agree."""
        free = self._stack[: self._num_free]
        assert len(self._stack) == self.num_pages, "the free list has another length"
        assert len(set(free)) == len(free), "a page is on the free list twice"
        assert sum(self._is_free) == len(free), "flags and free list differ"
        assert all(map(self._is_free.__getitem__, free)), "a held page is on the free list"
