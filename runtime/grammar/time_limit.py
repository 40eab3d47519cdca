"""Work that may take a library too long, on a thread that nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from umbel.lang.errors import ConstraintError

T = TypeVar("T")


def took_more_than(limit: str, what: str = "compiling the constraint") -> ConstraintError:
    """Return the error of work that met a limit, of time or of memory."""
    return ConstraintError(
        f"{what} took more than {limit}: simplify the constraint (repetitions of repetitions "
        "multiply), or name another engine"
    )


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises; ConstraintError past `seconds`.

    A library's own loop can't be stopped in this process. Past its time it goes on with nobody
    waiting, without Python's lock if it works without, and does not keep the process from ending.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # panics of native libraries are no Exception
            done.set_exception(error)

    threading.Thread(target=run, name="umbel-grammar-library", daemon=True).start()
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():  # its own
            raise
    raise took_more_than(f"{seconds:g} s")
