"""Calls into a library that nothing can stop: whoever waits for one can leave it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, TypeVar

from .time_limit import closed_error

T = TypeVar("T")


class LeavableCalls:
    """Each call has a thread of its own, which `close` leaves to itself. Thread-safe.

    Such a thread goes on until its call returns, and holds what the call was given and no more.
    It is no daemon: at the interpreter's end those lose their stack, and a library crashes on that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._is_closed = False

    def run(self, call: Callable[[], T]) -> T:
        """Return what the call gives, or raise what it raises; EngineStoppedError once closed."""
        result: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise closed_error()
            self._running.add(result)
        try:
            threading.Thread(
                target=_settle, args=(call, result), name="umbel-grammar-library"
            ).start()
            return result.result()
        except CancelledError:
            raise closed_error() from None
        finally:
            with self._lock:
                self._running.discard(result)

    def close(self) -> None:
        """End what is waited for with an error, and later calls; wait for none. Idempotent."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for result in running:
            result.cancel()  # one that has returned by now keeps what it gave


def _settle(call: Callable[[], T], result: Future[T]) -> None:
    try:
        value = call()
    except BaseException as error:  # the thread's edge: who waits is told
        with contextlib.suppress(InvalidStateError):  # nobody waits any more
            result.set_exception(error)
    else:
        with contextlib.suppress(InvalidStateError):
            result.set_result(value)
