"""Chooses the backend that programs run on; opens none itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from umbel.lang.runner import set_default_runner, use_runner

from .backends.base import Backend
from .interpreter import Interpreter

B = TypeVar("B", bound=Backend)


def set_default_backend(backend: Backend | None, *, max_def_threads: int = 64) -> None:
    """Set the backend of every thread and task that has not chosen one; None takes it away."""
    set_default_runner(Interpreter(backend, max_def_threads=max_def_threads))


@contextmanager
def use_backend(backend: B, *, max_def_threads: int = 64) -> Iterator[B]:
    """Run programs on `backend` inside a `with` block, in this thread or task only.

    The backend stays open: whoever made it closes it.
    """
    with use_runner(Interpreter(backend, max_def_threads=max_def_threads)):
        yield backend
