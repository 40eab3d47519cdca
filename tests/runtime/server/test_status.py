"""Errors as HTTP statuses."""

from __future__ import annotations

import pytest

from umbel.lang import errors
from umbel.runtime.server.status import STATUS, status_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ProgramError("x"), 400),
        (errors.UnknownNameError("x"), 400),
        (errors.ConstraintError("x"), 422),
        (errors.RequestRejectedError("x", reason="too_long"), 422),
        (errors.RequestRejectedError("x", reason="queue_full"), 429),
        (errors.UnsupportedFeatureError("x"), 501),
        (errors.EngineStoppedError("x"), 503),
        (errors.NodeTimeoutError("x"), 504),
        (errors.EngineError("x"), 500),
        (errors.UmbelError("x"), 500),
    ],
)
def test_an_error_has_the_status_of_its_nearest_class(
    error: errors.UmbelError, status: int
) -> None:
    assert status_of(error) == status


def test_every_status_in_the_table_says_that_something_failed() -> None:
    assert all(400 <= status < 600 for status in STATUS.values())
