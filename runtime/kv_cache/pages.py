"""Pages of consecutive KV slots, and back; knows nothing of who holds them.

Page p is the slots [p * page_size, (p + 1) * page_size). Both are kept in arrays of 64-bit
integers: a slice is one copy of memory, and no number is an object of its own.
"""

from __future__ import annotations

from array import array


def pages_of(slots: array[int], page_size: int) -> array[int]:
    """Return the pages of slots that begin with a page's first one."""
    if page_size == 1:
        return slots
    return array("q", [slot // page_size for slot in slots[::page_size]])


def slots_of(pages: array[int], page_size: int) -> array[int]:
    """Return the slots of pages, in their order."""
    if page_size == 1:
        return pages
    return array("q", [page * page_size + i for page in pages for i in range(page_size)])
