"""What an error out of a device's library means."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from umbel.lang.errors import EngineError, ProgramError
from umbel.runtime.device_errors import (
    ends_engine,
    error_of,
    free_cached_memory,
    is_out_of_memory,
)
from umbel.runtime.watchdog import StepAbandonedError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_a_shortage_of_memory_is_told_from_other_errors(
    error: BaseException, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), True),
        (SystemExit(), True),
        (StepAbandonedError(), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("x"), False),
        (BaseException("a panic in a native library"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_what_no_request_may_fail_with_is_told_from_other_errors(
    error: BaseException, expected: bool
) -> None:
    assert ends_engine(error) is expected


def test_an_error_of_the_tree_stays_and_any_other_becomes_the_cause_of_one() -> None:
    ours = ProgramError("mine")
    assert error_of("sampling", ours) is ours
    cause = ZeroDivisionError("bad")
    error = error_of("sampling", cause)
    assert isinstance(error, EngineError)
    assert str(error) == "sampling failed: ZeroDivisionError: bad"
    assert error.__cause__ is cause


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps such memory")
def test_memory_that_was_freed_goes_back_to_the_system() -> None:
    blocks = [np.ones(8_000) for _ in range(4_000)]  # 256 MB, each too small for a map of its own
    last = blocks.pop()  # keeps what lies below it from going back by itself
    del blocks
    before = _resident_bytes()
    free_cached_memory()
    assert before - _resident_bytes() > 100_000_000
    assert last.all()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
