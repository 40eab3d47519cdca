"""Watches for a step that does not end: one thread that looks at the clock now and then.

A thread that hangs in a device's library can't be ended from outside. So the watchdog takes the
engine away from it: who waits is told, and the thread, should it ever come back, finds that it owns
nothing any more. Knows clocks and one thread's phases; nothing of requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from umbel.lang.errors import EngineError

#: the first passes of a kind may compile kernels: they may take so many times as long
FIRST_GRACE = 10.0
_LOOKS = 8  # at the clock within one time limit
_MAX_PAUSE_S = 5.0
_ANY = ""


class StepAbandonedError(BaseException):
    """Raised in a thread that comes out of a phase for which it was given up.

    No Exception: nothing on the thread's way out may take it for one request's failure.
    """


class StepWatch:
    """Knows what the engine's thread is doing, and ends it where that takes too long.

    `give_up` is called once, on the watchdog's thread, with the error; the watched thread gets a
    StepAbandonedError when it leaves the phase, if it ever does. Without a limit nothing is
    watched.
    """

    def __init__(self, timeout_s: float | None, give_up: Callable[[EngineError], None]) -> None:
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._lock = threading.Lock()
        self._what = ""  # of the phase that goes on
        self._until = 0.0  # on the monotonic clock; 0.0: no phase goes on
        self._limit_s = 0.0
        self._known: set[Hashable] = set()  # kinds that have come to an end once
        self._is_abandoned = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the watched thread has lost what it worked on."""
        return self._is_abandoned

    def start(self) -> None:
        """Begin to look, on a thread of its own."""
        if self._timeout_s is not None:
            self._thread = threading.Thread(target=self._look, name="umbel-watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look no more; but on its own thread, return when that has ended. Idempotent."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @contextmanager
    def phase(self, what: str, kind: Hashable = _ANY) -> Iterator[None]:
        """Watch what is done inside; `kind` is what makes it like others before it."""
        if self._timeout_s is None:
            yield
            return
        grace = 1.0 if kind in self._known else FIRST_GRACE
        self._what, self._limit_s = what, self._timeout_s * grace
        self._until = time.monotonic() + self._limit_s  # last: with it the phase begins
        try:
            yield
        finally:
            with self._lock:
                self._until = 0.0
                if self._is_abandoned:
                    raise StepAbandonedError
        self._known.add(kind)

    def _look(self) -> None:
        assert self._timeout_s is not None
        pause = min(self._timeout_s / _LOOKS, _MAX_PAUSE_S)
        while not self._ended.wait(pause):
            with self._lock:
                if not self._until or time.monotonic() < self._until:
                    continue
                self._is_abandoned = True
                what, limit = self._what, self._limit_s
            self._give_up(
                EngineError(
                    f"{what} has taken more than {limit:g} s: the device or its driver hangs, or "
                    "step_timeout_s is too short for this model"
                )
            )
            return
