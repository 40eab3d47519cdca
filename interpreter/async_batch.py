"""Runs many calls side by side on an event loop; a task per call, no thread for `async def`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from umbel.lang.run_result import Result
from umbel.lang.runner import BatchOptions, Call, is_retryable

from .batch import open_results
from .batch_results import BatchResults
from .interpreter import Execution, first_seed
from .passes import BatchTrunk
from .progress import Progress, progress_bar

if TYPE_CHECKING:
    from .interpreter import Interpreter
    from .results_file import ResultsFile


async def run_async_batch(
    interpreter: Interpreter, calls: Iterable[Call], options: BatchOptions
) -> AsyncIterator[Result[Any]]:
    """Yield the results of all calls; see `Program.aiter_batch`."""
    with progress_bar(options.progress, options.total) as bar:
        results = async_results(interpreter, calls, options, bar)
        try:
            async for result in results:
                yield result
        finally:
            await results.aclose()


async def async_results(
    interpreter: Interpreter, calls: Iterable[Call], options: BatchOptions, bar: Progress
) -> AsyncGenerator[Result[Any]]:
    """Pull, run and yield, until there are no more calls; cancels what is left when closed."""
    pulled = iter(calls)
    first = next(pulled, None)
    if first is None:
        return
    with open_results(options, first) as file:
        results = _AsyncBatch(interpreter, options, first, file).results(
            chain((first,), pulled), bar
        )
        try:
            async for result in results:
                yield result
        finally:
            await results.aclose()


class _AsyncBatch:
    """The state of one batch; all of it belongs to the loop."""

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
        self._tasks: set[asyncio.Task[None]] = set()
        self._results = BatchResults(options)
        self._num_pulled = 0
        self._changed = asyncio.Event()
        self._is_closing = False

    async def results(self, calls: Iterator[Call], bar: Progress) -> AsyncGenerator[Result[Any]]:
        options, ended = self._options, self._results
        num_yielded = 0
        is_exhausted = False
        try:
            while not (is_exhausted and num_yielded == self._num_pulled):
                while (
                    not is_exhausted
                    and options.room(self._num_pulled, ended.num_ended, num_yielded) > 0
                ):
                    call = next(calls, None)
                    if call is None:
                        is_exhausted = True
                    else:
                        self._start(call)
                ended.check()
                result = ended.take(num_yielded)
                if result is not None:
                    num_yielded += 1
                    bar.update()
                    yield result
                elif num_yielded < self._num_pulled:
                    await self._changed.wait()
                    self._changed.clear()
        finally:
            self._is_closing = True
            self._trunk.close()
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _start(self, call: Call) -> None:
        self._interpreter.backend_for(call)
        row = self._num_pulled
        done = None if self._file is None else self._file.finished(row, call)
        if done is None:
            task = asyncio.get_running_loop().create_task(self._run_to_end(row, call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._end(done)
        self._num_pulled += 1

    async def _run_to_end(self, row: int, call: Call) -> None:
        try:
            await self._run(row, call)
        except asyncio.CancelledError:
            raise  # the batch closes
        except BaseException as error:  # the task's edge: nobody else would end the row
            self._results.break_off(error)
            self._changed.set()

    async def _run(self, row: int, call: Call) -> None:
        options = self._options
        for attempt in range(options.retries + 1):
            result = await self._attempt(row, call, attempt)
            if attempt == options.retries or not is_retryable(result.error):
                break
            await asyncio.sleep(options.delay(attempt))
        if self._file is not None:  # it counts as running until it is in the file
            saved = asyncio.wrap_future(self._file.save(result))
            await asyncio.wait([saved])  # which a batch that is closed leaves to its end
            self._results.break_off(saved.exception())
        self._end(result)

    async def _attempt(self, row: int, call: Call, attempt: int) -> Result[Any]:
        loop = asyncio.get_running_loop()
        execution = Execution(
            self._interpreter,
            call,
            row=row,
            attempt=attempt,
            seed=self._seed,
            loop=loop,
            batch=self._trunk,
        )
        if self._file is not None:
            execution.run.exprs = self._file.exprs
        try:
            await execution.arun_to_end()
        except asyncio.CancelledError as error:
            if self._is_closing:
                raise
            execution.error = error  # the body's own: the batch goes on
        return execution.result()

    def _end(self, result: Result[Any]) -> None:
        self._results.add(result)
        self._changed.set()
