"""What the radix cache promises, one behaviour at a time."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.runtime.kv_cache import NodeClass, RadixCache, RadixNode


def cached(cache: RadixCache, tokens: list[int], first_slot: int, namespace: str = "") -> RadixNode:
    num, node, _ = cache.match_prefix(tokens, namespace)
    slots = array("q", range(first_slot, first_slot + len(tokens) - num))
    cache.lock(node)
    node = cache.insert(node, tokens[num:], slots).node
    cache.unlock(node)
    return node


def test_a_lock_survives_the_split_of_its_node() -> None:
    cache = RadixCache()
    node = cached(cache, [1, 2, 3, 4], 0)
    cache.lock(node)
    cached(cache, [1, 2, 9], 10)
    assert (cache.num_protected, cache.num_evictable) == (4, 1)
    assert cache.evict(99).tolist() == [10]
    cache.unlock(node)
    assert sorted(cache.evict(99)) == [0, 1, 2, 3]
    assert cache.num_nodes == 0
    cache.check()


def test_a_prefix_in_use_is_evicted_from_its_end_once_it_is_free() -> None:
    cache = RadixCache()
    cached(cache, [1, 2, 3, 4], 0)
    assert cache.evict(1).tolist() == [3]
    assert cache.match_prefix([1, 2, 3, 4]).slots.tolist() == [0, 1, 2]


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache()
    for i in range(5):
        cached(cache, [7, i], 10 * i)
    for i in (3, 0, 4, 1, 2):
        node = cache.match_prefix([7, i]).node
        cache.lock(node)
        cache.unlock(node)
    slot_of = {i: cache.match_prefix([7, i]).slots[1] for i in range(5)}
    assert [cache.evict(1).tolist() for _ in range(5)] == [[slot_of[i]] for i in (3, 0, 4, 1, 2)]


def test_namespaces_share_nothing_and_leave_nothing() -> None:
    cache = RadixCache()
    cached(cache, [1, 2], 0, "a")
    assert cache.match_prefix([1, 2], "b").num_tokens == 0
    assert cache.match_prefix([1, 2], "a").num_tokens == 2
    root = cache.root("c")
    cache.lock(root)
    assert cache.root("c") is root
    cache.unlock(root)
    assert cache.root("c") is not root


def test_the_eviction_queue_does_not_grow_with_use() -> None:
    cache = RadixCache()
    nodes = [cached(cache, [i], i) for i in range(8)]
    for _ in range(500):
        for node in nodes:
            cache.lock(node)
            cache.unlock(node)
            cache.unmark(cache.mark(node, NodeClass.LIVE))
            cache.unmark(cache.mark(node, NodeClass.PROMISED))
    assert len(cache._leaves) < 8 * 20
    cache.check()


def test_unlocking_what_is_not_locked_is_refused() -> None:
    cache = RadixCache()
    node = cached(cache, [1], 0)
    with pytest.raises(AssertionError, match="without a lock"):
        cache.unlock(node)


def test_rows_of_the_current_step_match_but_stay_until_it_is_over() -> None:
    cache = RadixCache()
    root = cache.root()
    cache.lock(root)
    node = cache.insert(root, [1, 2, 3], array("q", [0, 1, 2]), computed=False).node
    assert cache.match_prefix([1, 2, 5]).slots.tolist() == [0, 1]  # splits what is not computed yet
    cache.unlock(node)
    assert not cache.evict(3)
    cache.mark_computed()
    assert sorted(cache.evict(3)) == [0, 1, 2]


def test_a_failed_step_takes_back_what_was_split_meanwhile() -> None:
    cache = RadixCache()
    root = cache.root()
    cache.lock(root)
    node = cache.insert(root, [1, 2, 3], array("q", [0, 1, 2]), computed=False).node
    cache.match_prefix([1, 2, 5])
    cache.check()
    cache.unlock(node)
    assert sorted(cache.drop_uncomputed()) == [0, 1, 2]
    assert cache.num_nodes == 0
    cache.check()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_leaf_grows_where_it_is_unless_somebody_else_would_see_it(is_shared: bool) -> None:
    cache = RadixCache()
    leaf = cached(cache, [1, 2], 0)
    for _ in range(1 + is_shared):
        cache.lock(leaf)
    end = cache.insert(leaf, [3], array("q", [2])).node
    assert (end is leaf) is not is_shared
    assert (leaf.depth(), end.depth()) == (2 if is_shared else 3, 3)
    assert (cache.num_protected, cache.num_evictable) == (3, 0)
    cache.check()


@given(st.data())
def test_long_rows_match_up_to_the_first_difference(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5000))
    row = [(i * 2654435761) >> 7 & 0xFFFF for i in range(size)]
    cache = RadixCache()
    cached(cache, row, 0)
    at = data.draw(st.integers(0, size - 1))
    other = [*row[:at], row[at] + 1, *row[at + 1 :]]
    limit = data.draw(st.integers(0, size))
    assert cache.probe(other, limit=limit).num_tokens == min(at, limit)
    assert cache.match_prefix(other, limit=limit).slots.tolist() == list(range(min(at, limit)))
