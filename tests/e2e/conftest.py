"""End-to-end tests share one grammar compiler, and leave no child process behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.engine_harness import GRAMMAR


@pytest.fixture(scope="session", autouse=True)
def _close_grammar() -> Iterator[None]:
    yield
    GRAMMAR.close()
