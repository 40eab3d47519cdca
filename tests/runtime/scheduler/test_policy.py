"""Each policy's order, and that none of them lets a request starve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.scheduler.slot_truth import SlotTruth, gen, make_scheduler, run_all, run_step

from umbel.lang.errors import EngineConfigError
from umbel.runtime.kv_cache import PrefixProbe
from umbel.runtime.request import Request, RequestStatus
from umbel.runtime.scheduler import POLICIES, WaitingQueue, get_policy


def order_of_admission(policy: str, requests: list[Request], warm: list[list[int]]) -> list[int]:
    """Run requests one at a time on a cache that holds `warm`."""
    scheduler, truth = make_scheduler(max_running=1, policy=policy), SlotTruth()
    for i, row in enumerate(warm):
        scheduler.add(gen(1000 + i, row, 1))
    run_all(scheduler, truth)
    for request in requests:
        scheduler.add(request)
    batches = run_all(scheduler, truth)
    return list(dict.fromkeys(s.request.request_id for b in batches for s in b.requests))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", [0, 1, 2, 3]),
        ("lpm", [2, 3, 1, 0]),  # 4, 3, 2 and no tokens of the row are cached
        ("lof", [3, 1, 2, 0]),
        ("priority", [1, 3, 0, 2]),
        ("program", [1, 2, 0, 3]),
        ("hrrn", [0, 2, 1, 3]),  # all waited equally long: the shortest first
    ],
)
def test_a_policy_orders_what_waits(policy: str, expected: list[int]) -> None:
    requests = [
        gen(0, [9, 9, 9], 2, priority=1, arrival=2, depth=0),
        gen(1, [1, 2, 9], 5, priority=3, arrival=1, depth=1),
        gen(2, [1, 2, 3, 4, 9], 4, priority=0, arrival=1, depth=2),
        gen(3, [1, 2, 3, 9], 9, priority=2, arrival=2, depth=1),
    ]
    assert order_of_admission(policy, requests, [[1, 2, 3, 4, 5]]) == expected


def test_dfs_weight_goes_into_the_subtree_that_most_wait_for_and_finishes_it() -> None:
    warm = [[1, 1, 1], [1, 1, 2], [1, 2, 1], [2, 1, 1]]
    rows = [[2, 1, 5], [1, 2, 5], [1, 1, 1, 5], [1, 1, 2, 5], [1, 1, 1, 6]]
    requests = [gen(i, row) for i, row in enumerate(rows)]
    assert order_of_admission("dfs-weight", requests, warm) == [2, 4, 3, 1, 0]


def test_random_is_a_fixed_order_that_is_not_the_order_of_arrival() -> None:
    requests = [gen(i, [i, 1]) for i in range(12)]
    order = order_of_admission("random", requests, [])
    assert sorted(order) == list(range(12)) != order
    again = [gen(i, [i, 1]) for i in reversed(range(12))]
    assert order_of_admission("random", again, []) == order


def test_branches_of_one_fork_come_together() -> None:
    gangs = ["b", "a", "b", "a"]
    requests = [gen(i, [i], arrival=0, node_id=i, gang=gang) for i, gang in enumerate(gangs)]
    assert order_of_admission("program", requests, []) == [1, 3, 0, 2]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(EngineConfigError, match=r"'fastest'.*dfs-weight, fcfs"):
        make_scheduler(policy="fastest")


def steps_until_admitted(policy: str, max_wait_steps: int, horizon: int) -> int:
    """Count steps until a request runs that every policy puts behind a steady stream of others."""
    scheduler = make_scheduler(max_running=2, policy=policy, max_wait_steps=max_wait_steps)
    truth = SlotTruth()
    loser = gen(10**6, [9, 9], 1 if policy == "lof" else 50, priority=0)
    scheduler.add(loser)
    for step in range(horizon):
        for i in (2 * step, 2 * step + 1):
            scheduler.add(gen(i, [1, 2, 3, i + 10], 4, priority=1))
        run_step(scheduler, truth)
        if loser.status is not RequestStatus.WAITING:
            return step
    return horizon


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_starves_a_request(policy: str) -> None:
    assert steps_until_admitted(policy, 20, 100) <= 20 + 4


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "lof", "priority", "program"])
def test_without_ageing_it_would_starve(policy: str) -> None:
    assert steps_until_admitted(policy, 10**9, 100) == 100


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80),
)
def test_the_queue_yields_the_least_key_of_what_is_in_it(
    policy: str, steps: list[tuple[int, int]]
) -> None:
    cached = PrefixProbe(0, None)
    queue = WaitingQueue(get_policy(policy), lambda _: cached, max_wait_steps=5)
    waiting: dict[Request, int] = {}
    for i, (action, value) in enumerate(steps):
        if action == 0:
            queue.now += 1
            queue.refresh()
        elif action == 1 and waiting:
            request = list(waiting)[value % len(waiting)]
            assert queue.remove(request) == waiting.pop(request)
        else:
            request = gen(i, [value], value + 1, priority=value, arrival=value)
            since = queue.now if value % 2 else queue.now // 2
            queue.push(request, since)
            waiting[request] = since
        assert len(queue) == len(waiting)
        assert set(queue.requests()) == set(waiting)
        assert all(queue.waited(r) == queue.now - since for r, since in waiting.items())
        head = queue.head()
        aged = [r for r, since in waiting.items() if queue.now - since >= 5]
        if aged:
            assert head is not None
            assert waiting[head] == min(waiting[r] for r in aged)
        elif not queue.policy.is_dynamic:
            keys = dict(zip(waiting, queue.policy.keys(list(waiting), queue), strict=True))
            assert head is min(keys, key=lambda r: keys[r], default=None)
        else:
            assert (head in waiting) if waiting else (head is None)


def test_the_queue_does_not_grow_with_what_left_it() -> None:
    queue = WaitingQueue(get_policy("fcfs"), lambda _: PrefixProbe(0, None), max_wait_steps=10**6)
    queue.push(gen(0, [1]))
    for i in range(1, 2000):
        request = gen(i, [1])
        queue.push(request)
        queue.remove(request)
    assert len(queue._by_key) < 100
    assert len(queue._by_age) < 100
    head = queue.head()
    assert head is not None
    assert head.request_id == 0
