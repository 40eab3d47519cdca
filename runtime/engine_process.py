"""An engine in a process of its own, with the same client: sessions, events, counters, the end.

The Python of programs and of a server no longer shares an interpreter with the engine's host work,
and a device that hangs can be killed with its process. Knows processes and messages; no engine.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, Self

from umbel.lang.errors import (
    EngineError,
    EngineStoppedError,
    ModelLoadError,
    ProgramError,
    UmbelError,
    WireError,
    from_wire,
    to_wire,
)
from umbel.lang.graph import RequestGraph
from umbel.lang.results import (
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    RunOptions,
)

from .config import EngineConfig, config_of
from .engine_messages import (
    FROM_ENGINE,
    Alive,
    Answer,
    Ask,
    CancelSession,
    Channel,
    CloseSession,
    ExtendSession,
    ForgetSession,
    FromEngine,
    Happened,
    LoadFailed,
    Logged,
    OpenSession,
    Ready,
    SetUp,
    Stop,
    Stopped,
    ToEngine,
)
from .engine_session import EngineSession
from .log_relay import log_here, log_levels
from .program_run import EventSink

logger = logging.getLogger(__name__)

_FROM_MODEL = "umbel.runtime.engine_worker:from_model"
_EXIT_S = 10.0  # that the process has to end once it should
_LOOK_S = 0.2
_MAX_ALIVE_S = 5.0


class EngineClient:
    """Starts an engine's process and runs graphs on it; see Engine for what each method promises.

    `factory` is a `module:function` that is called in the new process, with `arguments`, and
    returns the engine. Sinks are called on one thread of this process, and as in a process of one,
    the engine waits for a sink that is slow: a bounded number of events is on the way.

    A process that ends without being asked, or says nothing for `step_timeout_s` (and is killed
    for that), fails all nodes that have not ended with EngineStoppedError, whose cause says how it
    ended. It ends itself when this process does.

    Raises what the factory raises, as far as it is umbel's, else ModelLoadError.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        *,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = EngineConfig() if config is None else config
        self.model_name = ""
        self.max_seq_len = 0
        self.token_bytes: Sequence[bytes] = ()
        self._silence_s = self.config.step_timeout_s or 0.0
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._num_runs = 0
        self._questions: dict[int, Future[Any]] = {}
        self._num_questions = 0
        self._kept: deque[FromEngine] = deque()  # read while the reader waited for an answer
        self._listens_since = 0.0  # on the monotonic clock; 0.0: it does not listen
        self._kill_at: float | None = None
        self._last_stats: dict[str, float] = {}
        self._is_closing = False
        self._is_stopped = False
        self._cause: UmbelError | None = None
        self._load_error: UmbelError | None = None
        self._up = threading.Event()
        self._ended = threading.Event()
        self._process, self._channel = _spawn()
        alive_s = min(self._silence_s / 4, _MAX_ALIVE_S)
        self._send(SetUp(factory, dict(arguments), log_levels(), alive_s))
        self._reader = threading.Thread(target=self._read, name="umbel-engine-client", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name="umbel-engine-watch", daemon=True).start()
        try:
            self._up.wait()
        except BaseException:  # Ctrl-C while the model loads
            self._process.kill()
            raise
        if self._load_error is not None:
            self._ended.wait()
            raise self._load_error

    @classmethod
    def from_model(cls, ref: str, **options: Any) -> Self:
        """Load a model by reference in a process of its own; options are EngineConfig's fields.

        Raises ModelLoadError, EngineConfigError.
        """
        config = config_of(options)
        arguments = {"ref": ref, "options": dataclasses.asdict(config)}
        return cls(_FROM_MODEL, arguments, config=config)

    @property
    def process_id(self) -> int:
        """The engine's process."""
        return self._process.pid

    def open(
        self,
        options: RunOptions,
        sink: EventSink,
        resolved: dict[int, NodeResult] | None = None,
        failed: dict[int, UmbelError] | None = None,
    ) -> EngineSession:
        """Start a run whose events go to `sink`, on one thread; see Engine.open."""
        resolved, failed = resolved or {}, failed or {}
        with self._lock:
            if self._is_stopped:
                raise self._stopped_error()
            if self._is_closing:
                raise EngineStoppedError("the engine is closing: it takes no new runs")
            run = _Run(self._num_runs, sink, frozenset((*resolved, *failed)))
            self._num_runs += 1
            self._runs[run.number] = run
        wire = {node: to_wire(error) for node, error in failed.items()}
        self._send(OpenSession(run.number, options, resolved, wire))
        return EngineSession(_Link(self, run))

    def stats(self) -> dict[str, float]:
        """Return the engine's counters; see Engine.stats. Of one that has stopped, the last."""
        with self._lock:
            if self._is_stopped:
                return dict(self._last_stats)
        with suppress(EngineStoppedError):  # it has stopped since
            self._last_stats = self._ask("stats")
        return dict(self._last_stats)

    def reset_cache(self) -> int:
        """Forget every cached prefix; see Engine.reset_cache."""
        freed: int = self._ask("reset_cache")
        return freed

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a literal text has by itself. Raises EngineStoppedError."""
        num: int = self._ask("count_tokens", text)
        return num

    def close(self, drain: float = 0.0) -> None:
        """Take no new runs, let those that are here end within `drain` seconds, and stop.

        See Engine.close. A process that does not end by itself is killed.
        """
        with self._lock:
            until = time.monotonic() + drain + _EXIT_S
            self._kill_at = until if self._kill_at is None else min(self._kill_at, until)
            self._is_closing = True
        self._send(Stop(drain))
        if threading.current_thread() is not self._reader:
            self._ended.wait()

    # --- what sessions do -----------------------------------------------------------------------

    def extend(self, run: _Run, piece: RequestGraph, failed: Mapping[int, UmbelError]) -> None:
        """Hand over more of a run's graph; raises EngineStoppedError, ProgramError."""
        message = ExtendSession(run.number, piece, {n: to_wire(e) for n, e in failed.items()})
        with self._lock:
            if self._is_stopped:
                raise self._stopped_error()
            nodes = {node.id for node in piece.nodes} - run.ended_before - failed.keys()
            run.open |= nodes
        try:
            self._send(message)
        except UnicodeEncodeError as error:
            with self._lock:
                run.open -= nodes
            raise ProgramError(
                f"the program's text can't be sent to the engine's process, it is not Unicode: "
                f"{error}"
            ) from None

    def cancel(self, run: _Run, nodes: list[int] | None) -> None:
        """Cancel nodes of a run."""
        self._send(CancelSession(run.number, nodes))

    def close_run(self, run: _Run) -> None:
        """Note that a run gets no more pieces."""
        self._send(CloseSession(run.number))
        with self._lock:
            run.is_closed = True
            is_over = self._forget_if_over(run)
        if is_over:
            self._send(ForgetSession(run.number))

    def _forget_if_over(self, run: _Run) -> bool:
        if run.is_closed and not run.open:
            return self._runs.pop(run.number, None) is not None
        return False

    # --- messages -------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        try:
            self._channel.send(message)
        except OSError:  # it is gone; the reader sees that and tells all who wait
            logger.debug("the engine's process took no %s", type(message).__name__)

    def _ask(self, what: Literal["stats", "reset_cache", "count_tokens"], text: str = "") -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            if self._is_stopped:
                raise self._stopped_error()
            number = self._num_questions
            self._num_questions += 1
            self._questions[number] = answer
        self._send(Ask(number, what, text))
        if threading.current_thread() is self._reader:  # a sink asks: what comes meanwhile is kept
            while not answer.done():
                message = self._receive()
                if message is None:
                    raise EngineStoppedError("the engine's process ended before it answered")
                if isinstance(message, Answer):
                    self._take(message)
                else:
                    self._kept.append(message)
        return answer.result()

    def _receive(self) -> FromEngine | None:
        self._listens_since = time.monotonic()
        data = self._channel.receive()
        self._listens_since = 0.0
        return None if data is None else FROM_ENGINE.decode(data)

    def _read(self) -> None:
        try:
            while True:
                message = self._kept.popleft() if self._kept else self._receive()
                if message is None:
                    break
                self._take(message)
        except Exception:  # the thread's edge
            logger.exception("the engine's process could not be followed; it is ended")
        self._end()

    def _take(self, message: FromEngine) -> None:
        match message:
            case Happened(runs=runs):
                for number, events in runs:
                    self._deliver(number, events)
            case Answer(number=number, value=value, error=error):
                with self._lock:
                    answer = self._questions.pop(number)
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(from_wire(error))
            case Alive():
                pass
            case Logged():
                log_here(message)
            case Ready():
                self.model_name, self.max_seq_len = message.model_name, message.max_seq_len
                self.token_bytes = message.token_bytes
                self._up.set()
            case LoadFailed(error=error):
                self._load_error = _load_error(error)
            case Stopped(cause=cause, stats=stats):
                self._cause = None if cause is None else from_wire(cause)
                self._last_stats = stats

    def _deliver(self, number: int, events: list[Event]) -> None:
        run = self._runs.get(number)
        if run is None:
            return
        ended = {e.node for e in events if isinstance(e, NodeFinished | NodeFailed)}
        if ended:
            with self._lock:
                run.open -= ended
                is_over = self._forget_if_over(run)
            if is_over:
                self._send(ForgetSession(number))
        if not run.tell(events):
            self._send(CancelSession(number, None))

    # --- the end --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """End a process that has to be ended."""
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            since = self._listens_since
            if self._kill_at is not None and now >= self._kill_at:
                self._process.kill()
            elif self._silence_s and self._up.is_set() and since and now - since > self._silence_s:
                self._cause = EngineError(
                    f"the engine's process said nothing for {self._silence_s:g} s "
                    "(step_timeout_s) and was killed"
                )
                self._process.kill()

    def _end(self) -> None:
        """See the process off and tell everybody who waits. On the reader's thread, once."""
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with self._lock:
            self._is_stopped = True
            if self._cause is None and not (self._is_closing and code == 0):
                self._cause = EngineError(f"the engine's process {_how_it_ended(code)}")
            runs, self._runs = list(self._runs.values()), {}
            questions, self._questions = list(self._questions.values()), {}
        if not self._up.is_set() and self._load_error is None:
            self._load_error = ModelLoadError(
                f"the engine's process {_how_it_ended(code)} while it loaded the model"
            )
        self._up.set()
        error = self._stopped_error()
        told = to_wire(error)
        for run in runs:
            run.tell([NodeFailed(node, told) for node in sorted(run.open)])
        for question in questions:
            question.set_exception(error)
        self._channel.close()
        self._ended.set()

    def _stopped_error(self) -> EngineStoppedError:
        error = EngineStoppedError("the engine is no longer running")
        error.__cause__ = self._cause
        return error


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    """What the client keeps of a run. `open` are its nodes that have not ended."""

    number: int
    sink: EventSink | None  # None: it raised
    ended_before: frozenset[int]
    open: set[int] = dataclasses.field(default_factory=set)
    is_closed: bool = False

    def tell(self, events: Sequence[Event]) -> bool:
        """Hand events to the sink; return whether it took them."""
        if not events or self.sink is None:
            return True
        try:
            self.sink(events)
        except BaseException:  # the user's side: whatever it raises must not stop the client
            logger.exception("the event sink of run %d failed; the run is cancelled", self.number)
            self.sink = None
            return False
        return True


class _Link:
    """A session's way to the engine's process."""

    def __init__(self, client: EngineClient, run: _Run) -> None:
        self._client, self._run = client, run

    def prepare(self, piece: RequestGraph) -> None:
        pass  # the engine's process does

    def extend(self, piece: RequestGraph, failed: Mapping[int, UmbelError]) -> None:
        self._client.extend(self._run, piece, failed)

    def cancel(self, nodes: list[int] | None) -> None:
        self._client.cancel(self._run, nodes)

    def close(self) -> None:
        self._client.close_run(self._run)


def _spawn() -> tuple[subprocess.Popen[bytes], Channel]:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        boot = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from umbel.runtime.engine_worker import main; main({fd}, {os.getpid()})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            start_new_session=True,  # Ctrl-C is this process's to handle
        )
    return process, Channel(ours)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "a signal"
    hint = ": out of memory?" if -code == signal.SIGKILL else ""
    return f"was killed by {name} ({-code}){hint}"


def _load_error(wire: WireError) -> UmbelError:
    error = from_wire(wire)
    if type(error).__name__ == wire.type:
        return error
    return ModelLoadError(f"the model could not be loaded: {wire.type}: {wire.message}")
