"""What both kinds of batch hold between a row's end and its reader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import umbel as ub
from umbel.interpreter.batch_results import BatchResults
from umbel.lang.run_result import Result
from umbel.lang.runner import BatchOptions, OnError


def result(row: int, error: BaseException | None = None) -> Result[None]:
    return Result(None, None, error, row=row, seed=0, attempt=0)


def taken(results: BatchResults, num_taken: int) -> list[int]:
    """Take all that can be taken."""
    rows: list[int] = []
    while (found := results.take(num_taken + len(rows))) is not None:
        rows.append(found.row)
    return rows


@given(
    rows=st.integers(0, 8).flatmap(lambda n: st.permutations(range(n))), is_ordered=st.booleans()
)
def test_each_result_is_taken_once_in_the_order_of_rows_or_of_ends(
    rows: list[int], is_ordered: bool
) -> None:
    results = BatchResults(BatchOptions(ordered=is_ordered))
    found: list[int] = []
    for num_ended, row in enumerate(rows, 1):
        results.add(result(row))
        assert results.num_ended == num_ended
        found += taken(results, len(found))
        if not is_ordered:
            assert found == rows[:num_ended]
        else:  # as far as no row is missing
            ended = set(rows[:num_ended])
            assert found == list(range(next(i for i in range(len(rows) + 1) if i not in ended)))
    assert results.num_ended == len(rows)


@pytest.mark.parametrize("on_error", ["raise", "collect"])
def test_the_first_failure_ends_a_batch_that_raises_and_says_its_row(on_error: OnError) -> None:
    results = BatchResults(BatchOptions(on_error=on_error))
    first = ub.BackendError("down", backend="x")
    results.check()
    for row, error in enumerate([None, first, ValueError("later")]):
        results.add(result(row, error))
    if on_error == "collect":
        results.check()
        assert taken(results, 0) == [0, 1, 2]
        return
    with pytest.raises(ub.BackendError) as raised:
        results.check()
    assert raised.value is first
    assert raised.value.__notes__ == ["in row 1 of the batch"]


def test_what_breaks_the_batch_itself_is_raised_before_any_rows_failure() -> None:
    results = BatchResults(BatchOptions(on_error="collect"))
    results.break_off(None)
    results.check()
    results.add(result(0, ValueError("a row's")))
    results.break_off(OSError("no space"))
    results.break_off(OSError("later"))
    with pytest.raises(OSError, match="no space"):
        results.check()
