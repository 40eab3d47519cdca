"""Batches: order, laziness, errors by row, limits, and what they leave behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall
from umbel.interpreter.graph_run import GraphRun
from umbel.lang.graph import GraphNode
from umbel.lang.ir import Text
from umbel.lang.results import RunOptions

from .conftest import MakeBackend
from .square_programs import areader, reader, run


@ub.function
def square(s: ub.State, x: int) -> int:
    s += f"{x} squared is " + ub.gen("y", schema=int)
    return x


PROGRAMS = [square, reader, areader]


def answer(call: ScriptedCall) -> Reply:
    """Answer later rows sooner, so that order has to be made."""
    x = int(call.prompt.split()[0])
    if x < 0:
        raise ValueError(f"{x} is negative")
    return Reply(text=str(x * x), latency=0.0 if x % 3 else 0.01)


WAYS = pytest.mark.parametrize("way", ["sync", "async"])
EACH = pytest.mark.parametrize("program", PROGRAMS, ids=["no reads", "reads", "async"])


@WAYS
@EACH
@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"X": 1}, "has no parameter 'X': it takes x"),
        ({"x": 1, "xs": 1}, "has no parameter 'xs': did you mean 'x'?"),
        ({}, "can't be called so: missing a required argument: 'x'"),
        ((1, 2), "can't be called so: too many positional arguments"),
    ],
)
def test_a_row_that_does_not_fit_the_parameters_says_which_and_what_they_are(
    scripted: MakeBackend, way: str, program: Any, row: Any, told: str
) -> None:
    scripted(answer)
    with pytest.raises(TypeError) as caught:
        run(way, program, [{"x": 1}, row])
    assert str(caught.value) == (
        f"row 1 of the batch: {program.__name__} {told} (its parameters: x)"
    )


def test_a_type_error_of_the_body_is_its_own(scripted: MakeBackend) -> None:
    scripted(answer)

    @ub.function
    def program(s: ub.State, x: Any) -> None:
        len(x)

    with pytest.raises(TypeError, match=r"object of type 'int' has no len\(\)"):
        program.run_batch([1], progress=False)


@WAYS
@EACH
def test_results_come_in_the_order_of_the_rows(
    scripted: MakeBackend, way: str, program: Any
) -> None:
    scripted(answer)
    results = run(way, program, [{"x": x} for x in range(50)])
    assert [r["y"] for r in results] == [x * x for x in range(50)]
    assert [r.row for r in results] == list(range(50))


@WAYS
@EACH
def test_unordered_results_say_which_row_they_are(
    scripted: MakeBackend, way: str, program: Any
) -> None:
    scripted(answer)
    results = run(way, program, range(30), ordered=False)
    assert sorted((r.row, r["y"]) for r in results) == [(x, x * x) for x in range(30)]
    assert [r.row for r in results] != list(range(30))


@WAYS
@EACH
def test_errors_can_be_collected_by_row(scripted: MakeBackend, way: str, program: Any) -> None:
    scripted(answer)
    results = run(way, program, [1, -1, 2, -2, 3], on_error="collect")
    assert [r.error is None for r in results] == [True, False, True, False, True]
    assert [r["y"] for r in results if r.error is None] == [1, 4, 9]
    assert "-1 is negative" in str(results[1].error)
    with pytest.raises(ub.GenerationError, match="-1 is negative"):
        _ = results[1].value


@WAYS
@EACH
def test_the_first_failure_is_raised_with_its_row(
    scripted: MakeBackend, way: str, program: Any
) -> None:
    scripted(lambda call: answer(call) if "-" in call.prompt else Reply(stalls=True))
    with pytest.raises(ub.GenerationError, match="-5 is negative") as caught:
        run(way, program, [1, 2, -5, 3])
    assert caught.value.__notes__ == ["in row 2 of the batch"]


@WAYS
def test_rows_are_mappings_tuples_or_single_arguments(scripted: MakeBackend, way: str) -> None:
    scripted()

    @ub.function
    def program(s: ub.State, a: Any, b: int = 0) -> tuple[Any, int]:
        return a, b

    results = run(way, program, [{"a": 1, "b": 2}, (3, 4), "text", 5])
    assert [r.value for r in results] == [(1, 2), (3, 4), ("text", 0), (5, 0)]
    assert run(way, program, []) == []


@WAYS
@EACH
def test_generators_are_pulled_as_there_is_room(
    scripted: MakeBackend, way: str, program: Any
) -> None:
    num_pulled = num_ended = most = 0

    def count(call: ScriptedCall) -> Reply:
        return Reply(text="1", latency=0.002)

    def rows() -> Iterator[int]:
        nonlocal num_pulled, most
        for x in range(40):
            num_pulled += 1
            most = max(most, num_pulled - num_ended)
            yield x

    scripted(count)
    if way == "sync":
        for _ in program.iter_batch(rows(), max_in_flight=4):
            num_ended += 1
    else:

        async def follow() -> None:
            nonlocal num_ended
            async for _ in program.aiter_batch(rows(), max_in_flight=4):
                num_ended += 1

        asyncio.run(follow())
    assert num_ended == num_pulled == 40
    # four in flight, those that ended and were not taken yet, and the one being pulled
    assert most <= 2 * 4 + 1


def test_an_endless_generator_can_be_left(scripted: MakeBackend) -> None:
    scripted(answer)

    def forever() -> Iterator[int]:
        x = 1
        while True:
            yield x
            x += 1

    before = threading.active_count()
    results = square.iter_batch(forever(), max_in_flight=8)
    assert [next(results)["y"] for _ in range(20)] == [x * x for x in range(1, 21)]
    results.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 2
    while threading.active_count() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 1  # the backend's own


@WAYS
def test_an_error_of_the_generator_is_raised_as_it_is(scripted: MakeBackend, way: str) -> None:
    scripted(answer)

    def rows() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        run(way, square, rows())


@WAYS
@EACH
def test_rule_3_each_run_of_a_batch_has_its_timeout(
    scripted: MakeBackend, way: str, program: Any
) -> None:
    scripted(lambda call: Reply(text="1", stalls="7 " in call.prompt))
    results = run(way, program.options(timeout=0.1), range(10), on_error="collect")
    assert [r.row for r in results if r.error is not None] == [7]
    assert isinstance(results[7].error.__cause__, ub.NodeTimeoutError)


def test_rule_5_bodies_that_wait_elsewhere_do_not_hold_up_the_rest(scripted: MakeBackend) -> None:
    scripted()
    side_by_side = threading.Barrier(4)

    @ub.function
    def program(s: ub.State, x: int) -> None:
        side_by_side.wait(10)  # a tool call

    assert len(program.run_batch(range(32))) == 32


def test_rule_16_a_batch_has_one_seed_and_rows_differ(scripted: MakeBackend) -> None:
    seeds = []

    def remember(call: ScriptedCall) -> str:
        seeds.append((call.seed, call.row))
        return "1"

    scripted(remember)
    square.options(seed=9).run_batch([1, 2, 3])
    assert sorted(seeds) == [(9, 0), (9, 1), (9, 2)]
    results = square.run_batch([1, 2])
    assert results[0].seed == results[1].seed


@pytest.mark.parametrize(("options", "says"), [({"max_in_flight": 0}, "max_in_flight")])
def test_limits_without_meaning_are_refused(
    scripted: MakeBackend, options: dict[str, Any], says: str
) -> None:
    scripted()
    with pytest.raises(ValueError, match=says):
        square.run_batch([1], **options)
    with pytest.raises(ValueError, match="on_error"):
        square.run_batch([1], on_error="ignore")  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match="max_def_threads"),
        ub.use_backend(scripted(), max_def_threads=0),
    ):
        pass


def test_a_progress_bar_is_shown_when_it_is_wanted(
    scripted: MakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(answer)
    square.run_batch([1, 2], progress=True)
    assert "2/2" in capsys.readouterr().err
    square.run_batch([1, 2])
    assert capsys.readouterr().err == ""


def test_an_interrupt_cancels_the_batch(scripted: MakeBackend) -> None:
    scripted(lambda call: Reply(stalls=True))

    def rows() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reader.run_batch(rows())


def test_a_batch_inside_a_program_runs(scripted: MakeBackend) -> None:
    scripted(answer)

    @ub.function
    def outer(s: ub.State, x: int) -> list[int]:
        return [r["y"] for r in square.run_batch([x, x + 1])]

    assert [r.value for r in outer.run_batch([1, 2])] == [[1, 4], [4, 9]]


@WAYS
@EACH
def test_only_retryable_errors_are_tried_again(
    scripted: MakeBackend, way: str, program: Any
) -> None:
    tries: dict[str, int] = {}

    def flaky(call: ScriptedCall) -> Reply:
        x = call.prompt.split()[0]
        tries[x] = tries.get(x, 0) + 1
        if x == "1":
            raise ub.BackendStatusError("wrong key", status_code=401)
        if x == "2" or tries[x] == 1:
            raise ub.BackendConnectionError("dropped", retryable=True)
        return Reply(text="7")

    scripted(flaky)
    started = time.monotonic()
    results = run(way, program, range(4), on_error="collect", retries=2, backoff=0.02)
    assert tries == {"0": 2, "1": 1, "2": 3, "3": 2}
    assert [r.row for r in results if r.error is None] == [0, 3]
    assert [r["y"] for r in results if r.error is None] == [7, 7]
    assert time.monotonic() - started >= 0.02 + 0.04


def test_rule_3_a_body_that_outlives_its_timeout_reads_errors(scripted: MakeBackend) -> None:
    scripted({"a": Reply(stalls=True), "b": "fast"})
    seen = []

    @ub.function
    def program(s: ub.State) -> None:
        branch = s.copy()
        s += ub.gen("a")
        with pytest.raises(ub.GenerationError):
            s["a"]
        time.sleep(0.05)  # in its own Python while the caller waits
        branch += ub.gen("b")
        with pytest.raises(ub.GenerationError, match="timeout") as caught:
            branch["b"]
        seen.append(caught.value.__cause__)

    results = program.options(timeout=0.05).run_batch([()], on_error="collect")
    assert results[0].error is None
    assert isinstance(seen[0], ub.NodeTimeoutError)


@WAYS
@EACH
def test_a_kept_result_costs_the_garbage_collector_two_objects(
    scripted: MakeBackend, way: str, program: Any
) -> None:
    with ub.use_backend(scripted(answer), max_def_threads=2):
        run(way, program, range(50))  # threads, and what else is made once
        gc.collect()
        before = len(gc.get_objects())
        kept = run(way, program, range(500))
        gc.collect()
        num_more = len(gc.get_objects()) - before
    assert len(kept) == 500
    assert num_more <= 2 * 500 + 100, "the result and its state; all else is left out"


@WAYS
@EACH
def test_a_result_can_be_read_in_every_way_and_not_appended_to(
    scripted: MakeBackend, way: str, program: Any
) -> None:
    scripted(answer)
    good, bad = run(way, program, [3, -1], on_error="collect")
    assert (good.text(), good["y"], good.meta("y").finish_reason) == ("3 squared is 9", 9, "stop")
    assert good.names() == ["y"]
    with pytest.raises(ub.ProgramError, match="the run has ended"):
        good.state += "more"
    with pytest.raises(ub.ProgramError, match="the run has ended"):
        good.state.fork(2)
    good.state.cancel()
    assert good["y"] == 9
    assert asyncio.run(good.state.get("y")) == 9
    for _ in range(2):
        with pytest.raises(ub.GenerationError, match="-1 is negative") as caught:
            _ = bad["y"]
        assert caught.value.address == "1"
        assert isinstance(caught.value.__cause__, ub.BackendError)


def test_what_a_body_appends_while_its_run_is_aborted_reads_as_cancelled() -> None:
    with ScriptedBackend() as backend:
        graph_run = GraphRun(backend, RunOptions())
        graph_run.add(Text(("a",)), "0", None)
        graph_run.abort()
        graph_run.nodes.append(GraphNode(1, "1", Text(("b",)), 0))  # as if add had come too far
        ended = graph_run.ended()
    assert ended.failure(0) is not None
    with pytest.raises(ub.GenerationError, match="1 failed: CancelledError: 1: the run was cancel"):
        ended.result(1)
