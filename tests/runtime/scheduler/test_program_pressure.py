"""Programs under pressure: siblings start together, whole programs make way, all of them end."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.scheduler.slot_truth import SlotTruth, gen, make_scheduler, run_all, run_step

from umbel.runtime.request import Request
from umbel.runtime.scheduler import Scheduler
from umbel.runtime.scheduler.admission import Admission


def gang(program: int, num: int, size: int, num_new: int, first_id: int) -> list[Request]:
    return [
        gen(
            first_id + i,
            [100 * program + i] * size,
            num_new,
            program_id=program,
            arrival=program,
            node_id=i,
            gang=f"{program}:fork",
        )
        for i in range(num)
    ]


def started(scheduler: Scheduler, truth: SlotTruth) -> set[int]:
    batch = run_step(scheduler, truth)
    return set() if batch is None else {s.request.request_id for s in batch.requests if not s.start}


def add(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    for request in requests:
        scheduler.add(request)


def test_siblings_wait_for_each_other_where_they_will_fit() -> None:
    scheduler, truth = make_scheduler(40, watermark=0), SlotTruth()
    add(scheduler, [gen(0, [1] * 20, 6, program_id=0, arrival=0)])
    assert started(scheduler, truth) == {0}
    add(scheduler, gang(1, 3, 8, 1, 1))
    for _ in range(5):
        assert started(scheduler, truth) == set()
    assert scheduler.num_running == 0  # the first has made room
    assert started(scheduler, truth) == {1, 2, 3}


def test_siblings_wait_for_a_while_and_then_start_one_by_one() -> None:
    scheduler, truth = make_scheduler(60, watermark=0), SlotTruth()
    add(scheduler, [gen(0, [1] * 10, 40, program_id=0, arrival=0)])
    run_step(scheduler, truth)
    add(scheduler, gang(1, 5, 10, 1, 1))
    waited = 0
    while not started(scheduler, truth):
        waited += 1
    assert waited == Admission.GANG_PATIENCE


def test_siblings_that_can_never_start_together_do_not_wait() -> None:
    scheduler, truth = make_scheduler(40, watermark=0), SlotTruth()
    add(scheduler, [gen(0, [1] * 10, 5, program_id=0, arrival=0)])
    run_step(scheduler, truth)
    add(scheduler, gang(1, 6, 9, 1, 1))
    assert len(started(scheduler, truth)) == 3


def test_pressure_takes_back_all_that_the_last_program_runs_and_holds() -> None:
    scheduler, truth = make_scheduler(40, watermark=0), SlotTruth()
    scheduler._admission.MAX_OUTPUT_RATIO = scheduler._admission.MIN_OUTPUT_RATIO
    first = gen(0, [1] * 4, 25, program_id=0, arrival=0)
    add(scheduler, [first, *gang(1, 2, 4, 12, 1)])
    while not scheduler.stats.retractions:
        run_step(scheduler, truth)
        if scheduler.num_running == 3 and not scheduler.holds._programs:
            scheduler.holds.hold(1, 0, [100] * 4)
    assert scheduler.stats.program_retractions == 1
    assert scheduler.stats.retractions == 2
    assert not scheduler.holds._programs
    run_all(scheduler, truth)
    assert first.num_retractions == 0


@given(
    programs=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=6
    ),
    num_slots=st.integers(48, 90),
    page_size=st.sampled_from([1, 16]),
    max_running=st.integers(1, 8),
)
def test_no_two_programs_take_the_pool_from_each_other_for_ever(
    programs: list[tuple[int, int, int]], num_slots: int, page_size: int, max_running: int
) -> None:
    """The one that came first never makes way for another: it ends, and then the next one."""
    scheduler = make_scheduler(num_slots, page_size=page_size, watermark=0, max_running=max_running)
    requests: list[Request] = []
    for program, (num, size, num_new) in enumerate(programs):
        requests += gang(program, num, size, num_new, len(requests))
    add(scheduler, requests)
    run_all(scheduler, SlotTruth(), max_steps=40 * sum(r.limit for r in requests))
    assert all(len(r.token_ids) == r.limit for r in requests)


def test_siblings_that_no_join_waits_for_start_one_by_one() -> None:
    scheduler, truth = make_scheduler(40, watermark=0), SlotTruth()
    add(scheduler, [gen(0, [1] * 20, 6, program_id=0, arrival=0)])
    assert started(scheduler, truth) == {0}
    siblings = gang(1, 3, 8, 1, 1)
    for sibling in siblings:
        sibling.starts_together = False
    add(scheduler, siblings)
    assert started(scheduler, truth) == {1, 2}, "as many as there is room for"


def test_of_a_fork_those_start_together_that_a_join_waits_for() -> None:
    scheduler, truth = make_scheduler(40, watermark=0), SlotTruth()
    add(scheduler, [gen(0, [1] * 20, 6, program_id=0, arrival=0)])
    assert started(scheduler, truth) == {0}
    siblings = gang(1, 3, 8, 1, 1)
    siblings[0].starts_together = False
    add(scheduler, siblings)
    assert started(scheduler, truth) == {1}, "it is of use without the others"
    while not (later := started(scheduler, truth)):
        assert scheduler.num_running
    assert later == {2, 3}
