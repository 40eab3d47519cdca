"""Leaves out the Triton tests where Triton is not installed, and mends its interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("triton") else ["test_triton_*.py"]


@pytest.fixture(autouse=True, scope="session")
def loops_over_loaded_bounds() -> None:
    """Let the interpreter take a loaded number as a loop's bound.

    Triton 3.6 calls int() on an array of one element, which NumPy 2.4 refuses.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("triton"):
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
