"""Which KV pages are free; knows neither what the others hold nor who holds them."""

from __future__ import annotations

from collections.abc import Iterable

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
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return len(self._free)

    def alloc(self, num: int) -> list[int] | None:
        """Hand out `num` pages, or None when fewer are free; never a part of them."""
        if num > len(self._free):
            return None
        if num <= 0:
            return []
        pages = self._free[: -num - 1 : -1]
        del self._free[-num:]
        is_free = self._is_free
        for page in pages:
            is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take pages back.

        Raises ValueError if a page is free already or not of this pool; those before it are freed.
        """
        is_free, free = self._is_free, self._free
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} was freed; this pool has 0 to {self.num_pages - 1}")
            if is_free[page]:
                raise ValueError(f"page {page} was freed twice: two owners released it")
            is_free[page] = 1
            free.append(page)

    def is_free(self, page: int) -> bool:
        """Whether nobody holds the page."""
        return bool(self._is_free[page])

    def check(self) -> None:
        """Assert that the free list and the flags agree."""
        assert len(set(self._free)) == len(self._free), "a page is on the free list twice"
        assert sum(self._is_free) == len(self._free), "flags and free list differ"
        assert all(self._is_free[page] for page in self._free), "a held page is on the free list"
