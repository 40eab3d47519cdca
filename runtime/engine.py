"""The engine as its clients see it, and the thread that steps it; knows no pass and no HTTP."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from umbel.lang.errors import (
    EngineError,
    EngineStoppedError,
    UmbelError,
)
from umbel.lang.graph import RequestGraph
from umbel.lang.results import NodeResult, RunOptions

from .config import EngineConfig, config_of
from .device_errors import free_cached_memory
from .encode_ahead import encode_ahead
from .engine_core import EngineCore, ModelParts
from .engine_session import EngineSession
from .grammar import GrammarCompiler
from .model_runner.runner import Runner
from .program_run import EventSink, ProgramRun
from .sampling.device_sampler import TokenSampler
from .tokenizer import Tokenizer
from .watchdog import StepAbandonedError, StepWatch

logger = logging.getLogger(__name__)

# commands walk graphs and encode what no client did, perhaps for a thousand prompts at once: a step
# is launched between them
_COMMANDS_S = 0.005

_MAX_WAIT_S = 3600.0  # a lock takes no time limit of centuries


class Engine:
    """Runs request graphs on one model.

    One thread owns `core`; others talk to it through `post`. With `start=False` there is no
    thread and the caller drives the engine by `step` (tests). A compiler given as `grammar`
    is shared: its owner closes it. `sampler` draws tokens where the logits are; the host's by
    default.

    What goes wrong for one request fails its node. A pass that raises is taken back and its
    requests run again, until those that can't are found (see PassRetry), and a defect in a run's
    graph ends that run (see GraphExecutor). The scheduler's and the cache's state is everybody's:
    where that breaks, or the device does, no result could be trusted, so the engine stops, and all
    that has not ended fails with EngineStoppedError, whose cause is the defect. So it does when a
    step takes longer than `step_timeout_s`.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        max_seq_len: int,
        model_name: str = "",
        grammar: GrammarCompiler | None = None,
        sampler: TokenSampler | None = None,
        start: bool = True,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_seq_len = max_seq_len
        self._owns_grammar = grammar is None
        if grammar is None:
            grammar = GrammarCompiler(
                tokenizer.vocabulary(),
                cache_bytes=config.grammar_cache_bytes,
                timeout_s=config.grammar_timeout_s,
                engine=None if config.grammar_engine == "auto" else config.grammar_engine,
            )
        self._grammar = grammar
        self._watch = StepWatch(config.step_timeout_s or None, self._give_up)
        model = ModelParts(runner, tokenizer, grammar, sampler, max_seq_len)
        self.core = EngineCore(model, config, self._watch, self.post_if_running)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._drain_until: float | None = None  # new runs are refused from when this is set
        self._stopping = False
        self._stopped = False
        self.stopped = threading.Event()  # set when everything has been told and released
        self._cause: BaseException | None = None
        self._froze_objects = False
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._loop, name="umbel-engine", daemon=True)
        self._owner = self._thread  # the thread that all but what clients call belongs to
        if self._thread is not None:
            self._thread.start()
            self._watch.start()

    @classmethod
    def from_model(cls, ref: str, **options: Any) -> Self:
        """Load a model by reference and start an engine; options are EngineConfig's fields.

        Raises ModelLoadError, EngineConfigError.
        """
        from .model_loading import load_parts  # imports the models, which no test runner needs

        started = time.perf_counter()
        parts = load_parts(ref, config_of(options))
        engine = cls(
            parts.runner,
            parts.tokenizer,
            parts.config,
            max_seq_len=parts.max_seq_len,
            model_name=parts.name,
            sampler=parts.sampler,
        )
        logger.info(
            "%s is ready after %.1f s; what constraints need is started in the background",
            parts.name,
            time.perf_counter() - started,
        )
        engine._grammar.warm_up()  # whoever constrains first waits less
        engine._freeze_objects()
        return engine

    # --- used by clients, from any thread ---------------------------------------------------

    def open(
        self,
        options: RunOptions,
        sink: EventSink,
        resolved: dict[int, NodeResult] | None = None,
        failed: dict[int, UmbelError] | None = None,
    ) -> EngineSession:
        """Start a run whose events go to `sink`, on the engine's thread, after each step.

        Nodes in `resolved` or `failed` have ended in an earlier run of the same program: when a
        piece brings them, they are taken as done, without an event. Raises EngineStoppedError.
        """
        run = self.core.executor.open(options, sink, resolved or {}, failed or {})
        with self._wake:
            if self._drain_until is not None and not self._stopping:
                raise EngineStoppedError("the engine is closing: it takes no new runs")
            self.post(lambda: self.core.executor.register(run))
        return EngineSession(_Link(self, run))

    def close(self, drain: float = 0.0) -> None:
        """Take no new runs, let those that are here end within `drain` seconds, and stop.

        What has not ended then (with 0, at once) fails with EngineStoppedError. Idempotent: the
        shortest time of several calls counts. Called on the engine's own thread, by a sink, it
        returns at once, and the rest follows.
        """
        with self._wake:
            until = time.monotonic() + drain
            if self._drain_until is None or until < self._drain_until:
                self._drain_until = until
            self._stopping = self._stopping or drain <= 0
            self._wake.notify_all()
        if self._thread is None:
            while not self._is_drained() and not self._stopped:
                if not self.step():
                    time.sleep(0.001)  # something is being compiled on another thread
            self._shut_down()
        elif self._owner is not threading.current_thread():
            self.stopped.wait()
            if not self._watch.is_abandoned:  # else it may hang for good
                self._thread.join()

    def _is_drained(self) -> bool:
        """Whether the engine is closing and has nothing left to wait for."""
        until = self._drain_until
        if until is None:
            return False
        return time.monotonic() >= until or not (self.core.executor.runs or self._inbox)

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and where things stand; see engine_stats."""
        return self.core.stats()

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """What each token id spells."""
        return self.tokenizer.token_bytes

    @property
    def stop_cause(self) -> BaseException | None:
        """Why the engine stopped, where that was nobody's wish."""
        return self._cause

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a literal text has by itself."""
        return len(self.tokenizer.encode_text(text))

    def reset_cache(self) -> int:
        """Forget every cached prefix and return how many slots came free; from any thread.

        Raises EngineError while requests are running, EngineStoppedError.
        """
        done: Future[int] = Future()

        def reset() -> None:
            try:
                done.set_result(self.core.scheduler.reset_cache())
            except EngineError as error:  # its caller's alone
                done.set_exception(error)
            except BaseException as error:  # the engine's end; the caller must not wait for it
                done.set_exception(error)
                raise

        if self._owner is threading.current_thread():
            reset()
        else:
            self.post(reset)
            if self._thread is None:
                self._run_commands()
        return done.result()

    def post(self, command: Callable[[], None]) -> None:
        """Run a command on the engine's thread before its next step; raises EngineStoppedError."""
        with self._wake:
            if self._stopping:
                raise self._stopped_error()
            self._inbox.append(command)
            self._wake.notify_all()

    def post_if_running(self, command: Callable[[], None]) -> None:
        """Post a command that has nothing left to do once the engine has stopped."""
        with self._wake:
            if not self._stopping:
                self._inbox.append(command)
                self._wake.notify_all()

    # --- the loop ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Run commands and one forward pass; return whether there may be more to do at once."""
        started = time.perf_counter()
        self._run_commands()
        goes_on = self.core.step(started)
        return goes_on or bool(self._inbox)

    def _run_commands(self) -> None:
        """Run what was posted; with overlap, no longer than the device has work meanwhile.

        A device that has none waits for a few milliseconds of commands, not for all of them.
        """
        until = time.perf_counter() + _COMMANDS_S if self.core.overlaps else math.inf
        while self._inbox:
            self._inbox.popleft()()
            if time.perf_counter() > until and self.core.device_is_idle:
                break

    def _loop(self) -> None:
        try:
            while not self._is_drained():
                if self.step():
                    continue
                with self._wake:
                    if self._inbox or self._is_drained():
                        continue
                    wait = self._seconds_to_wait()
                    if wait > 0:
                        self._wake.wait(wait)
        except StepAbandonedError:
            return  # another thread has told everybody, and nothing is ours any more
        except BaseException as cause:
            logger.exception("the engine stopped")
            self._cause = cause
        self._shut_down()

    def _seconds_to_wait(self) -> float:
        """Return how long nothing will be due, if no command comes."""
        wait = _MAX_WAIT_S
        deadline = self.core.executor.next_deadline()
        for until in (deadline, self._drain_until):
            if until is not None:
                wait = min(wait, until - time.monotonic())
        return wait

    def _give_up(self, cause: EngineError) -> None:
        """End the engine whose thread is stuck in a pass; called on the watchdog's thread.

        The pass may still be running, so its slots and its memory stay as they are.
        """
        logger.error("the engine stopped: %s", cause)
        self._cause = cause
        self._owner = threading.current_thread()
        self._shut_down(release=False)

    def _shut_down(self, release: bool = True) -> None:
        """Fail what has not ended, and release everything. Idempotent."""
        with self._wake:
            self._stopping = True
            if self._stopped:
                return
            self._stopped = True
        while self._inbox:
            command = self._inbox.popleft()
            try:
                command()
            except Exception:  # the thread's edge: the other commands have clients that wait
                logger.exception("a command failed while the engine stopped")
        self.core.stop(self._stopped_error(), release=release)
        if self._owns_grammar:
            self._grammar.close()
        if release:
            self._give_memory_back()
        self._watch.close()
        self.stopped.set()

    def _freeze_objects(self) -> None:
        """Have the garbage collector pass over what is there until the engine is closed.

        To look through all that torch and the model brought takes it a tenth of a second and more,
        and a step waits for that. There is one collector: an engine that is closed ends this for
        all others, which are only slower by it.
        """
        gc.collect()
        gc.freeze()
        self._froze_objects = True

    def _give_memory_back(self) -> None:
        """Free what an error holds, and hand what is free to the next engine or process."""
        if self._cause is not None:
            _clear_frames(self._cause)
        if self._froze_objects:
            gc.unfreeze()
        try:
            free_cached_memory()
        except Exception:  # the thread's edge: a device that is lost takes no calls
            logger.debug("cached memory could not be given back", exc_info=True)

    def _stopped_error(self) -> EngineStoppedError:
        error = EngineStoppedError("the engine is no longer running")
        error.__cause__ = self._cause
        return error


def _clear_frames(cause: BaseException) -> None:
    """Empty the frames that an error and those before it came through: they hold the model."""
    error: BaseException | None = cause
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Link:
    """A session's way to the engine: commands for its thread."""

    def __init__(self, engine: Engine, run: ProgramRun) -> None:
        self._engine, self._run = engine, run

    def prepare(self, piece: RequestGraph) -> None:
        encode_ahead(self._engine.core.executor.rows, piece)

    def extend(self, piece: RequestGraph, failed: Mapping[int, UmbelError]) -> None:
        engine = self._engine
        engine.post(lambda: engine.core.executor.extend(self._run, piece, failed))

    def cancel(self, nodes: list[int] | None) -> None:
        self._engine.post_if_running(lambda: self._engine.core.executor.cancel(self._run, nodes))

    def close(self) -> None:
        self._engine.post_if_running(lambda: self._engine.core.executor.close(self._run))
