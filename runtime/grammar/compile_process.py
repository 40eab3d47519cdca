"""The parent's side of the compile workers: starts, asks, and kills those that take too long.

Knows pipes and clocks; what a job means is the worker's and the caller's business. Replies of any
size are read without the interpreter's lock, which the engine's thread needs.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import LifoQueue
from typing import IO, Any, NamedTuple

from umbel.lang.errors import ConstraintError

from ..vocabulary import Vocabulary
from .compile_worker import read_message, write_message
from .packed_bytes import PackedBytes

_SCRIPT = Path(__file__).with_name("compile_worker.py")
_START_S = 30.0  # on top of a job's own time, for a child that starts on a busy machine


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: socket.socket  # unlike a pipe, it gives a large part in one call


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
        self._running: set[_Child] = set()
        self._is_closed = False

    def run(self, job: str, *inputs: Any, timeout_s: float) -> tuple[Any, ...]:
        """Return the worker's reply. Raises ConstraintError when it runs out of time or memory."""
        child = self._idle.get()
        try:
            patience = timeout_s if child is not None else timeout_s + _START_S
            child = child or self._start()
            reply, is_late = _ask(child, (job, *inputs), patience)
            if reply is None or reply[0] == "memory":
                self._stop(child)  # after running out of memory, what it still holds is of no use
                child = None
                if self._is_closed:
                    raise ConstraintError("the grammar compiler is closed")
                limit = f"{timeout_s:g} s" if is_late else f"{self._memory} (or its stack)"
                raise ConstraintError(
                    f"compiling the constraint took more than {limit}: simplify it, or name "
                    "another engine"
                )
            return reply
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """End the children and what they work on; later jobs raise ConstraintError."""
        with self._lock:
            self._is_closed = True
            running = list(self._running)
        for child in running:
            child.process.kill()  # whoever waits for its reply finds the pipe closed
        for idle in [self._idle.get() for _ in range(self._num_processes)]:
            if idle is not None:
                self._stop(idle)
            self._idle.put(None)

    def _start(self) -> _Child:
        # -P: this folder has modules that are named like the libraries they wrap
        with self._lock:
            if self._is_closed:
                raise ConstraintError("the grammar compiler is closed")
            replies, childs_end = socket.socketpair()
            with childs_end:
                process = subprocess.Popen(
                    [sys.executable, "-P", str(_SCRIPT)],
                    stdin=subprocess.PIPE,
                    stdout=childs_end.fileno(),
                    start_new_session=True,  # Ctrl-C is the parent's to handle
                )
            assert process.stdin is not None
            child = _Child(process, process.stdin, replies)
            self._running.add(child)
        with contextlib.suppress(OSError):  # killed already: asking it will tell
            write_message(child.requests, self._setup)
        return child

    def _stop(self, child: _Child) -> None:
        with self._lock:
            self._running.discard(child)
        child.process.kill()
        child.process.wait()
        child.replies.close()
        with contextlib.suppress(OSError):  # flushes to a process that is gone
            child.requests.close()


def _ask(child: _Child, message: Any, patience_s: float) -> tuple[tuple[Any, ...] | None, bool]:
    """Return (the reply, or None if the child is gone; whether it was killed for being late)."""
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        child.process.kill()

    def read_into(data: memoryview) -> int:
        return child.replies.recv_into(data, flags=socket.MSG_WAITALL)

    timer = threading.Timer(patience_s, give_up)
    timer.start()
    try:
        write_message(child.requests, message)
        return read_message(read_into), is_late.is_set()
    except (EOFError, OSError):
        return None, is_late.is_set()
    finally:
        timer.cancel()
