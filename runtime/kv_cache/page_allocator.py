"""Which KV slots are free; knows neither what the others hold nor who holds them."""

from __future__ import annotations

from collections.abc import Iterable

from umbel.lang.errors import EngineConfigError


class PageAllocator:
    """A free list over `num_slots` KV slots, numbered from 0; a page is one slot for now.

    Slots are handed out lowest first while the pool is fresh and last freed first afterwards, so
    that a small working set stays in a small part of the pool.

    Raises EngineConfigError if there is not at least one slot.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise EngineConfigError(
                f"a KV pool of {num_slots} slots was asked for: it needs at least 1"
            )
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_slots)

    @property
    def num_free(self) -> int:
        """Slots that `alloc` can hand out now."""
        return len(self._free)

    def alloc(self, num: int) -> list[int] | None:
        """Hand out `num` slots, or None when fewer are free; never a part of them."""
        if num > len(self._free):
            return None
        if num <= 0:
            return []
        slots = self._free[: -num - 1 : -1]
        del self._free[-num:]
        is_free = self._is_free
        for slot in slots:
            is_free[slot] = 0
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Take slots back.

        Raises ValueError if a slot is free already or not of this pool; those before it are freed.
        """
        is_free, free = self._is_free, self._free
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise ValueError(f"slot {slot} was freed; this pool has 0 to {self.num_slots - 1}")
            if is_free[slot]:
                raise ValueError(f"slot {slot} was freed twice: two owners released it")
            is_free[slot] = 1
            free.append(slot)

    def is_free(self, slot: int) -> bool:
        """Whether nobody holds the slot."""
        return bool(self._is_free[slot])

    def check(self) -> None:
        """Assert that the free list and the flags agree."""
        assert len(set(self._free)) == len(self._free), "a slot is on the free list twice"
        assert sum(self._is_free) == len(self._free), "flags and free list differ"
        assert all(self._is_free[slot] for slot in self._free), "a held slot is on the free list"
