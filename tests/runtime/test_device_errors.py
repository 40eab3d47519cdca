"""What an error out of a device's library means."""

from __future__ import annotations

import pytest
import torch

from umbel.lang.errors import EngineError, ProgramError
from umbel.runtime.device_errors import ends_engine, error_of, is_out_of_memory
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
