"""Runs many calls side by side on an event loop; a task per call, no thread for `async def`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from umbel.lang.run_result import Result
from umbel.lang.runner import BatchOptions, Call, is_retryable

from .interpreter import Execution, first_seed
from .progress import Progress, progress_bar

if TYPE_CHECKING:
    from .interpreter import Interpreter


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
    seed = first_seed(first)
    pulled = chain((first,), pulled)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    ended: dict[int, Result[Any]] = {}
    failures: deque[Result[Any]] = deque()
    changed = asyncio.Event()

    num_pulled = num_ended = num_yielded = 0
    is_exhausted = is_closing = False

    async def run_one(row: int, call: Call) -> None:
        nonlocal num_ended
        for attempt in range(options.retries + 1):
            execution = Execution(interpreter, call, row=row, attempt=attempt, seed=seed, loop=loop)
            try:
                await execution.arun_to_end()
            except asyncio.CancelledError as error:
                if is_closing:
                    raise
                execution.error = error  # the body's own: the batch goes on
            result = execution.result()
            if attempt == options.retries or not is_retryable(result.error):
                break
            await asyncio.sleep(options.backoff * 2**attempt)
        ended[row] = result
        num_ended += 1
        if result.error is not None:
            failures.append(result)
        changed.set()

    try:
        while not (is_exhausted and num_yielded == num_pulled):
            while not is_exhausted and options.room(num_pulled, num_ended, num_yielded) > 0:
                call = next(pulled, None)
                if call is None:
                    is_exhausted = True
                    break
                interpreter.backend_for(call)
                task = loop.create_task(run_one(num_pulled, call))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                num_pulled += 1
            if failures and options.on_error == "raise":
                failed = failures[0]
                assert failed.error is not None, "only failures are kept here"
                failed.error.add_note(f"in row {failed.row} of the batch")
                raise failed.error
            if options.ordered:
                row = num_yielded if num_yielded in ended else None
            else:
                row = next(iter(ended), None)
            if row is not None:
                num_yielded += 1
                bar.update()
                yield ended.pop(row)
            elif num_yielded < num_pulled:
                await changed.wait()
                changed.clear()
    finally:
        is_closing = True
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
