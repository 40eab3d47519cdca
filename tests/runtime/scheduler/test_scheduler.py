"""What the scheduler promises, one behaviour at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.scheduler.slot_truth import SlotTruth, gen, make_scheduler, run_all, run_step

from umbel.lang.errors import EngineConfigError, EngineError, RequestRejectedError
from umbel.runtime.request import Request, RequestStatus
from umbel.runtime.scheduler import POLICIES, Batch
from umbel.runtime.scheduler.admission import Admission


def scheduled(batch: Batch | None) -> list[tuple[int, int, int]]:
    assert batch is not None
    return [(s.request.request_id, s.start, s.end) for s in batch.requests]


def select(request_id: int, context: list[int], parents: list[int], tokens: list[int]) -> Request:
    return Request(
        request_id=request_id,
        program_id=request_id,
        node_id=0,
        token_ids=context + tokens,
        limit=len(context) + len(tokens),
        tree_parents=parents,
        num_context=len(context),
        arrival=request_id,
    )


# ---- sharing


@given(
    rows=st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=20),
    budget=st.integers(1, 50),
    chunk=st.integers(1, 20),
    max_running=st.integers(1, 8),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_what_is_prefilled_is_the_trie_of_all_rows_and_no_token_more(
    rows: list[list[int]], budget: int, chunk: int, max_running: int, policy: str
) -> None:
    """Whatever the order and the chunks, if each row has an end of its own."""
    rows = [[*row, 100 + i] for i, row in enumerate(rows)]
    scheduler = make_scheduler(
        max_step_tokens=budget, max_chunk_tokens=chunk, max_running=max_running, policy=policy
    )
    for i, row in enumerate(rows):
        scheduler.add(gen(i, row, 3))
    run_all(scheduler, SlotTruth())
    trie = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    stats = scheduler.stats
    assert stats.tokens_prefilled == len(trie)
    assert stats.tokens_prefilled + stats.cached_tokens == sum(map(len, rows))
    assert stats.tokens_decoded == 2 * len(rows)  # the last sampled token needs no KV


def test_equal_rows_compute_their_last_token_each_and_nothing_else() -> None:
    scheduler = make_scheduler()
    for i in range(5):
        scheduler.add(gen(i, [1, 2, 3, 4], 1))
    batch = run_step(scheduler, SlotTruth())
    assert scheduled(batch) == [(0, 0, 4), *((i, 3, 4) for i in range(1, 5))]


def test_a_sibling_waits_for_the_prefill_it_would_repeat_and_blocks_nobody() -> None:
    scheduler = make_scheduler(max_chunk_tokens=4, policy="fcfs")
    truth = SlotTruth()
    trunk = list(range(10))
    for i, row in enumerate([[*trunk, 50], [*trunk, 51], [*trunk[:6], 52], [60]]):
        scheduler.add(gen(i, row, 1))
    assert scheduled(run_step(scheduler, truth)) == [(0, 0, 4), (3, 0, 1)]
    assert scheduler.num_waiting == scheduler.stats.deferred == 2
    assert scheduled(run_step(scheduler, truth)) == [(0, 4, 8), (2, 6, 7)]
    assert scheduled(run_step(scheduler, truth)) == [(0, 8, 11), (1, 10, 11)]
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_who_waits_for_a_prefill_that_leaves_takes_its_place() -> None:
    scheduler = make_scheduler(max_chunk_tokens=4, policy="fcfs")
    truth = SlotTruth()
    first, second = (gen(i, [*range(10), 50 + i], 1) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler, truth)
    scheduler.abort(first)
    assert scheduled(run_step(scheduler, truth)) == [(1, 4, 8)]


def test_who_waits_for_a_prefill_keeps_its_age() -> None:
    scheduler = make_scheduler(max_chunk_tokens=1, max_running=2, policy="lof", max_wait_steps=6)
    truth = SlotTruth()
    trunk = list(range(6))
    scheduler.add(gen(0, [*trunk, 50], 4))
    scheduler.add(gen(1, [*trunk, 51], 1))
    scheduler.add(gen(2, [9] * 30, 1))
    for _ in range(5):
        run_step(scheduler, truth)
    scheduler.add(gen(3, [8], 40))  # what the policy prefers
    assert scheduler.num_waiting == 2
    while scheduler.num_waiting == 2:
        run_step(scheduler, truth)
    assert [r.request_id for r in scheduler._queue.requests()] == [3]


def test_a_prefill_takes_what_another_request_has_computed_of_its_rest() -> None:
    scheduler = make_scheduler(max_chunk_tokens=4, policy="fcfs")
    truth = SlotTruth()
    scheduler.add(gen(0, [1, 2, 3, 4, 5, 6], 1))
    scheduler.add(gen(1, [1, 2, 3, 4, 5], 1))  # all but its last row, which it computes itself
    assert scheduled(run_step(scheduler, truth)) == [(0, 0, 4), (1, 4, 5)]
    assert scheduled(run_step(scheduler, truth)) == [(0, 5, 6)]
    assert truth.num_rows == 6


def test_where_two_prefills_meet_one_computes_for_both() -> None:
    scheduler = make_scheduler(max_chunk_tokens=2, policy="fcfs")
    truth = SlotTruth()
    trunk = list(range(1, 10))
    scheduler.add(gen(0, [*trunk, 50], 1))
    scheduler.add(gen(1, trunk[:3], 1))  # its last row lets the third overtake the first
    scheduler.add(gen(2, [*trunk, 52], 1))
    assert scheduled(run_step(scheduler, truth)) == [(0, 0, 2), (1, 2, 3), (2, 3, 5)]
    assert scheduled(run_step(scheduler, truth)) == [(2, 5, 7)]
    run_all(scheduler, truth)
    assert truth.num_rows == scheduler.stats.tokens_prefilled == 9 + 2


def test_who_waits_is_woken_when_the_shared_row_came_from_elsewhere() -> None:
    scheduler = make_scheduler(max_chunk_tokens=3, policy="fcfs")
    truth = SlotTruth()
    scheduler.add(gen(0, [1, 2, 3, 4], 50))
    scheduler.add(gen(1, [1, 2, 3, 4, 5], 1))
    scheduler.add(gen(2, [1, 2, 3, 4], 1))  # registers the last row before the first does
    assert scheduled(run_step(scheduler, truth)) == [(0, 0, 3), (2, 3, 4)]
    assert scheduled(run_step(scheduler, truth)) == [(0, 3, 4), (1, 4, 5)]


def test_rows_appended_while_a_request_runs_are_its_own_until_it_ends() -> None:
    scheduler = make_scheduler()
    truth = SlotTruth()
    scheduler.add(gen(0, [1, 2, 3], 5))
    run_all(scheduler, truth)
    forced = gen(1, [1, 2, 3], 9)
    scheduler.add(forced)
    run_step(scheduler, truth)
    forced.token_ids += [7, 7, 9]  # a grammar jumps ahead
    batch = run_step(scheduler, truth)
    assert scheduled(batch) == [(1, 3, 7)]
    assert batch is not None
    assert batch.num_decodes == 0
    scheduler.finish(forced)
    assert scheduler.cache.match_prefix([1, 2, 3, 7, 7, 7, 9]).num_tokens == 7
    scheduler.check()


def test_generated_rows_are_found_by_the_request_that_continues_them() -> None:
    scheduler = make_scheduler()
    truth = SlotTruth()
    request = gen(0, [1, 2, 3], 4)
    scheduler.add(request)
    run_all(scheduler, truth)
    after = gen(1, [*request.token_ids, 30, 31], 1)
    scheduler.add(after)
    batch = run_step(scheduler, truth)
    assert scheduled(batch) == [(1, 6, 9)]  # its last token's KV and the literal in one go
    assert after.num_cached == 6


def test_only_the_rows_that_are_kept_stay() -> None:
    scheduler = make_scheduler()
    truth = SlotTruth()
    request = gen(0, [1, 2, 3], 9)
    scheduler.add(request)
    for _ in range(6):
        run_step(scheduler, truth)
    scheduler.finish(request, [3, 4])  # a stop rolled three tokens back
    assert scheduler.cache.match_prefix([1, 2, 3, 7, 7, 7, 7]).num_tokens == 5
    assert scheduler.cache.total == 5 == scheduler.allocator.num_slots - scheduler.num_free
    scheduler.check()


def test_a_selects_winner_stays_and_its_losers_go_whatever_the_budget() -> None:
    for budget in (1, 2, 3, 64):
        scheduler = make_scheduler(max_step_tokens=budget)
        truth = SlotTruth()
        request = select(0, [1, 2, 3], [2, 3, 2, 5], [10, 11, 20, 21])
        scheduler.add(request)
        while request.num_pending:
            batch = scheduler.schedule()
            assert batch is not None
            truth.forward(batch)
            scheduler.complete(batch)
            assert batch.num_decodes == 0
        assert scheduler.stats.tree_tokens == 4
        assert scheduler.stats.tokens_prefilled == 3
        scheduler.finish(request, [5, 6])
        assert scheduler.cache.match_prefix([1, 2, 3, 20, 21]).num_tokens == 5
        assert scheduler.cache.total == 5
        scheduler.check()
        scheduler.add(gen(1, [1, 2, 3, 20, 21, 4], 1))
        assert scheduled(run_step(scheduler, truth)) == [(1, 5, 6)]


def test_a_selects_last_context_row_is_computed_though_it_is_cached() -> None:
    scheduler = make_scheduler()
    truth = SlotTruth()
    scheduler.add(gen(0, [1, 2, 3], 1))
    run_all(scheduler, truth)
    request = select(1, [1, 2, 3], [2, 2], [10, 20])
    scheduler.add(request)
    batch = scheduler.schedule()
    assert scheduled(batch) == [(1, 2, 5)]
    assert batch is not None
    truth.forward(batch)
    scheduler.complete(batch)
    scheduler.finish(request, [4])
    assert scheduler.cache.match_prefix([1, 2, 3, 20]).num_tokens == 4
    assert scheduler.cache.total == 4
    scheduler.check()


def test_rows_kept_out_of_order_are_refused() -> None:
    scheduler = make_scheduler()
    request = select(0, [1, 2, 3], [2, 3, 2], [10, 11, 20])
    scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.complete(batch)
    with pytest.raises(AssertionError, match="row 5 is kept without the row before it"):
        scheduler.finish(request, [3, 5])


def test_without_the_cache_every_row_is_computed_and_nothing_stays() -> None:
    scheduler = make_scheduler(cache_enabled=False)
    truth = SlotTruth()
    for i in range(3):
        scheduler.add(gen(i, [1, 2, 3, i], 2))
    run_all(scheduler, truth)
    assert (scheduler.stats.tokens_prefilled, scheduler.stats.cached_tokens) == (12, 0)
    assert scheduler.num_free == scheduler.allocator.num_slots
    assert scheduler.cache.num_nodes == 0


# ---- the step


def test_decodes_come_first_and_take_turns_when_the_budget_is_short() -> None:
    scheduler = make_scheduler(max_step_tokens=3, policy="fcfs")
    truth = SlotTruth()
    requests = [gen(i, [i], 30) for i in range(5)]
    for request in requests:
        scheduler.add(request)
    for _ in range(2):  # all start, as those of the first step have no token to go on with yet
        batch = scheduler.schedule()
        assert batch is not None
        truth.forward(batch)
        scheduler.complete(batch)
    for request in requests:
        request.token_ids.append(7)
    seen: list[int] = []
    for _ in range(10):
        batch = run_step(scheduler, truth)
        assert batch is not None
        assert batch.num_decodes == batch.num_tokens == 3
        seen += [s.request.request_id for s in batch.requests]
    assert [seen.count(i) for i in range(5)] == [6] * 5


def test_a_running_request_without_a_pending_row_is_left_alone() -> None:
    scheduler = make_scheduler()
    request = gen(0, [1, 2], 5)
    scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.complete(batch)
    assert scheduler.schedule() is None  # a mask is still being computed
    request.token_ids += [3, 4]
    batch = scheduler.schedule()
    assert scheduled(batch) == [(0, 2, 4)]
    assert scheduler.num_running == 1


def test_a_request_that_does_not_fit_beside_the_others_blocks_those_behind_it() -> None:
    scheduler = make_scheduler(20, policy="fcfs", watermark=0)
    truth = SlotTruth()
    scheduler.add(gen(0, list(range(10)), 6))
    scheduler.add(gen(1, list(range(20, 35)), 1))
    scheduler.add(gen(2, [50], 1))
    batches = run_all(scheduler, truth)
    admitted = [s.request.request_id for b in batches for s in b.requests if s.start == 0]
    assert admitted == [0, 1, 2]
    assert scheduler.stats.retractions == 0


# ---- pressure


def test_what_can_never_fit_is_rejected_when_it_is_added() -> None:
    scheduler = make_scheduler(8)
    scheduler.add(gen(0, [1] * 4, 5))
    with pytest.raises(RequestRejectedError, match="KV for 9 tokens; the pool holds 8") as caught:
        scheduler.add(gen(1, [1] * 4, 6))
    assert caught.value.reason == "cannot_fit"
    with pytest.raises(RequestRejectedError):
        scheduler.add(select(2, [1] * 4, [3] * 5, [1] * 5))
    assert scheduler.num_waiting == 1


def test_what_pinned_prefixes_leave_no_room_for_is_handed_back_and_the_next_one_runs() -> None:
    scheduler = make_scheduler(8, policy="fcfs")
    truth = SlotTruth()
    scheduler.add(gen(0, [1, 2, 3, 4, 5], 1))
    run_all(scheduler, truth)
    pin = scheduler.cache.match_prefix([1, 2, 3, 4, 5]).node
    scheduler.cache.lock(pin)
    big, small = gen(1, [9] * 4, 1), gen(2, [8, 8], 1)
    scheduler.add(big)
    scheduler.add(small)
    batch = scheduler.schedule()
    assert scheduled(batch) == [(2, 0, 2)]
    ((rejected, error),) = scheduler.take_rejected()
    assert rejected is big
    assert (error.reason, big.status) == ("cannot_fit", RequestStatus.FINISHED)
    assert scheduler.take_rejected() == []
    scheduler.check([pin])


def test_a_retracted_request_keeps_its_tokens_and_finds_its_rows_again() -> None:
    scheduler = make_scheduler()
    truth = SlotTruth()
    request = gen(0, [1, 2, 3], 6)
    scheduler.add(request)
    for _ in range(3):
        run_step(scheduler, truth)
    assert request.token_ids == [1, 2, 3, 7, 7, 7]
    scheduler.retract(request)
    scheduler.check()
    assert scheduler.cache.num_protected == 0
    assert scheduled(run_step(scheduler, truth)) == [(0, 5, 6)]
    run_all(scheduler, truth)
    assert len(request.token_ids) == 9
    assert truth.num_rows == 8  # none was computed twice
    assert request.num_retractions == scheduler.stats.retractions == 1


def test_resumed_requests_share_what_they_had_sampled() -> None:
    scheduler = make_scheduler()
    truth = SlotTruth()
    requests = [gen(i, [1, 2], 9) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    for _ in range(3):
        run_step(scheduler, truth)
    for request in requests:
        scheduler.retract(request)
    scheduler.reset_cache()
    assert scheduled(run_step(scheduler, truth)) == [(0, 0, 5), (1, 4, 5)]


def test_rows_are_as_recent_as_the_end_of_their_request() -> None:
    scheduler = make_scheduler()
    truth = SlotTruth()
    long, short = gen(0, [1, 2], 6), gen(1, [8, 9], 3)
    scheduler.add(long)
    scheduler.add(short)
    run_all(scheduler, truth)
    scheduler.cache.evict(4)
    assert scheduler.cache.match_prefix(short.token_ids).num_tokens == 0
    assert scheduler.cache.match_prefix(long.token_ids).num_tokens == 7


def test_admission_learns_from_retractions() -> None:
    retractions = []
    for most in (Admission.MAX_OUTPUT_RATIO, Admission.MIN_OUTPUT_RATIO):
        scheduler = make_scheduler(120, watermark=0, max_running=16)
        scheduler._admission.MAX_OUTPUT_RATIO = most
        for i in range(40):
            scheduler.add(gen(i, [i] * 4, 40))
        run_all(scheduler, SlotTruth())
        retractions.append(scheduler.stats.retractions)
    assert 0 < 2 * retractions[0] < retractions[1]


def test_admission_forgets_retractions() -> None:
    scheduler = make_scheduler(450, watermark=0)
    truth = SlotTruth()
    scheduler.add(gen(0, [1], 400))
    run_step(scheduler, truth)
    for _ in range(8):
        scheduler.retract(next(iter(scheduler._running.values())))
        run_step(scheduler, truth)
    scheduler.add(gen(1, [2], 120))
    waited = 0
    while scheduler.num_waiting:
        waited += 1
        run_step(scheduler, truth)
    assert scheduler.num_running == 2
    assert 1 < waited < 60, "at first it counts on all that may be generated, later on less"


def test_a_prefill_that_pins_have_cut_off_is_handed_back() -> None:
    scheduler = make_scheduler(12, max_chunk_tokens=4, watermark=0)
    truth = SlotTruth()
    scheduler.add(gen(0, [1, 2, 3, 4, 5], 1))
    run_all(scheduler, truth)
    request = gen(1, [9] * 10, 1)
    scheduler.add(request)
    run_step(scheduler, truth)
    pin = scheduler.cache.match_prefix([1, 2, 3, 4, 5]).node
    scheduler.cache.lock(pin)
    assert scheduled(run_step(scheduler, truth, [pin])) == [(1, 4, 7)]
    assert scheduler.schedule() is None
    ((rejected, _),) = scheduler.take_rejected()
    assert rejected is request
    scheduler.check([pin])


def test_running_prefills_go_on_in_the_order_of_the_policy() -> None:
    scheduler = make_scheduler(max_step_tokens=3, max_chunk_tokens=2, policy="priority")
    truth = SlotTruth()
    scheduler.add(gen(0, [1] * 8, 1, priority=0))
    run_step(scheduler, truth)
    scheduler.add(gen(1, [2] * 8, 1, priority=1))
    assert scheduled(run_step(scheduler, truth)) == [(0, 2, 4), (1, 0, 1)]
    assert scheduled(run_step(scheduler, truth)) == [(1, 1, 3), (0, 4, 5)]


def test_under_pressure_the_last_program_makes_way_and_the_first_never_does() -> None:
    scheduler = make_scheduler(40, watermark=0, max_running=8)
    truth = SlotTruth()
    requests = [gen(i, [i, i, i], 30, arrival=i // 2) for i in range(8)]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler, truth)
    assert scheduler.stats.retractions > 0
    assert requests[0].num_retractions == 0
    assert all(r.token_ids == [i] * 3 + [7] * 30 for i, r in enumerate(requests))


def test_priority_makes_running_requests_give_way_and_ageing_does_not() -> None:
    scheduler = make_scheduler(64, max_running=2, policy="priority")
    truth = SlotTruth()
    low = [gen(i, [i, i], 20, priority=0) for i in range(2)]
    high = gen(2, [9, 9], 3, priority=1)
    for request in low:
        scheduler.add(request)
    run_step(scheduler, truth)
    scheduler.add(high)
    batch = run_step(scheduler, truth)
    assert [r.status for r in low] == [RequestStatus.RUNNING, RequestStatus.WAITING]
    assert scheduled(batch) == [(0, 2, 3), (2, 0, 2)]
    scheduler.add(gen(3, [8, 8], 3, priority=0))
    run_all(scheduler, truth)
    assert scheduler.stats.retractions == 1


# ---- failure and the end


def test_a_failed_step_leaves_nothing_and_its_requests_run_again() -> None:
    scheduler = make_scheduler(policy="fcfs")
    truth = SlotTruth()
    decoding = gen(0, [1, 2, 3], 5)
    scheduler.add(decoding)
    run_step(scheduler, truth)
    used = scheduler.allocator.num_slots - scheduler.num_free
    siblings = [gen(i, [1, 2, 9, 9, i], 2) for i in (1, 2)]
    for request in siblings:
        scheduler.add(request)
    batch = scheduler.schedule()
    assert scheduled(batch) == [(0, 3, 4), (1, 2, 5), (2, 4, 5)]
    assert batch is not None
    scheduler.fail(batch)
    scheduler.check()
    assert scheduler.allocator.num_slots - scheduler.num_free == used
    assert scheduler.cache.match_prefix([1, 2, 9, 9]).num_tokens == 2
    assert (decoding.num_computed, decoding.status) == (3, RequestStatus.RUNNING)
    assert all(r.status is RequestStatus.WAITING for r in siblings)
    assert scheduled(run_step(scheduler, truth)) == [(0, 3, 4), (1, 2, 5), (2, 4, 5)]
    run_all(scheduler, truth)
    assert scheduler.stats.failed_steps == 1


def test_a_request_can_be_aborted_while_its_step_runs_and_what_it_registered_is_kept() -> None:
    scheduler = make_scheduler()
    first, second = (gen(i, [1, 2, 3, 10 + i], 2) for i in range(2))
    scheduler.add(first)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.abort(first)
    scheduler.check()
    scheduler.complete(batch)
    scheduler.check()
    assert first.num_computed == 0
    assert second.num_computed == 4
    assert scheduler.cache.match_prefix([1, 2, 3, 10]).num_tokens == 4


def test_the_cache_is_reset_only_when_nothing_runs() -> None:
    scheduler = make_scheduler()
    truth = SlotTruth()
    scheduler.add(gen(0, [1, 2, 3], 2))
    run_step(scheduler, truth)
    with pytest.raises(EngineError, match="1 requests running"):
        scheduler.reset_cache()
    run_all(scheduler, truth)
    assert scheduler.reset_cache() == 4
    assert scheduler.num_free == scheduler.allocator.num_slots


@pytest.mark.parametrize(
    "options",
    [
        {"max_step_tokens": 0},
        {"max_running": 0},
        {"max_chunk_tokens": 0},
        {"max_wait_steps": 0},
        {"watermark": 1.0},
        {"watermark": -0.1},
    ],
)
def test_a_bound_out_of_range_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(EngineConfigError, match=next(iter(options))):
        make_scheduler(**options)


def test_memory_is_flat_over_many_short_requests() -> None:
    scheduler = make_scheduler(256)
    truth = SlotTruth()
    rng = random.Random(0)
    for i in range(600):
        request = gen(i, [rng.randrange(50) for _ in range(4)], 2, namespace=str(i % 150))
        scheduler.add(request)
        if i % 3 == 0:
            scheduler.abort(request)
        run_step(scheduler, truth)
    run_all(scheduler, truth)
    assert len(scheduler.cache._roots) <= scheduler.cache.num_nodes <= 256
    assert len(scheduler._queue._by_key) + len(scheduler._queue._by_age) < 200
    assert not scheduler._lives.keys
    assert not scheduler._frontiers._keys
