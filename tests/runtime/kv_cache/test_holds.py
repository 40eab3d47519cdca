"""Who keeps what when not all fits: live, promised, free; and what is read last goes first."""

from __future__ import annotations

import heapq
from array import array
from typing import Any

import pytest
from tests.runtime.scheduler.slot_truth import SlotTruth, gen, make_scheduler, run_all

from umbel.lang.errors import EngineConfigError
from umbel.runtime.kv_cache import Holds, NodeClass, RadixCache, eviction, reclaim_order
from umbel.runtime.scheduler import Scheduler


def filled(rows: list[list[int]], policy: str = "next-use") -> tuple[RadixCache, Holds]:
    cache = RadixCache()
    slot = 0
    for row in rows:
        num, node, _ = cache.match_prefix(row)
        slots = array("q", range(slot, slot + len(row) - num))
        slot += len(slots)
        cache.lock(node)
        cache.unlock(cache.insert(node, row[num:], slots).node)
    return cache, Holds(cache, policy)


def cached(cache: RadixCache, rows: list[list[int]]) -> list[int]:
    return [cache.probe(row).num_tokens for row in rows]


ROWS = [[i, i, i] for i in range(4)]


def test_free_goes_before_promised_and_live_stays() -> None:
    cache, holds = filled(ROWS)
    holds.hold(1, 0, ROWS[0])
    holds.promise(ROWS[1])
    holds.begin_step(1)
    cache.evict(6)
    assert cached(cache, ROWS) == [3, 3, 0, 0]
    cache.evict(99)
    assert cached(cache, ROWS) == [3, 0, 0, 0]
    holds.check()
    assert holds.give_up_one()
    assert not holds.give_up_one()
    cache.evict(99)
    assert cache.total == 0
    holds.check()


def test_a_stem_stays_as_long_as_anything_below_it_is_held() -> None:
    rows = [[7, 7, 1], [7, 7, 2]]
    cache, holds = filled(rows)
    holds.hold(1, 0, rows[0])
    holds.begin_step(1)
    cache.evict(99)
    assert cached(cache, rows) == [3, 2]
    holds.drop(1, 0)
    holds.drop(1, 0)
    assert cache.evict(99)
    holds.check()


def test_a_place_that_is_dropped_in_its_step_costs_the_tree_nothing() -> None:
    cache, holds = filled(ROWS)
    holds.hold(1, 0, ROWS[0])
    holds.hold(1, 1, ROWS[1])
    holds.hold(1, 2, [9])  # of which nothing is cached
    holds.check()
    holds.drop(1, 0)
    holds.begin_step(1)
    assert [node.node_class for node in cache.nodes()].count(NodeClass.LIVE) == 1
    holds.check()
    holds.drop_program(1)
    assert not holds.give_up_one()
    holds.check()


def test_a_place_is_held_for_those_of_its_rows_that_are_cached() -> None:
    cache, holds = filled(ROWS)
    for row in ([9], ROWS[0], [8], ROWS[1]):
        holds.hold(1, 0, row)
    holds.begin_step(1)
    cache.evict(99)
    assert cached(cache, ROWS) == [3, 3, 0, 0]
    holds.check()


def test_a_promise_is_kept_again_when_it_is_computed_again() -> None:
    cache, holds = filled([])
    promise = holds.promise([1, 2])
    for _ in range(2):
        for row, slots in (([1, 2, 3], [0, 1, 2]), ([5, 6], [3, 4])):
            root = cache.root()
            cache.lock(root)
            cache.unlock(cache.insert(root, row, array("q", slots)).node)
        holds.computed([1, 2, 3], "")
        cache.evict(3)
        assert cached(cache, [[1, 2, 3], [5, 6]]) == [2, 0]
        cache.evict(2)
        assert cache.total == 0
        holds.check()
    holds.unpromise(promise)
    holds.check()


def test_what_is_read_last_is_given_up_first() -> None:
    cache, holds = filled(ROWS)
    for place, steps in enumerate([30, 10, 40, 20]):
        holds.hold(1, place, ROWS[place], steps)
    holds.expect(1, 2, 5)  # it is known by now to be read sooner
    holds.begin_step(1)
    order = []
    while holds.give_up_one():
        cache.evict(99)
        order.append([i for i, num in enumerate(cached(cache, ROWS)) if not num])
    assert order == [[0], [0, 3], [0, 1, 3], [0, 1, 2, 3]]


def test_what_was_used_longest_ago_is_given_up_first_by_lru() -> None:
    cache, holds = filled(ROWS, "lru")
    for step, row in enumerate([2, 0, 3, 1]):
        holds.begin_step(step)
        holds.hold(row, 0, ROWS[row], 100 - step)
    holds.begin_step(4)
    holds.give_up_one()
    cache.evict(99)
    assert cached(cache, ROWS) == [3, 3, 0, 3]


def test_a_program_away_for_longer_than_it_ever_was_goes_first() -> None:
    cache, holds = filled(ROWS)
    for program in (0, 1):  # both come back after ten steps
        holds.begin_step(0)
        holds.hold(program, 0, ROWS[program])
        holds.begin_step(10)
        holds.expect(program, 0, 0)
        holds.hold(program, 0, ROWS[program])
    holds.begin_step(100)
    holds.expect(1, 0, 0)
    holds.hold(1, 0, ROWS[1])  # away since now; the other one for ninety steps
    holds.begin_step(101)
    holds.give_up_one()
    cache.evict(99)
    assert cached(cache, ROWS[:2]) == [0, 3]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="there are lru, next-use"):
        Holds(RadixCache(), "fifo")


def cycle(eviction: str, rounds: int = 8) -> tuple[Scheduler, int]:
    """Ten programs take turns over a pool of 30% of their rows; return what turns could reuse."""
    rows = [[1000 + i] * 20 for i in range(10)]
    scheduler = make_scheduler(int(0.3 * 10 * (20 + 3 * rounds)), eviction=eviction)
    truth, reusable = SlotTruth(), 0
    for turn in range(rounds):
        for i, row in enumerate(rows):
            scheduler.holds.expect(i, 0, 0)
            request = gen(10 * turn + i, [*row, turn], 3, program_id=i)
            reusable += len(row) if turn else 0
            scheduler.add(request)
            run_all(scheduler, truth)
            rows[i] = request.token_ids[:-1]
            scheduler.holds.drop(i, 0)
            scheduler.holds.hold(i, 0, rows[i])
    scheduler.check()
    return scheduler, reusable


def test_a_cycle_over_more_than_the_pool_hits_what_fits_where_lru_hits_nothing() -> None:
    lru, reusable = cycle("lru")
    next_use, _ = cycle("next-use")
    assert lru.stats.cached_tokens < 0.05 * reusable
    assert next_use.stats.cached_tokens >= 0.25 * reusable
    assert next_use.stats.retractions == lru.stats.retractions == 0


def test_a_program_that_waits_for_its_tool_is_in_nobodys_way() -> None:
    scheduler = make_scheduler(40, watermark=0)
    truth = SlotTruth()
    first = gen(0, [1] * 30, 2)
    scheduler.add(first)
    run_all(scheduler, truth)
    scheduler.holds.hold(0, 0, first.token_ids[:-1])
    scheduler.add(gen(1, [2] * 30, 2))
    run_all(scheduler, truth)
    assert scheduler.stats.retractions == 0
    assert scheduler.holds.num_given_up == 1
    scheduler.add(gen(2, first.token_ids, 2, program_id=0))  # it is computed again
    run_all(scheduler, truth)
    assert scheduler.take_rejected() == []


class CountingHeaps:
    """heapq, with a count of the entries that its calls move a level or more."""

    def __init__(self) -> None:
        self.count = 0

    def heappush(self, heap: list[Any], entry: Any) -> None:
        self.count += 1
        heapq.heappush(heap, entry)

    def heappop(self, heap: list[Any]) -> Any:
        self.count += 1
        return heapq.heappop(heap)

    def heapify(self, heap: list[Any]) -> None:
        self.count += len(heap)
        heapq.heapify(heap)


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("policy", ["lru", "next-use"])
def test_an_eviction_takes_a_number_of_heap_operations_that_does_not_grow(
    policy: str, is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is O(log n): so is the eviction."""
    per_eviction = []
    for size in (200, 6400):
        heaps = CountingHeaps()
        monkeypatch.setattr(eviction, "heapq", heaps)
        monkeypatch.setattr(reclaim_order, "heapq", heaps)
        rows = [[i] for i in range(size)]
        cache, holds = filled(rows, policy)
        for turn in range(3):  # used, so that entries go stale
            for i, row in enumerate(rows):
                node = cache.match_prefix(row).node
                cache.lock(node)
                cache.unlock(node)
                if is_live:
                    holds.begin_step(turn)
                    holds.hold(i, 0, row, i % 7)
        holds.begin_step(3)
        for _ in range(size):
            if is_live:
                assert holds.give_up_one()
            assert len(cache.evict(1)) == 1
        per_eviction.append(heaps.count / size)
    few, many = per_eviction
    assert many < 1.2 * few < 40
