"""Constraint to compiled grammar: chooses the engine, compiles off the engine's thread, caches.

Doesn't know how an engine follows a grammar, nor what a request is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from umbel.lang.constraints import Constraint, Grammar, Regex
from umbel.lang.errors import ConstraintError, EngineStoppedError, UmbelError

from ..vocabulary import Vocabulary
from .compile_process import CompileProcesses
from .grammar_builder import GrammarBuilder
from .leavable_calls import LeavableCalls
from .llguidance import LLGuidanceTokenizers
from .llguidance_words import UnsatisfiableError
from .matcher import CompiledGrammar
from .time_limit import TooLateError, closed_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENGINES = ("llguidance", "outlines-core", "umbel-dfa")

# So much time a constraint has beside all others. Most take milliseconds; what takes longer starts
# again among its like, so that many such hold up no more than each other.
_QUICK_S = 1.0
_NUM_SLOW = 2  # of the others that are compiled at once, each in a process of its own


class _CacheKey(NamedTuple):
    constraint: Constraint
    engine: str | None


class _Job(NamedTuple):
    constraint: Constraint
    engine: str | None
    result: Future[CompiledGrammar]


class _Lane:
    """Threads and processes for constraints that take no longer than `seconds` each.

    Those that do go on to the `next` lane and start again there; from the last one with an error.
    """

    def __init__(
        self,
        tokenizers: LLGuidanceTokenizers,
        memory_bytes: int,
        *,
        seconds: float,
        num_threads: int,
        next: _Lane | None = None,
    ) -> None:
        vocabulary = tokenizers.vocabulary
        self._processes = CompileProcesses(vocabulary, memory_bytes)
        self._calls = LeavableCalls()
        self._builder = GrammarBuilder(
            vocabulary, tokenizers, self._processes, self._calls, seconds
        )
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="umbel-grammar")
        self._next = next

    def take(self, job: _Job) -> None:
        """Compile when there is room; the job's result is set by then, or cancelled by `close`.

        Where no room will come, as the pool or the interpreter ends, it is set here.
        """

        def drop(run: Future[None]) -> None:
            if run.cancelled():
                job.result.cancel()

        try:
            run = self._pool.submit(self._run, job)
        except RuntimeError as error:
            job.result.set_exception(_takes_no_more(error))
        else:
            run.add_done_callback(drop)

    def warm_up(self, engine: str | None) -> None:
        """Start what the first constraint of each kind would wait for."""
        self._builder.build(Regex("a"), engine)
        if engine is None:
            self._builder.build(Regex("a"), "llguidance")
            self._builder.build(Grammar('start: "a"'), "llguidance")  # tried in a process first

    def end_builds(self) -> None:
        """End what is being compiled with EngineStoppedError, and what would be later."""
        self._calls.close()
        self._processes.close()

    def close(self) -> None:
        """Wait for what runs, which `end_builds` has ended; cancel what waits."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: _Job) -> None:
        try:
            grammar = self._build(job)
        except TooLateError as error:
            if self._next is None:
                job.result.set_exception(error.told())
            else:
                self._next.take(job)
        except BaseException as error:  # the thread's edge: who waits is told
            job.result.set_exception(error)
        else:
            job.result.set_result(grammar)

    def _build(self, job: _Job) -> CompiledGrammar:
        try:
            return self._builder.build(job.constraint, job.engine)
        except UnsatisfiableError as error:  # known in this room only: it has to travel
            raise ConstraintError(str(error), where=error.where) from None
        except UmbelError:
            raise
        except BaseException as error:
            # a library's panic is this constraint's error, nobody else's
            raise ConstraintError(
                f"compiling the constraint failed: {type(error).__name__}: {error}"
            ) from error


class GrammarCompiler:
    """Compiles constraints for one vocabulary in the background.

    Every constraint has a second, in processes that can be killed; those that need more wait for
    each other, and then have `timeout_s`. So any number of them takes the cores and the memory of
    a few, and holds up others for that second at most.

    Identical constraints compile once, also while the first is still compiling; results are kept
    up to `cache_bytes`, oldest use first out. Errors aren't kept. Thread-safe.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        cache_bytes: int = 512 * 2**20,
        timeout_s: float = 20.0,
        memory_bytes: int = 2 * 2**30,
        num_threads: int = 4,
        engine: str | None = None,
    ) -> None:
        """`engine` is what constraints take that name none: one of ENGINES, or None for the rule.

        Raises ConstraintError for another name.
        """
        _check_known(engine)
        self._engine = engine
        self.vocabulary = vocabulary
        self._cache_bytes = cache_bytes
        tokenizers = LLGuidanceTokenizers(vocabulary)
        slow = None
        if timeout_s > _QUICK_S:
            slow = _Lane(tokenizers, memory_bytes, seconds=timeout_s, num_threads=_NUM_SLOW)
        quick_s = min(timeout_s, _QUICK_S)
        self._quick = _Lane(
            tokenizers, memory_bytes, seconds=quick_s, num_threads=num_threads, next=slow
        )
        self._lanes = [self._quick] if slow is None else [self._quick, slow]
        self._work = ThreadPoolExecutor(num_threads, thread_name_prefix="umbel-grammar-work")
        self._lock = threading.Lock()
        self._closed = False
        self._cache: OrderedDict[_CacheKey, Future[CompiledGrammar]] = OrderedDict()

    def submit(self, constraint: Constraint, engine: str | None = None) -> Future[CompiledGrammar]:
        """Start compiling; the future gives the compiled grammar or raises ConstraintError.

        `engine` names one of ENGINES; None takes the compiler's own. Each call has its own future:
        cancelling it doesn't stop others that wait for the same constraint.
        """
        _check_known(engine)
        engine = engine or self._engine
        key = _CacheKey(constraint, engine)
        mine: Future[CompiledGrammar] = Future()
        with self._lock:
            if self._closed:
                raise closed_error()
            shared = self._cache.get(key)
            is_new = shared is None
            if shared is None:
                shared = self._cache[key] = Future()
                self._quick.take(_Job(constraint, engine, shared))
            self._cache.move_to_end(key)
        # outside the lock: a callback runs at once when the future is done already
        if is_new:
            shared.add_done_callback(lambda done: self._settle(key, done))
        shared.add_done_callback(lambda done: _hand_over(done, mine))
        return mine

    def compile(self, constraint: Constraint, engine: str | None = None) -> CompiledGrammar:
        """Compile and wait. Raises ConstraintError."""
        return self.submit(constraint, engine).result()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do work for a request, such as walking a grammar through the vocabulary, beside others.

        Raises EngineStoppedError once the compiler is closed.
        """
        with self._lock:
            if self._closed:
                raise closed_error()
            try:
                return self._work.submit(work)
            except RuntimeError as error:
                raise _takes_no_more(error) from error

    def warm_up(self) -> Future[None]:
        """Start what the first constraint of each kind would wait for.

        llguidance reads the vocabulary with Python's lock held: call this before serving.
        """
        return self._work.submit(self._warm_up)

    def close(self) -> None:
        """End what compiles and what waits with EngineStoppedError, and forget all grammars.

        Waits for none of it. Nothing can stop llguidance in this process, though: a thread that it
        works on ends by itself, up to `timeout_s` later, and with it goes what it holds; nobody is
        told of its result. The interpreter's end waits for that thread. Idempotent, thread-safe.
        """
        with self._lock:
            self._closed = True
        for lane in self._lanes:
            lane.end_builds()
        for lane in self._lanes:
            lane.close()
        self._work.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._cache.clear()

    @property
    def cached_bytes(self) -> int:
        """Bytes that the finished grammars in the cache hold, by their own estimate."""
        with self._lock:
            return sum(map(_num_bytes, self._cache.values()))

    def _warm_up(self) -> None:
        started = time.perf_counter()
        self._quick.warm_up(self._engine)
        logger.info("constraints can be compiled after %.1f s", time.perf_counter() - started)

    def _settle(self, key: _CacheKey, done: Future[CompiledGrammar]) -> None:
        """Forget a failed compile; keep what one that succeeded gave, and make room for it."""
        with self._lock:
            if self._cache.get(key) is done:
                if done.cancelled() or done.exception() is not None:
                    del self._cache[key]
                else:
                    # by itself: a future keeps its callbacks, and with them all that waited for it
                    kept: Future[CompiledGrammar] = Future()
                    kept.set_result(done.result())
                    self._cache[key] = kept
            total = sum(map(_num_bytes, self._cache.values()))
            for old, future in list(self._cache.items()):
                if total <= self._cache_bytes:
                    break
                if old != key and future.done():
                    total -= _num_bytes(future)
                    del self._cache[old]


def _check_known(engine: str | None) -> None:
    if engine is not None and engine not in ENGINES:
        raise ConstraintError(f"unknown grammar engine {engine!r}: one of {', '.join(ENGINES)}")


def _takes_no_more(error: RuntimeError) -> EngineStoppedError:
    """Return the error for a pool that is shut down, or whose interpreter ends."""
    return EngineStoppedError(f"the grammar compiler takes nothing more: {error}")


def _num_bytes(future: Future[CompiledGrammar]) -> int:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    return future.result().num_bytes


def _hand_over(done: Future[CompiledGrammar], mine: Future[CompiledGrammar]) -> None:
    if not mine.set_running_or_notify_cancel():
        return
    if done.cancelled():
        mine.set_exception(EngineStoppedError("the grammar compiler was closed"))
    elif (error := done.exception()) is not None:
        mine.set_exception(error)
    else:
        mine.set_result(done.result())
