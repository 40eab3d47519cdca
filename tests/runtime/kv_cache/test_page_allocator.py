"""Slots are handed out once, never in part, and taken back once."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.lang.errors import EngineConfigError
from umbel.runtime.kv_cache import PageAllocator


@given(
    st.integers(1, 24),
    st.lists(st.tuples(st.booleans(), st.integers(0, 26)), max_size=40),
)
def test_held_and_free_slots_partition_the_pool(
    num_slots: int, steps: list[tuple[bool, int]]
) -> None:
    allocator = PageAllocator(num_slots)
    held = array("q")
    for is_alloc, num in steps:
        if is_alloc:
            slots = allocator.alloc(num)
            assert (slots is None) == (num > num_slots - len(held))
            if slots is not None:
                assert len(slots) == num
                held += slots
        else:
            allocator.free(held[:num])
            del held[:num]
        allocator.check()
        assert allocator.num_free == num_slots - len(held)
        assert {s for s in range(num_slots) if not allocator.is_free(s)} == set(held)
        assert len(set(held)) == len(held)


def test_a_fresh_pool_is_used_from_the_bottom_and_again_from_where_it_is_warm() -> None:
    allocator = PageAllocator(8)
    assert allocator.alloc(3) == array("q", [0, 1, 2])
    allocator.free(array("q", [1]))
    assert allocator.alloc(2) == array("q", [1, 3])


@pytest.mark.parametrize("slots", [[0, 0], [3], [-1], [4]])
def test_freeing_what_is_not_held_is_an_error(slots: list[int]) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(3)
    with pytest.raises(ValueError, match="freed"):
        allocator.free(array("q", slots))
    allocator.check()


def test_a_pool_needs_a_slot() -> None:
    with pytest.raises(EngineConfigError, match="at least 1"):
        PageAllocator(0)
    with pytest.raises(EngineConfigError, match="at least 16"):
        PageAllocator(15, 16)
    with pytest.raises(EngineConfigError, match="page_size is 0"):
        PageAllocator(15, 0)


def test_slots_behind_the_last_whole_page_are_not_used() -> None:
    allocator = PageAllocator(50, 16)
    assert (allocator.num_free, allocator.num_slots) == (3, 48)
    assert allocator.alloc(3) == array("q", [0, 1, 2])
    assert allocator.alloc(1) is None
