"""The child process that builds automata: run as a script, speaks pickles with arrays beside them.

A build can take seconds of Python and gigabytes; here it holds no lock of the engine's, has a
memory limit, and can crash or be killed. Knows no constraints and no requests, only its jobs.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

ReadInto = Callable[[memoryview], int | None]  # how many bytes came; none at the end

_HEADER = struct.Struct("<QQ")  # bytes of the pickle, and arrays beside it
#: exit code of a worker that has no memory left for its next message
OUT_OF_MEMORY = 77
_TAKEN = ("taken",)
_LONGEST_ERROR = 10_000  # characters; a pipe takes so much while nobody reads
_PROBE_STACK = 4 * 2**20  # half of what a thread of the engine has


def write_message(pipe: IO[bytes], message: Any) -> None:
    """Send one message: its pickle, and its arrays beside it."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    parts = [array.raw() for array in arrays]
    pipe.write(_HEADER.pack(len(data), len(parts)))
    pipe.write(struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts)))
    pipe.write(data)
    for part in parts:
        pipe.write(part)
    pipe.flush()


def read_message(read_into: ReadInto) -> Any:
    """Receive one message. Raises EOFError when the other side is gone.

    Its arrays are the memory they were read into: nothing is copied, and as long as reading lets
    go of the interpreter's lock, a message of any size holds up no other thread.
    """
    length, num_arrays = _HEADER.unpack(_read(read_into, _HEADER.size))
    sizes = struct.unpack(f"<{num_arrays}Q", _read(read_into, 8 * num_arrays))
    data = _read(read_into, length)
    return pickle.loads(data, buffers=[_read(read_into, size) for size in sizes])


def _read(read_into: ReadInto, num_bytes: int) -> memoryview:
    data = np.empty(num_bytes, np.uint8).data  # a bytearray would be set to zeros first
    left = data
    while left:
        count = read_into(left)
        if not count:
            raise EOFError
        left = left[count:]
    return data


def _bare_packages() -> None:
    """Make this folder importable under its own name, without what the packages pull in (torch)."""
    grammar = Path(__file__).parent
    root = grammar.parent.parent
    for name, path in (
        ("umbel", root),
        ("umbel.lang", root / "lang"),
        ("umbel.runtime", grammar.parent),
        ("umbel.runtime.grammar", grammar),
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package


def _limit_memory(num_bytes: int) -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


class Worker:
    """Does one job after the other for one vocabulary."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, eos_id: int) -> None:
        self._token_bytes = token_bytes
        self.vocab_size = vocab_size
        self._eos_id = eos_id
        self._token_rows: Any = None
        self._trie: Any = None
        self._vocabulary: Any = None
        self._tokenizers: Any = None

    def prepare(self, job: str) -> tuple[Any, ...]:
        """Load what a kind of job needs, so that it takes none of a constraint's time: ("ok",)."""
        match job:
            case "dfa":
                self._load_rows()
            case "outlines":
                import outlines_core  # noqa: F401  its vocabulary is made with the first sentinel
            case "probe":
                self._load_tokenizers()
        return ("ok",)

    def dfa(self, steps: Any, seconds: float, max_row_bytes: int) -> tuple[Any, ...]:
        """Build an automaton: ("ok", transitions, accepting, rows, alive, forced texts)."""
        from umbel.lang.regex_syntax import from_steps
        from umbel.runtime.grammar.byte_dfa import (
            Budget,
            BuildTimeoutError,
            TooManyStatesError,
            build_dfa,
            without_bytes,
        )
        from umbel.runtime.grammar.forced_text import find_forced_texts, pack_texts

        self._load_rows()
        budget = Budget(deadline=time.monotonic() + seconds)
        try:
            dfa = without_bytes(
                build_dfa(from_steps(steps), budget), self._token_rows.usable_bytes, budget
            )
            row_bytes = 4 * self._token_rows.num_words
            if dfa.num_states * row_bytes > max_row_bytes:
                raise TooManyStatesError(f"{dfa.num_states} states of {row_bytes} bytes")
            rows = self._token_rows.build(dfa.transitions, dfa.accepting, budget.deadline)
        except TooManyStatesError as error:
            return "too_many", str(error)
        except BuildTimeoutError as error:
            return "too_long", str(error)
        texts = pack_texts(find_forced_texts(self._trie, dfa))
        return "ok", dfa.transitions, dfa.accepting, *rows, texts

    def outlines(self, pattern: str, sentinel: str) -> tuple[Any, ...]:
        """Build an outlines-core index, to be entered after the sentinel: ("ok", TokenTable)."""
        from umbel.runtime.grammar.token_table import read_index

        try:
            index = self.outlines_index(pattern, sentinel)
        except (ValueError, TypeError) as error:
            return "error", str(error)
        return "ok", read_index(index, self.vocab_size, self._eos_id)

    def outlines_index(self, pattern: str, sentinel: str) -> Any:
        """Return an index as outlines-core builds it. The sentinel's id is vocab_size.

        Raises ValueError or TypeError.
        """
        import outlines_core

        if self._vocabulary is None:
            tokens: dict[bytes, list[int]] = {}
            for token_id, data in enumerate(self._token_bytes):
                if data and token_id != self._eos_id:
                    tokens.setdefault(data, []).append(token_id)
            tokens[sentinel.encode()] = [self.vocab_size]
            self._vocabulary = outlines_core.Vocabulary(self._eos_id, tokens)
        return outlines_core.Index(pattern, self._vocabulary)

    def probe(self, kind: Any, text: str, lenient: bool, seconds: float) -> tuple[Any, ...]:
        """Compile with llguidance in a fork, to see if that ends, and how.

        ("ok",), ("error", text), ("too_long",) or ("no_memory",), where its memory or its stack was
        not enough. A fork starts at once with what this process has loaded, and can be killed.
        """
        self._load_tokenizers()
        receive, send = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                # else who reads the parent's replies would not see that it ended
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                reply = self._compile_here(kind, text, lenient, seconds)
                os.write(send, pickle.dumps(reply))
            finally:
                os._exit(0)  # nothing of this process is the fork's to flush or to close
        os.close(send)
        with open(receive, "rb") as replies:
            is_late = not select.select([replies], [], [], seconds)[0]
            if is_late:
                os.kill(pid, signal.SIGKILL)
            data = replies.read()
        os.waitpid(pid, 0)
        if is_late:
            return ("too_long",)
        found: tuple[Any, ...] = pickle.loads(data) if data else ("no_memory",)
        return found

    def _compile_here(self, kind: Any, text: str, lenient: bool, seconds: float) -> tuple[Any, ...]:
        """Compile in a fork, on a small stack, for no longer than its parent waits for it."""
        import resource

        from umbel.lang.errors import ConstraintError
        from umbel.runtime.grammar.llguidance import compile_llguidance

        # the parent may be killed before it can kill this one
        most = math.ceil(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        reply: list[tuple[Any, ...]] = []

        def compile_it() -> None:
            try:
                compile_llguidance(self._tokenizers, kind, text, lenient=lenient)
            except ConstraintError as error:
                reply.append(("error", str(error)[:_LONGEST_ERROR]))
            except MemoryError:
                reply.append(("no_memory",))

        threading.stack_size(_PROBE_STACK)
        thread = threading.Thread(target=compile_it)
        thread.start()
        thread.join()
        return reply[0] if reply else ("ok",)

    def _load_rows(self) -> None:
        from umbel.runtime.grammar.token_rows import TokenRows
        from umbel.runtime.grammar.token_trie import TokenTrie

        if self._token_rows is None:
            self._token_rows = TokenRows(self._token_bytes, self.vocab_size)
            self._trie = TokenTrie(self._token_bytes)

    def _load_tokenizers(self) -> None:
        from umbel.runtime.grammar.llguidance import LLGuidanceTokenizers
        from umbel.runtime.vocabulary import Vocabulary

        if self._tokenizers is None:
            ids = {data: i for i, data in enumerate(self._token_bytes) if len(data) == 1}
            vocabulary = Vocabulary(
                tuple(self._token_bytes),
                frozenset(i for i, data in enumerate(self._token_bytes) if not data),
                (self._eos_id,),
                self.vocab_size,
                lambda text: [ids.get(bytes([b]), self._eos_id) for b in text.encode()],
            )
            self._tokenizers = LLGuidanceTokenizers(vocabulary)
            self._tokenizers.for_kind("regex")  # with the one for JSON, which it is made of


def serve(read_into: ReadInto, replies: IO[bytes]) -> None:
    """Answer until the pipe closes. The first message is (memory limit, PackedBytes, ids, EOS).

    Each job is answered twice: that it was taken, and what came of it.
    """
    memory_bytes, tokens, vocab_size, eos_id = read_message(read_into)
    _limit_memory(memory_bytes)
    worker = Worker(list(tokens.strings()), vocab_size, eos_id)
    jobs: dict[str, Callable[..., tuple[Any, ...]]] = {
        "prepare": worker.prepare,
        "dfa": worker.dfa,
        "outlines": worker.outlines,
        "probe": worker.probe,
    }
    while True:
        try:
            job, *inputs = read_message(read_into)
        except EOFError:
            return
        write_message(replies, _TAKEN)
        try:
            reply = jobs[job](*inputs)
        except MemoryError:
            reply = ("memory",)
        write_message(replies, reply)


if __name__ == "__main__":
    _bare_packages()
    with open(sys.stdin.fileno(), "rb", closefd=False) as stdin:
        try:
            serve(stdin.readinto, sys.stdout.buffer)
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)
