"""Runs many calls side by side: few threads for bodies, none for waiting.

The calling thread pulls rows and yields results; workers run bodies. A body without reads leaves
its worker at once, and its run ends on the backend's thread. Another worker is started only when
all are blocked in reads, or when none has taken a row for a while.
"""

from __future__ import annotations

import contextvars
import heapq
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from umbel.lang.run_result import Result
from umbel.lang.runner import BatchOptions, Call, is_retryable

from .batch_results import BatchResults
from .interpreter import Execution, first_seed
from .passes import BatchTrunk
from .progress import Progress, progress_bar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .interpreter import Interpreter
    from .results_file import ResultsFile

#: seconds without a taken row after which one more worker is started
_PATIENCE = 0.02


def run_batch(
    interpreter: Interpreter, calls: Iterable[Call], options: BatchOptions
) -> Iterator[Result[Any]]:
    """Yield the results of all calls; see `Program.iter_batch`."""
    pulled = iter(calls)
    first = next(pulled, None)
    if first is None:
        return
    interpreter.backend_for(first)  # refuse here, not in a worker
    rest = chain((first,), pulled)
    with progress_bar(options.progress, options.total) as bar:
        if first.is_async:
            yield from _run_on_loop(interpreter, rest, options, bar)
            return
        with open_results(options, first) as file:
            yield from _Batch(interpreter, options, first, file).results(rest, bar)


@contextmanager
def open_results(options: BatchOptions, first: Call) -> Iterator[ResultsFile | None]:
    """Open the batch's results file, if it has one, and close it at the end."""
    if options.results_file is None:
        yield None
        return
    from .results_file import ResultsFile

    file = ResultsFile(options.results_file, first)
    try:
        yield file
    finally:
        file.close()


def _run_on_loop(
    interpreter: Interpreter, calls: Iterable[Call], options: BatchOptions, bar: Progress
) -> Iterator[Result[Any]]:
    """Drive the asynchronous batch on a loop of our own, as results are asked for."""
    import asyncio

    from .async_batch import async_results

    with asyncio.Runner() as runner:
        results = async_results(interpreter, calls, options, bar)

        async def advance() -> Result[Any] | None:
            return await anext(results, None)

        async def close() -> None:
            await results.aclose()

        try:
            while (result := runner.run(advance())) is not None:
                yield result
        finally:
            runner.run(close())


class _Task(NamedTuple):
    """One row to run."""

    row: int
    call: Call
    attempt: int = 0


class _Batch:
    """The state of one batch. `_lock` guards all that workers and backend threads touch.

    It is taken by itself, and who does not wait is not notified: conditions are Python code, and
    rows are many.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        options: BatchOptions,
        first: Call,
        file: ResultsFile | None,
    ) -> None:
        self._interpreter = interpreter
        self._options = options
        self._file = file
        self._seed = first_seed(first) if file is None else file.seed
        self._trunk = BatchTrunk()
        self._has_timeout = first.settings.timeout is not None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the caller
        self._work = threading.Condition(self._lock)  # for the workers
        self._queue: deque[_Task] = deque()  # pulled, not begun
        self._retries: list[tuple[float, int, _Task]] = []  # a heap by due time and row
        self._live: dict[int, Execution] = {}
        self._results = BatchResults(options)
        self._num_taken = 0
        self._num_idle = 0  # workers that wait for a row
        self._num_woken = 0  # of these, told that there is one
        self._num_blocked = 0  # workers that wait in a read
        self._threads: list[threading.Thread] = []
        self._caller_waits = False
        self._is_stopped = False

    def results(self, calls: Iterator[Call], bar: Progress) -> Iterator[Result[Any]]:
        """Pull, run and yield, until there are no more calls; cancels what is left when closed."""
        num_pulled = num_yielded = 0
        is_exhausted = is_complete = False
        try:
            while True:
                room = self._options.room(num_pulled, self._results.num_ended, num_yielded)
                while room > 0 and not is_exhausted:
                    call = next(calls, None)
                    if call is None:
                        is_exhausted = True
                    else:
                        self._put(num_pulled, call)
                        num_pulled += 1
                        room -= 1
                if is_exhausted and num_yielded == num_pulled:
                    break
                for result in self._take_ended(num_yielded, num_pulled, is_exhausted):
                    num_yielded += 1
                    bar.update()
                    yield result
            is_complete = True
        finally:
            self._trunk.close()
            self._stop(join=is_complete)

    def _put(self, row: int, call: Call) -> None:
        done = None if self._file is None else self._file.finished(row, call)
        with self._lock:
            if done is None:
                self._enqueue(_Task(row, call))
            else:
                self._results.add(done)

    def _enqueue(self, task: _Task) -> None:
        self._queue.append(task)
        if self._num_idle:
            if self._num_idle > self._num_woken:
                self._num_woken += 1
                self._work.notify()
        elif self._num_blocked == len(self._threads):
            self._add_worker()

    def _take_ended(self, next_row: int, num_pulled: int, is_exhausted: bool) -> list[Result[Any]]:
        """Wait until there is something to yield, or room to pull; return what can be yielded."""
        with self._lock:
            while True:
                self._results.check()
                found = self._pop_ended(next_row)
                has_room = self._options.room(num_pulled, self._results.num_ended, next_row) > 0
                if found or (has_room and not is_exhausted):
                    return found
                self._wait()

    def _pop_ended(self, next_row: int) -> list[Result[Any]]:
        found: list[Result[Any]] = []
        while (result := self._results.take(next_row + len(found))) is not None:
            found.append(result)
        return found

    def _wait(self) -> None:
        """Wait for a change; look after stuck workers, late runs and due retries."""
        now = time.monotonic()
        due = [e.run.deadline for e in self._timed() if e.run.deadline is not None]
        due += [self._retries[0][0]] if self._retries else []
        due += [now + _PATIENCE] if self._queue else []
        timeout = max(0.0, min(due) - now) if due else None
        taken = self._num_taken
        self._caller_waits = True
        self._changed.wait(timeout)
        self._caller_waits = False
        if self._queue and taken == self._num_taken and not self._num_idle:
            self._add_worker()
        now = time.monotonic()
        while self._retries and self._retries[0][0] <= now:
            self._enqueue(heapq.heappop(self._retries)[2])
        late = [
            execution
            for execution in self._timed()
            if execution.run.deadline is not None and execution.run.deadline <= now
        ]
        if late:
            self._lock.release()
            try:
                for execution in late:
                    execution.run.expire()
            finally:
                self._lock.acquire()

    def _timed(self) -> Collection[Execution]:
        """Return the runs that have a timeout: all or none."""
        return self._live.values() if self._has_timeout else ()

    def _add_worker(self) -> None:
        if len(self._threads) < self._interpreter.max_def_threads:
            context = contextvars.copy_context()
            name = f"umbel-batch-{len(self._threads)}"
            thread = threading.Thread(
                target=context.run, args=(self._run_worker,), name=name, daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _run_worker(self) -> None:
        while (task := self._take()) is not None:
            try:
                self._run(task)
            except BaseException as error:  # the thread's edge: nobody else would end the row
                self._break(error)

    def _run(self, task: _Task) -> None:
        execution = Execution(
            self._interpreter,
            task.call,
            row=task.row,
            attempt=task.attempt,
            seed=self._seed,
            on_block=self._on_block,
            batch=self._trunk,
        )
        run = execution.run
        if self._file is not None:
            run.exprs = self._file.exprs
        with self._lock:
            self._live[task.row] = execution
            is_stopped = self._is_stopped
        if is_stopped:
            run.abort()
        execution.run_body()
        run.on_end(partial(self._end, task, execution))

    def _break(self, error: BaseException) -> None:
        """End the batch with what went wrong in it."""
        with self._lock:
            self._results.break_off(error)
            self._tell_caller()

    def _take(self) -> _Task | None:
        with self._lock:
            while not self._queue and not self._is_stopped:
                self._num_idle += 1
                self._work.wait()
                self._num_idle -= 1
                self._num_woken -= 1
            if self._is_stopped:
                return None
            self._num_taken += 1
            return self._queue.popleft()

    def _on_block(self, blocks: bool) -> None:
        with self._lock:
            self._num_blocked += 1 if blocks else -1
            if self._queue and not self._num_idle and self._num_blocked == len(self._threads):
                self._add_worker()

    def _end(self, task: _Task, execution: Execution) -> None:
        try:
            self._take_result(task, execution)
        except BaseException as error:  # on a backend's thread, which has no use for it
            self._break(error)

    def _take_result(self, task: _Task, execution: Execution) -> None:
        result = execution.result()
        with self._lock:
            del self._live[execution.row]
            if result.error is not None and self._is_retried(task, result):
                self._tell_caller()
                return
            is_cancelled = self._is_stopped and result.error is not None
            if self._file is None or is_cancelled:
                self._ended_as(result)
                return
        # it counts as running until it is in the file
        self._file.save(result).add_done_callback(partial(self._saved, result))

    def _saved(self, result: Result[Any], saved: Future[None]) -> None:
        with self._lock:
            self._results.break_off(saved.exception())
            self._ended_as(result)

    def _ended_as(self, result: Result[Any]) -> None:
        self._results.add(result)
        self._tell_caller()

    def _tell_caller(self) -> None:
        if self._caller_waits:
            self._caller_waits = False  # once will do
            self._changed.notify()

    def _is_retried(self, task: _Task, result: Result[Any]) -> bool:
        attempt, options = task.attempt, self._options
        if attempt == options.retries or self._is_stopped or not is_retryable(result.error):
            return False
        due = time.monotonic() + options.delay(attempt)
        heapq.heappush(self._retries, (due, task.row, _Task(task.row, task.call, attempt + 1)))
        return True

    def _stop(self, *, join: bool) -> None:
        with self._lock:
            self._is_stopped = True
            self._queue.clear()
            live = list(self._live.values())
            self._work.notify_all()
        for execution in live:
            execution.run.abort()
        if join:  # all are idle; else one may be in a body's own code, which nothing can stop
            for thread in self._threads:
                thread.join()
