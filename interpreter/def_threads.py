"""The threads that run `def` bodies beside an event loop or a stream; knows no programs.

They are daemons: a body that waits for a backend that never answers must not keep the process from
its end. Idle ones end by themselves.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, ContextVar
from typing import NamedTuple

IDLE_S = 5.0  # how long a thread waits for more work
_depth: ContextVar[int] = ContextVar("umbel_def_depth", default=0)


class DefThreads:
    """At most `max_threads` threads for bodies, and as many for bodies started inside those, ...

    A body may wait for one that it started itself (it reads a stream). Were both kinds to queue for
    the same threads, as many waiting bodies as there are threads would wait for ever.
    """

    def __init__(self, max_threads: int) -> None:
        self.pid = os.getpid()  # a fork of this process has none of the threads
        self._max_threads = max_threads
        self._levels: list[_Threads] = []
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Run `work` in a thread, in a copy of this context; what it raises is in the future."""
        depth = _depth.get()
        context = contextvars.copy_context()
        context.run(_depth.set, depth + 1)
        with self._lock:
            while len(self._levels) <= depth:
                self._levels.append(_Threads(self._max_threads))
        task = _Task(context, work, Future())
        self._levels[depth].take(task)
        return task.done


class _Task(NamedTuple):
    context: Context
    work: Callable[[], None]
    done: Future[None]

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.context.run(self.work)
        except BaseException as error:  # the thread's edge: who waits is told
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class _Threads:
    """Threads that share a queue; started as they are needed."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._queue: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._num_threads = 0
        self._num_idle = 0

    def take(self, task: _Task) -> None:
        with self._changed:
            if self._num_idle <= len(self._queue) and self._num_threads < self._max_threads:
                name = f"umbel-def-{self._num_threads}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
                self._num_threads += 1
            self._queue.append(task)
            self._changed.notify()

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            task.run()
            del task  # an idle thread keeps no program alive

    def _next(self) -> _Task | None:
        with self._changed:
            while not self._queue:
                self._num_idle += 1
                is_told = self._changed.wait(IDLE_S)
                self._num_idle -= 1
                if not is_told and not self._queue:
                    self._num_threads -= 1
                    return None
            return self._queue.popleft()
