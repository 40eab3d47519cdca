"""Messages of the compile processes come whole, and none holds up other threads by its size."""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import outlines_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.lang.errors import ConstraintError, EngineStoppedError
from umbel.lang.regex_parser import parse
from umbel.lang.regex_syntax import NEVER, render, to_steps
from umbel.runtime.grammar import compile_process
from umbel.runtime.grammar.compile_process import CompileProcesses
from umbel.runtime.grammar.compile_worker import (
    OUT_OF_MEMORY,
    Worker,
    read_message,
    write_message,
)
from umbel.runtime.grammar.packed_bytes import PackedBytes
from umbel.runtime.grammar.token_table import START, TokenTable, read_index

from .regexes import random_regex
from .vocabularies import EOS, abc_vocabulary, byte_vocabulary, json_vocabulary

SENTINEL = "\U0010fffe\U0010ffff"
IN_BAND = 4096  # bytes; what a pickle may hold, however large the arrays beside it

DTYPES = st.sampled_from([np.int32, np.int64, np.bool_, np.uint8])
SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3)


def sent(message: Any) -> bytes:
    pipe = io.BytesIO()
    write_message(pipe, message)
    return pipe.getvalue()


class Received:
    """Reads a message in parts of given sizes and keeps the memory that was read into."""

    def __init__(self, data: bytes, parts: Iterator[int] | None = None) -> None:
        self._left = memoryview(data)
        self._parts = parts
        self.memory: list[memoryview] = []

    def __call__(self, into: memoryview) -> int:
        wanted = len(into) if self._parts is None else min(next(self._parts), len(into))
        part, self._left = self._left[:wanted], self._left[wanted:]
        into[: len(part)] = part
        self.memory.append(into)
        return len(part)


@settings(deadline=None)
@given(st.lists(st.tuples(SHAPES, DTYPES, st.sampled_from("CF")), max_size=4), st.integers(0, 99))
def test_messages_come_as_they_were_sent_whatever_a_read_gives(
    kinds: list[tuple[list[int], Any, Any]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    arrays = [
        np.asarray(rng.integers(0, 2, shape), dtype, order=order) for shape, dtype, order in kinds
    ]
    some = random.Random(seed)
    parts = iter(lambda: some.choice((1, 2, 7, 1000)), None)
    text, found = read_message(Received(sent(("text", arrays)), parts))
    assert text == "text"
    assert len(found) == len(arrays)
    for a, b in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
        assert a.flags.writeable


def test_arrays_are_the_memory_they_were_read_into() -> None:
    received = Received(sent([np.arange(1000), np.ones((30, 40), np.int32)]))
    for found in read_message(received):
        assert any(
            np.shares_memory(found, np.frombuffer(part, np.uint8)) for part in received.memory[2:]
        )


def test_a_message_that_is_cut_off_anywhere_is_the_end() -> None:
    data = sent(("ok", np.arange(5)))
    for length in range(len(data)):
        with pytest.raises(EOFError):
            read_message(Received(data[:length]))


def test_byte_strings_come_out_as_they_were_packed() -> None:
    for strings in ([], [b""], [b"", b"ab", b"", b"c"], list(byte_vocabulary("long").token_bytes)):
        assert list(PackedBytes.of(strings).strings()) == strings


def in_band(reply: Any) -> tuple[int, int]:
    """Return the bytes of a message's pickle, and of all of it."""
    data = sent(reply)
    return int.from_bytes(data[:8], "little"), len(data)


@pytest.mark.parametrize("pattern", ["[a-z]{800}", "ab" * 400, "x|" + "y" * 700])
def test_large_replies_are_arrays_beside_a_small_pickle(pattern: str) -> None:
    vocabulary = byte_vocabulary("abab", "yyyy")
    worker = Worker(vocabulary.token_bytes, vocabulary.size, EOS)
    node = parse(pattern)
    replies = [
        worker.dfa(to_steps(node), 60.0, 2**30),
        worker.outlines(f"{SENTINEL}(?:{render(node)})\\z", SENTINEL),
    ]
    for reply in replies:
        assert reply[0] == "ok"
        pickled, whole = in_band(reply)
        assert pickled < IN_BAND
        assert whole > 2 * IN_BAND


def test_a_vocabulary_is_sent_as_arrays() -> None:
    setup = CompileProcesses(json_vocabulary(), 2**30)._setup
    assert in_band(setup)[0] < IN_BAND


_HALF_A_REPLY = """
import os, pickle, signal, struct, sys, time
taken, data = pickle.dumps(("taken",)), pickle.dumps(("ok", "x"))
sys.stdin.buffer.read(1)
out = sys.stdout.buffer
out.write(struct.pack("<QQ", len(taken), 0) + taken)
out.write(struct.pack("<QQQ", len(data), 1, 2**20) + data + bytes(2**19))
out.flush()
END
"""


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("sys.exit(0)", "ended unexpectedly .exit code 0"),
        ("sys.exit(3)", "ended unexpectedly .exit code 3"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "ended unexpectedly .SIGTERM"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended unexpectedly .SIGKILL, from outside"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "1024 MiB of memory .or its stack"),
        ("os.abort()", "1024 MiB of memory .or its stack"),
        (f"sys.exit({OUT_OF_MEMORY})", "1024 MiB of memory .or its stack"),
        ("time.sleep(600)", r"0\.5 s"),
    ],
)
def test_a_child_that_ends_inside_a_reply_is_gone(
    end: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """By itself or because it was killed for being late: either is told, and another one starts."""
    script = tmp_path / "half.py"
    script.write_text(_HALF_A_REPLY.replace("END", end))
    processes = CompileProcesses(byte_vocabulary(), 2**30, num_processes=1)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(compile_process, "_SCRIPT", script)
            patched.setattr(compile_process, "_START_S", 2.0)
            with pytest.raises(ConstraintError, match=told):
                processes.run("dfa", timeout_s=0.5)
        reply = processes.run("dfa", to_steps(parse("a")), 20.0, 2**20, timeout_s=60.0)
        assert reply[0] == "ok"
    finally:
        processes.close()


def test_a_child_that_was_killed_while_idle_is_no_constraint_s_fault() -> None:
    processes = CompileProcesses(byte_vocabulary(), 2**30, num_processes=1)
    job = ("dfa", to_steps(parse("a")), 20.0, 2**20)
    try:
        for num_before in range(3):
            assert processes.run(*job, timeout_s=60.0)[0] == "ok"
            (child,) = processes._running
            child.process.kill()
            if num_before:  # dead for sure; otherwise it may be dying yet
                child.process.wait()
        assert processes.run(*job, timeout_s=60.0)[0] == "ok"
    finally:
        processes.close()


def test_a_job_that_no_child_takes_is_asked_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    script = tmp_path / "ends.py"
    starts = tmp_path / "starts"
    script.write_text(f"open({str(starts)!r}, 'a').write('.'); raise SystemExit(5)")
    monkeypatch.setattr(compile_process, "_SCRIPT", script)
    processes = CompileProcesses(byte_vocabulary(), 2**30, num_processes=1)
    try:
        with pytest.raises(ConstraintError, match=r"ended unexpectedly .exit code 5"):
            processes.run("dfa", timeout_s=20.0)
        assert starts.read_text() == ".."
    finally:
        processes.close()


@pytest.mark.parametrize("is_killed_from_outside", [False, True])
def test_a_process_whose_fork_still_compiles_is_gone_at_once(is_killed_from_outside: bool) -> None:
    """The fork has the process's end of the pipe, and would go on for all of its time."""
    processes = CompileProcesses(byte_vocabulary(), 2**36, num_processes=1)
    endless = ("probe", "regex", "((x{900}){900}){900}", False, 20.0)
    told: list[str] = []

    def compile_it() -> None:
        error = ConstraintError if is_killed_from_outside else EngineStoppedError
        with pytest.raises(error) as caught:
            processes.run(*endless, timeout_s=40.0)
        told.append(str(caught.value))

    try:
        assert processes.run("probe", "regex", "a", False, 20.0, timeout_s=40.0) == ("ok",)
        (child,) = processes._running
        thread = threading.Thread(target=compile_it)
        thread.start()
        children = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children")
        while not (forks := children.read_text().split()):
            time.sleep(0.01)
        started = time.monotonic()
        if is_killed_from_outside:
            child.process.kill()
        else:
            processes.close()
        thread.join()
        assert time.monotonic() - started < 5
        assert ("SIGKILL, from outside" if is_killed_from_outside else "is closed") in told[0]
        if is_killed_from_outside:  # nobody else ends the fork before its time
            os.kill(int(forks[0]), signal.SIGKILL)
    finally:
        processes.close()


_WITHOUT_THE_LIBRARY = """
import sys
from tests.runtime.grammar.vocabularies import byte_vocabulary
from umbel.lang.constraints import Regex
from umbel.runtime.grammar import GrammarCompiler
compiler = GrammarCompiler(byte_vocabulary())
matcher = compiler.compile(Regex("[a-c]{2}"), "outlines-core").matcher()
assert matcher.validate(compiler.vocabulary.encode("abc")) == 2
compiler.close()
assert "outlines_core" not in sys.modules
"""


def test_who_compiles_with_outlines_core_never_loads_it() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_THE_LIBRARY], check=True, timeout=120)


def steps_of(index: Any, state: int, vocab_size: int) -> dict[int, int]:
    allowed = index.get_allowed_tokens(state) or []
    return {t: index.get_next_state(state, t) for t in allowed if t != EOS and t < vocab_size}


def assert_same(table: TokenTable, index: Any, vocab_size: int) -> None:
    """Walk both from the start: each state of one is one of the other."""
    start = index.get_next_state(index.get_initial_state(), vocab_size)
    same, todo = {START: start}, [START]
    while todo:
        state = todo.pop()
        place = slice(table.offsets[state], table.offsets[state + 1])
        tokens, targets = table.tokens[place].tolist(), table.targets[place].tolist()
        assert tokens == sorted(set(tokens))
        steps = steps_of(index, same[state], vocab_size)
        assert set(tokens) == set(steps)
        assert table.is_final[state] == index.is_final_state(same[state])
        for token, target in zip(tokens, targets, strict=True):
            if target not in same:
                same[target] = steps[token]
                todo.append(target)
            assert same[target] == steps[token]
    assert len(same) == len(set(same.values())) == len(table.is_final)
    assert table.offsets[-1] == len(table.tokens) == len(table.targets)


def test_a_table_does_what_its_index_does() -> None:
    """Also where text may hold the sentinel itself, and where nothing is left after it."""
    rng = random.Random("tables")
    nodes = [parse(random_regex(rng, 5)) for _ in range(60)]
    patterns = [render(node) for node in nodes if node != NEVER]
    for vocabulary in (abc_vocabulary(), json_vocabulary()):
        worker = Worker(vocabulary.token_bytes, vocabulary.size, EOS)
        for pattern in [*patterns, ".*", "(?s:.){0,3}", "ca|cab", f"{SENTINEL}?a"]:
            index = worker.outlines_index(f"{SENTINEL}(?:{pattern})\\z", SENTINEL)
            assert_same(read_index(index, vocabulary.size, EOS), index, vocabulary.size)


def test_an_index_without_a_way_past_the_sentinel_has_no_states() -> None:
    index = outlines_core.Index("b", outlines_core.Vocabulary(EOS, {"a": [1], "b": [2]}))
    assert len(read_index(index, 3, EOS).is_final) == 0


@pytest.fixture
def flat() -> npt.NDArray[np.int32]:
    return np.arange(12, dtype=np.int32).reshape(3, 4)


def test_what_is_no_array_may_be_sent_too(flat: npt.NDArray[np.int32]) -> None:
    message = {"a": [1, None, b"x"], "b": flat[:, 1]}  # not contiguous
    found = read_message(Received(sent(message)))
    assert pickle.dumps(found["a"]) == pickle.dumps(message["a"])
    np.testing.assert_array_equal(found["b"], flat[:, 1])
