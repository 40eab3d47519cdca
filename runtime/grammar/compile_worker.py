"""The child process that builds automata: run as a script, speaks pickles over its pipes.

A build can take seconds of Python and gigabytes; here it holds no lock of the engine's, has a
memory limit, and can be killed. Knows no constraints and no requests, only these two jobs.
"""

from __future__ import annotations

import pickle
import struct
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

_LENGTH = struct.Struct("<Q")


def write_message(pipe: IO[bytes], message: Any) -> None:
    """Send one pickled message."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> Any:
    """Receive one message. Raises EOFError when the other side is gone."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


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
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._token_rows: Any = None
        self._vocabulary: Any = None

    def dfa(self, node: Any, seconds: float, max_row_bytes: int) -> tuple[Any, ...]:
        """Build an automaton and its rows: ("ok", transitions, accepting, rows, alive)."""
        from umbel.runtime.grammar.byte_dfa import (
            Budget,
            BuildTimeoutError,
            TooManyStatesError,
            build_dfa,
            without_bytes,
        )
        from umbel.runtime.grammar.token_trie import TokenRows

        if self._token_rows is None:
            self._token_rows = TokenRows(self._token_bytes, self._vocab_size)
        budget = Budget(deadline=time.monotonic() + seconds)
        try:
            dfa = without_bytes(build_dfa(node, budget), self._token_rows.usable_bytes, budget)
            row_bytes = 4 * self._token_rows.num_words
            if dfa.num_states * row_bytes > max_row_bytes:
                raise TooManyStatesError(f"{dfa.num_states} states of {row_bytes} bytes")
            rows = self._token_rows.build(dfa.transitions, dfa.accepting, budget.deadline)
        except TooManyStatesError as error:
            return "too_many", str(error)
        except BuildTimeoutError as error:
            return "too_long", str(error)
        return "ok", dfa.transitions, dfa.accepting, *rows

    def outlines(self, pattern: str, sentinel: str) -> tuple[Any, ...]:
        """Build an outlines-core index: ("ok", pickled index). The sentinel's id is vocab_size."""
        import outlines_core

        if self._vocabulary is None:
            tokens: dict[bytes, list[int]] = {}
            for token_id, data in enumerate(self._token_bytes):
                if data and token_id != self._eos_id:
                    tokens.setdefault(data, []).append(token_id)
            tokens[sentinel.encode()] = [self._vocab_size]
            self._vocabulary = outlines_core.Vocabulary(self._eos_id, tokens)
        try:
            index = outlines_core.Index(pattern, self._vocabulary)
        except (ValueError, TypeError) as error:
            return "error", str(error)
        return "ok", pickle.dumps(index)


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer until the pipe closes. The first message is (memory limit, *Worker's arguments)."""
    memory_bytes, *arguments = read_message(requests)
    _limit_memory(memory_bytes)
    worker = Worker(*arguments)
    while True:
        try:
            job, *inputs = read_message(requests)
        except EOFError:
            return
        try:
            reply = worker.dfa(*inputs) if job == "dfa" else worker.outlines(*inputs)
        except MemoryError:
            reply = ("memory",)
        write_message(replies, reply)


if __name__ == "__main__":
    _bare_packages()
    serve(sys.stdin.buffer, sys.stdout.buffer)
