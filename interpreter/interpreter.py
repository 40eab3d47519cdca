"""The runner: runs a program's body against a state and waits for what it wrote.

Single runs are here; many at once are in `batch` and `async_batch`, streams in `stream`.
"""

from __future__ import annotations

import inspect
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from umbel.lang.ended_run import EndedRun
from umbel.lang.errors import CancelledError, ProgramError, UmbelError, described
from umbel.lang.number_checks import check_whole
from umbel.lang.results import RunOptions
from umbel.lang.run_result import Result
from umbel.lang.runner import BatchOptions, Call, check_backend
from umbel.lang.state import State
from umbel.lang.trace import trace

from .def_threads import DefThreads
from .graph_run import GraphRun, Listener

if TYPE_CHECKING:
    import asyncio

    from umbel.lang.plan import Plan
    from umbel.lang.streaming import AsyncStream, Stream

    from .backends.base import Backend
    from .passes import BatchTrunk


class Interpreter:
    """Runs programs on one backend (programs may choose another with `options`).

    A `def` body runs in the calling thread, or, in batches and on event loops, in one of at most
    `max_def_threads` pool threads, and only while its Python runs or waits in a read.
    """

    def __init__(self, backend: Backend | None = None, *, max_def_threads: int = 64) -> None:
        check_whole("max_def_threads", max_def_threads, least=1)
        if backend is not None:
            check_backend(backend)
        self._backend = backend
        self._threads: DefThreads | None = None
        self._threads_lock = threading.Lock()
        self.max_def_threads = max_def_threads

    @property
    def backend(self) -> Backend | None:
        """The backend of programs that choose none themselves."""
        return self._backend

    def run(self, call: Call) -> Result[Any]:
        """Run to the end in this thread; an `async def` body gets an event loop of its own."""
        if call.is_async:
            return self._run_async(call)
        execution = Execution(self, call)
        execution.run_body()
        try:
            execution.run.wait_end()
        except BaseException:  # Ctrl-C
            execution.run.abort()
            raise
        return execution.checked_result()

    async def arun(self, call: Call) -> Result[Any]:
        """Run to the end on the running loop."""
        import asyncio

        execution = Execution(self, call, loop=asyncio.get_running_loop())
        await execution.arun_to_end()
        return execution.checked_result()

    def stream(self, call: Call) -> Stream[Any]:
        """Start a run in a pool thread and return its stream."""
        from .stream import start_stream

        return start_stream(self, call)

    def astream(self, call: Call) -> AsyncStream[Any]:
        """Start a run on the running loop and return its stream."""
        from .stream import start_async_stream

        return start_async_stream(self, call)

    def batch(self, calls: Iterable[Call], options: BatchOptions) -> Iterator[Result[Any]]:
        """Run calls side by side; see `Program.iter_batch`."""
        from .batch import run_batch

        return run_batch(self, calls, options)

    def abatch(self, calls: Iterable[Call], options: BatchOptions) -> AsyncIterator[Result[Any]]:
        """Run calls side by side on the running loop; see `Program.aiter_batch`."""
        from .async_batch import run_async_batch

        return run_async_batch(self, calls, options)

    def plan(self, call: Call) -> Plan:
        """Return what a call will cost up to its first read; it needs no backend."""
        from .plan import make_plan

        backend = self._chosen(call)
        counter = None if backend is None else backend.token_counter
        return make_plan(trace(call), count_tokens=counter)

    def plan_result(self, result: Result[Any]) -> Plan:
        """Return the plan of a run that has ended, with what it did cost."""
        from .plan import plan_result

        run = None if result.state is None else result.state._run
        backend: Any = run.backend if isinstance(run, EndedRun) else None
        return plan_result(result, count_tokens=None if backend is None else backend.token_counter)

    def backend_for(self, call: Call) -> Backend:
        """Return the backend a call runs on; raises ProgramError if none was chosen."""
        found = self._chosen(call)
        if found is None:
            raise ProgramError(
                "no backend was chosen: call umbel.set_default_backend(umbel.connect('smollm2')), "
                "use `with umbel.use_backend(...)`, or program.options(backend=...)"
            )
        return found

    def _chosen(self, call: Call) -> Backend | None:
        backend: Any = call.settings.backend or self._backend
        found: Backend | None = backend
        return found

    def def_threads(self) -> DefThreads:
        """Return the threads for `def` bodies on event loops and in streams; made on first use."""
        with self._threads_lock:
            if self._threads is None or self._threads.pid != os.getpid():
                self._threads = DefThreads(self.max_def_threads)
            return self._threads

    def _run_async(self, call: Call) -> Result[Any]:
        import asyncio

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.arun(call))
        raise ProgramError("run() would block the running event loop: use `await program.arun()`")


class Execution:
    """One call on its way: its run, its state, and how its body ended."""

    __slots__ = (
        "_attempt",
        "_call",
        "_interpreter",
        "error",
        "row",
        "run",
        "seed",
        "state",
        "value",
    )

    def __init__(
        self,
        interpreter: Interpreter,
        call: Call,
        *,
        row: int = 0,
        attempt: int = 0,
        seed: int | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        listener: Listener | None = None,
        on_block: Callable[[bool], None] | None = None,
        batch: BatchTrunk | None = None,
    ) -> None:
        settings = call.settings
        self.row = row
        self.seed = first_seed(call) if seed is None else seed
        self.run = GraphRun(
            interpreter.backend_for(call),
            RunOptions(self.seed, row, 0, settings.timeout, attempt),
            loop=loop if call.is_async else None,
            listener=listener,
            on_block=on_block,
            batch=batch,
        )
        self.state = State(self.run, settings.sampling)
        self.value: Any = None
        self.error: BaseException | None = None
        self._attempt = attempt
        self._call = call
        self._interpreter = interpreter

    def run_body(self) -> None:
        """Run a `def` body; whatever it raises ends the run and is kept in `error`."""
        call = self._call
        try:
            self.value = _returned(call.start(self.state))
            self.state.settle()
        except BaseException as error:
            self._failed(error)
        else:
            self.run.seal()

    def run_any_body(self) -> None:
        """Run a body in this thread; an `async def` one on an event loop of its own."""
        if not self._call.is_async:
            self.run_body()
            return
        import asyncio

        with asyncio.Runner() as runner:
            self.run.bind_loop(runner.get_loop())
            runner.run(self.arun_to_end())

    async def arun_to_end(self) -> None:
        """Run any body on the running loop and wait for the run's end; cancelled, it aborts."""
        import asyncio

        try:
            await self.arun_body()
            await self.run.await_end()
        except asyncio.CancelledError:
            self.run.abort()
            raise

    async def arun_body(self) -> None:
        """Run any body on the loop; a `def` body runs in a pool thread."""
        import asyncio

        call = self._call
        if not call.is_async:
            ran = self._interpreter.def_threads().submit(self.run_body)
            try:
                await asyncio.wrap_future(ran)
            except asyncio.CancelledError:
                self.run.abort()  # wakes the body's thread out of its read
                raise
            return
        try:
            coroutine = call.start(self.state)
            self.value = _returned(await coroutine)
            await self.state.asettle()
        except BaseException as error:
            self._failed(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self.run.seal()

    def result(self) -> Result[Any]:
        """Return the result of an ended run, its error inside."""
        error = self.error
        if error is None:
            error = self.run.unhandled_error(self.state._tail)
        self.state._run = self.run.ended()  # the result keeps no more than that
        return Result(
            self.state, self.value, error, row=self.row, seed=self.seed, attempt=self._attempt
        )

    def checked_result(self) -> Result[Any]:
        """Return the result of an ended run; raises its error."""
        result = self.result()
        if result.error is not None:
            raise result.error
        return result

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self.run.abort(_reason(error))


def _reason(error: BaseException) -> UmbelError:
    return CancelledError(f"the program's body ended with {described(error)}")


def first_seed(call: Call) -> int:
    """Return the seed a call asks for, or a new one."""
    seed = call.settings.seed
    return random.getrandbits(63) if seed is None else seed


def _returned(value: Any) -> Any:
    """Return what a body returned; raises ProgramError for a coroutine, which nobody awaits."""
    if inspect.iscoroutine(value):
        value.close()
        raise ProgramError(
            f"the body returned the coroutine {value.__qualname__}(), which was never awaited: "
            "write `return await ...`, in an `async def` body"
        )
    return value
