"""The parent's side of the compile workers: starts, asks, and kills those that take too long.

Knows pipes and clocks; what a job means is the worker's and the caller's business. Replies of any
size are read without the interpreter's lock, which the engine's thread needs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue
from typing import IO, Any, NamedTuple

from umbel.lang.errors import ConstraintError

from ..vocabulary import Vocabulary
from .compile_worker import OUT_OF_MEMORY, read_message, write_message
from .packed_bytes import PackedBytes
from .time_limit import TooLateError, closed_error, took_more_than

_SCRIPT = Path(__file__).with_name("compile_worker.py")
_START_S = 30.0  # for a child to start and to load what a kind of job needs, on a busy machine
_END_S = 5.0  # for a child that has closed its pipe and is still being taken down
# how a child ends that has no memory, or stack, for more: by itself, or aborted by a library in it
_MEMORY_ENDS = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: socket.socket  # unlike a pipe, it gives a large part in one call
    prepared: set[str] = field(default_factory=set)  # jobs that find all they need loaded

    def kill(self) -> None:
        """End it, and what it has forked: a fork holds its end of `replies` open."""
        if self.process.returncode is None:  # not waited for yet, so the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class _Answer(NamedTuple):
    """What came of asking a child; without a reply, the child is gone."""

    reply: tuple[Any, ...] | None
    is_taken: bool  # the child had read the job whole
    is_late: bool  # it was killed for that


class CompileProcesses:
    """A few child processes for one vocabulary, each started when the others are busy.

    Each runs one job at a time and is replaced when it had to be killed. Thread-safe.
    """

    def __init__(self, vocabulary: Vocabulary, memory_bytes: int, num_processes: int = 2) -> None:
        tokens = PackedBytes.of(vocabulary.token_bytes)
        self._setup = (memory_bytes, tokens, vocabulary.size, vocabulary.eos_ids[0])
        self._memory = f"{memory_bytes // 2**20} MiB of memory"
        # last in, first out: a second process starts only when the first has a job
        self._idle: LifoQueue[_Child | None] = LifoQueue()
        self._num_processes = num_processes
        for _ in range(num_processes):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._closing = threading.Lock()  # two that close would each wait for a child of the other
        self._running: set[_Child] = set()
        self._is_closed = False

    def run(self, job: str, *inputs: Any, timeout_s: float) -> tuple[Any, ...]:
        """Return the worker's reply.

        A child that ended before it took the job, while it was idle or as it started, is replaced
        once. Raises ConstraintError for a job that runs out of time or memory, or whose child ends;
        EngineStoppedError once closed.
        """
        child = self._idle.get()
        try:
            for is_last in (False, True):
                child = child or self._start()
                answer = _run(child, job, inputs, timeout_s)
                if answer.reply is not None and answer.reply[0] != "memory":
                    return answer.reply
                self._stop(child)  # after running out of memory, what it still holds is of no use
                ended, child = child, None
                if self._is_closed:
                    raise closed_error()
                if is_last or answer.is_taken or answer.is_late:
                    raise self._failure(answer, ended.process.returncode, timeout_s)
            raise AssertionError("the last time raises")
        finally:
            self._idle.put(child)

    def _failure(self, answer: _Answer, exit_code: int, timeout_s: float) -> ConstraintError:
        """Say why a job has no reply. The exit code is as `subprocess` gives it."""
        if answer.is_late:
            return TooLateError.of(timeout_s)
        if answer.reply is not None or exit_code in _MEMORY_ENDS:
            return self.memory_error()
        return ConstraintError(
            f"the process that compiled the constraint ended unexpectedly "
            f"({_described_end(exit_code)}): another one starts with the next constraint"
        )

    def memory_error(self) -> ConstraintError:
        """Return the error of a job that ran out of memory."""
        return took_more_than(f"{self._memory} (or its stack)")

    def close(self) -> None:
        """End the children and what they work on; they and later jobs raise EngineStoppedError."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for child in running:
            child.kill()  # whoever waits for its reply finds the pipe closed
        with self._closing:
            for idle in [self._idle.get() for _ in range(self._num_processes)]:
                if idle is not None:
                    self._stop(idle)
                self._idle.put(None)

    def _start(self) -> _Child:
        # -P: this folder has modules that are named like the libraries they wrap
        with self._lock:
            if self._is_closed:
                raise closed_error()
            replies, childs_end = socket.socketpair()
            with childs_end:
                process = subprocess.Popen(
                    [sys.executable, "-P", str(_SCRIPT)],
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it forks, and counts memory
                    stdin=subprocess.PIPE,
                    stdout=childs_end.fileno(),
                    start_new_session=True,  # Ctrl-C is the parent's; and `kill` ends all of it
                )
            assert process.stdin is not None
            child = _Child(process, process.stdin, replies)
            self._running.add(child)
        with contextlib.suppress(OSError):  # killed already: asking it will tell
            write_message(child.requests, self._setup)
        return child

    def _stop(self, child: _Child) -> None:
        """End a child, if it has not ended, and take its exit code."""
        with self._lock:
            self._running.discard(child)
        if _is_at_end(child.replies):  # it may end by itself yet, and then says why
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(_END_S)
        child.kill()
        child.process.wait()
        child.replies.close()
        with contextlib.suppress(OSError):  # flushes to a process that is gone
            child.requests.close()


def _is_at_end(replies: socket.socket) -> bool:
    try:
        return not replies.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # reset: it ended with a request unread
        return True


def _described_end(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if exit_code == -signal.SIGKILL:
        return f"{name}, from outside: by hand, or because the machine ran out of memory"
    return name


def _run(child: _Child, job: str, inputs: tuple[Any, ...], timeout_s: float) -> _Answer:
    """Ask for a job, and before the first of its kind for what such jobs need, beside its time."""
    if job not in child.prepared:
        answer = _ask(child, ("prepare", job), _START_S)
        if answer.reply is None or answer.reply[0] == "memory":
            return answer
        child.prepared.add(job)
    return _ask(child, (job, *inputs), timeout_s)


def _ask(child: _Child, message: Any, patience_s: float) -> _Answer:
    is_late = threading.Event()
    is_taken = False

    def give_up() -> None:
        is_late.set()
        child.kill()

    def read_into(data: memoryview) -> int:
        return child.replies.recv_into(data, flags=socket.MSG_WAITALL)

    timer = threading.Timer(patience_s, give_up)
    timer.start()
    try:
        write_message(child.requests, message)
        read_message(read_into)  # that it has the job
        is_taken = True
        return _Answer(read_message(read_into), is_taken, is_late.is_set())
    except (EOFError, OSError):
        return _Answer(None, is_taken, is_late.is_set())
    finally:
        timer.cancel()
