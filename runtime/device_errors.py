"""What an error out of a device's library means: a shortage, the end of everything, or neither.

Knows errors; nothing of what met them.
"""

from __future__ import annotations

import ctypes

import torch

from umbel.lang.errors import EngineError, UmbelError

from .watchdog import StepAbandonedError

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether something failed for want of memory, so that a smaller part of it may succeed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in _MEMORY_WORDS)


def ends_engine(error: BaseException) -> bool:
    """Whether an error is no request's: the thread is to end, or its device is lost.

    A device that reports a fault which lasts fails with each call after it too.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | StepAbandonedError):
        return True
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


def free_cached_memory() -> None:
    """Give back what nobody uses but the allocators keep: for a retry, or for whoever comes next.

    Raises what a lost device makes of any call.
    """
    torch.cuda.empty_cache()  # nothing where no device is in use
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's, which keeps what lies below anything that is in use
        libc.malloc_trim(0)


def error_of(what: str, cause: BaseException) -> UmbelError:
    """Return the error of a node whose `what` met `cause`: that itself, if it is of the tree."""
    if isinstance(cause, UmbelError):
        return cause
    error = EngineError(f"{what} failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
