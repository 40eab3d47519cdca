"""The examples in the language's docstrings are true."""

from __future__ import annotations

import doctest

import pytest

from umbel.lang import primitives, program, state


@pytest.mark.parametrize("module", [primitives, program, state])
def test_examples_in_docstrings(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
    assert doctest.testmod(module).attempted > 0  # type: ignore[arg-type]
