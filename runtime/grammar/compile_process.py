"""The parent's side of the compile worker: starts it, asks it, kills it when it takes too long.

Knows pipes and clocks; what a job means is the worker's and the caller's business.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, NamedTuple

from umbel.lang.errors import ConstraintError

from ..vocabulary import Vocabulary
from .compile_worker import read_message, write_message

_SCRIPT = Path(__file__).with_name("compile_worker.py")
_START_S = 30.0  # on top of a job's own time, for a child that starts on a busy machine


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: IO[bytes]


class CompileProcess:
    """One child process for one vocabulary, started on first use and again after a kill.

    Jobs run one at a time. Thread-safe.
    """

    def __init__(self, vocabulary: Vocabulary, memory_bytes: int) -> None:
        self._vocabulary = vocabulary
        self._memory_bytes = memory_bytes
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, job: str, *inputs: Any, timeout_s: float) -> tuple[Any, ...]:
        """Return the worker's reply. Raises ConstraintError when it runs out of time or memory."""
        with self._lock:
            if self._is_closed:
                raise ConstraintError("the grammar compiler is closed")
            patience = timeout_s if self._child is not None else timeout_s + _START_S
            child = self._child or self._start()
            if self._is_closed:  # by a close that saw no child to kill yet
                self._stop()
                raise ConstraintError("the grammar compiler is closed")
            timer = threading.Timer(patience, child.process.kill)
            timer.start()
            try:
                write_message(child.requests, (job, *inputs))
                reply: tuple[Any, ...] = read_message(child.replies)
            except (EOFError, OSError) as error:
                killed = not timer.is_alive()
                self._stop()
                limit = (
                    f"{timeout_s:g} s" if killed else f"{self._memory_bytes // 2**20} MiB of memory"
                )
                raise ConstraintError(
                    f"compiling the constraint took more than {limit}: simplify it, or name "
                    "llguidance as its engine"
                ) from error
            finally:
                timer.cancel()
            if reply[0] == "memory":
                self._stop()  # what is left of its memory is of no use
                raise ConstraintError(
                    f"compiling the constraint took more than {self._memory_bytes // 2**20} MiB of "
                    "memory: simplify it, or name llguidance as its engine"
                )
            return reply

    def close(self) -> None:
        """End the child; later jobs raise ConstraintError."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.process.kill()  # a job that runs now ends with it
        with self._lock:
            self._stop()

    def _start(self) -> _Child:
        # -P: this folder has modules that are named like the libraries they wrap
        process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        child = self._child = _Child(process, process.stdin, process.stdout)
        vocabulary = self._vocabulary
        setup = (
            self._memory_bytes,
            vocabulary.token_bytes,
            vocabulary.size,
            vocabulary.eos_ids[0],
        )
        write_message(child.requests, setup)
        return child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            child.process.wait()
            child.replies.close()
            with contextlib.suppress(OSError):  # flushes to a process that is gone
                child.requests.close()
