"""How our kernels are launched: at once, or compiled ahead instead; knows no kernel.

The first launch of a kernel compiles it, which takes a core a second or so. Where many are needed,
as when an engine starts, `compile_ahead` has them compiled side by side: ptxas and a C compiler run
as processes of their own, and the compiler's passes without the interpreter's lock.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor

_MAX_THREADS = 32
_ALIGNMENT = 16  # bytes: what kernels are compiled for where a pointer has it


@functools.cache
def is_overlapped(device: torch.device) -> bool:
    """Say whether a launch can begin while the one before it ends: on Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def overlap(device: torch.device, begins_early: bool = True) -> dict[str, bool]:
    """Return the options of a launch that may overlap with its neighbours, where it can.

    One that `begins_early` does so while the launch before it ends (CUDA's programmatic dependent
    launch). Its kernel waits for that one's end (`gdc_wait`) if it IS_OVERLAPPED, before it reads
    or writes anything that kernels of the same pass write, or it says why it may: so whoever waits
    for it has waited for those before it, too.
    """
    can = is_overlapped(device)
    return {"IS_OVERLAPPED": can} | ({"launch_pdl": True} if can and begins_early else {})


class _Ahead:
    """Takes launches for orders to compile."""

    def __init__(self) -> None:
        self._taken: set[tuple[Any, ...]] = set()

    def take(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        # a model's layers launch alike, and Triton takes longer than this to find that out
        key = (id(kernel), *map(_kind, args), *options.items())
        if key not in self._taken:
            self._taken.add(key)
            kernel.warmup(*args, grid=grid, **options)


_ahead: contextvars.ContextVar[_Ahead | None] = contextvars.ContextVar("ahead", default=None)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return what launches `kernel` over `grid` once it is called with arguments and options.

    Every kernel of ours is launched through this: where `compile_ahead` runs, it is compiled only.
    """
    ahead = _ahead.get()
    return kernel[grid] if ahead is None else functools.partial(ahead.take, kernel, grid)


def compile_ahead(dry_run: Callable[[], None], device: torch.device) -> int | None:
    """Call `dry_run` with no kernel of ours launched: all that it would launch are compiled.

    Return how many were not in this process yet, once they are ready to be launched: compiled, or
    read from Triton's cache. None under Triton's interpreter, which compiles nothing: then
    `dry_run` was not called. What a kernel would have written stays undefined in it, so neither the
    host nor an index on the device may ask for that. Other threads launch as ever.
    """
    if triton.knobs.runtime.interpret:
        return None
    # in a context of its own: Triton's mode is not left where a kernel could not be compiled
    return contextvars.copy_context().run(_compile_ahead, dry_run, device)


def _compile_ahead(dry_run: Callable[[], None], device: torch.device) -> int:
    with _Threads(device) as threads, triton.AsyncCompileMode(threads):
        _ahead.set(_Ahead())
        dry_run()
    return threads.num_kernels


def _kind(arg: object) -> tuple[object, ...]:
    """Return what of an argument a kernel may be compiled for."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % _ALIGNMENT
    return type(arg), arg


class _Threads(Executor):
    """Runs what returns a compiled kernel, and makes that one ready to be launched there too.

    Nobody sees a kernel before it is: Triton's own way, when it is first launched, is for one
    thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_kernels = 0
        # "cuda" is the device that is current, for each thread on its own
        index = torch.cuda.current_device() if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(
            min(_MAX_THREADS, os.cpu_count() or 1), "umbel-compile", _use, (index,)
        )

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_kernels += 1
        return self._pool.submit(_ready, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        # work that nobody waits for is left after Ctrl-C, or a kernel that can't be compiled
        self._pool.shutdown(wait, cancel_futures=True)


def _use(device_index: int | None) -> None:
    if device_index is not None:
        torch.cuda.set_device(device_index)


def _ready(compile_kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    kernel = compile_kernel(*args, **kwargs)
    _run = kernel.run  # asking for it builds the launcher and loads the binary
    return kernel
