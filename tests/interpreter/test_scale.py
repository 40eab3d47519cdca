"""Rule 5 and what it costs, counted: threads of many branches, memory of many waiting programs,
hand-overs of a large graph."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.engine_harness import GRAMMAR, TOKENIZER, make_runner

import umbel as ub
from umbel.interpreter.backends.base import EventSink, Session
from umbel.interpreter.backends.local import LocalBackend
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall
from umbel.interpreter.language_benchmark import bytes_in_flight, threads_added
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Branch, Gen
from umbel.lang.results import RunOptions
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine

NUM_PROGRAMS = 64
NUM_BRANCHES = 8


class Threads:
    """Answers when all branches of all programs are asked, and notes the threads at each time."""

    def __init__(self, num_asked: int) -> None:
        self.most = 0
        self.num_asked = 0
        self._all = num_asked
        self.before = threading.active_count()

    def __call__(self, call: ScriptedCall) -> Reply:
        self.num_asked += 1
        self.most = max(self.most, threading.active_count())
        return Reply(text="x", latency=0.0 if self.num_asked == self._all else 0.05)

    @property
    def num_added(self) -> int:
        return self.most - self.before


@ub.function
def without_reads(s: ub.State) -> None:
    forks = s.fork(NUM_BRANCHES)
    forks += ub.gen("a")
    forks.join()
    s += ub.gen("b")


@ub.function
async def awaiting(s: ub.State) -> list[Any]:
    forks = s.fork(NUM_BRANCHES)
    forks += ub.gen("a")
    values = [await branch.get("a") for branch in forks]
    forks.join()
    s += ub.gen("b")
    return values


@ub.function
def reading(s: ub.State) -> list[Any]:
    forks = s.fork(NUM_BRANCHES)
    forks += ub.gen("a")
    values = [branch["a"] for branch in forks]
    forks.join()
    s += ub.gen("b")
    return values


@pytest.mark.parametrize("program", [without_reads, awaiting], ids=["no reads", "async"])
def test_rule_5_programs_and_branches_without_reads_have_no_threads(program: Any) -> None:
    threads = Threads(NUM_PROGRAMS * (NUM_BRANCHES + 1))
    with ScriptedBackend(threads) as backend:
        results = program.options(backend=backend).run_batch([()] * NUM_PROGRAMS)
    assert threads.num_asked == NUM_PROGRAMS * (NUM_BRANCHES + 1)
    assert [r["b"] for r in results] == ["x"] * NUM_PROGRAMS
    assert threads.num_added <= 4


def test_rule_5_awaited_branches_have_no_threads_on_a_loop() -> None:
    threads = Threads(NUM_PROGRAMS * (NUM_BRANCHES + 1))
    with ScriptedBackend(threads) as backend:
        asyncio.run(awaiting.options(backend=backend).arun_batch([()] * NUM_PROGRAMS))
    assert threads.num_asked == NUM_PROGRAMS * (NUM_BRANCHES + 1)
    assert threads.num_added <= 4


@pytest.mark.parametrize("max_def_threads", [1, 6])
@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("program", [without_reads, reading], ids=["no reads", "reads"])
def test_rule_5_def_bodies_have_at_most_max_def_threads(
    way: str, program: Any, max_def_threads: int
) -> None:
    threads = Threads(NUM_PROGRAMS * (NUM_BRANCHES + 1))
    with (
        ScriptedBackend(threads) as backend,
        ub.use_backend(backend, max_def_threads=max_def_threads),
    ):
        if way == "sync":
            program.run_batch([()] * NUM_PROGRAMS)
        else:
            asyncio.run(program.arun_batch([()] * NUM_PROGRAMS))
    assert threads.num_asked == NUM_PROGRAMS * (NUM_BRANCHES + 1)
    assert threads.num_added <= max_def_threads + 1, "and the backend's own"


def test_the_benchmark_counts_the_same_threads() -> None:
    assert threads_added(reads=False) <= 4
    assert 4 < threads_added(reads=True) <= 64 + 1


IN_FLIGHT = """
import asyncio, threading
import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply

NUM = 10_000
asked = []

def answer(call):
    asked.append(call.row)
    return Reply(stalls=True)

waiting = 0

@ub.function
async def program(s, x):
    global waiting
    s += ub.system("Be brief.")
    s += ub.user(f"Question {x}")
    s += ub.assistant(ub.gen("a", max_tokens=8))
    waiting += 1
    await s.get("a")

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024

async def main():
    with ScriptedBackend(answer) as backend:
        rows = ((i,) for i in range(NUM))
        batch = asyncio.ensure_future(
            program.options(backend=backend).arun_batch(rows, max_in_flight=NUM, progress=False)
        )
        while len(asked) < NUM:
            await asyncio.sleep(0.01)
        assert waiting == NUM and len(set(asked)) == NUM and not batch.done()
        print(memory("VmHWM"), threading.active_count())
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_rule_5_ten_thousand_async_programs_wait_in_600_mib() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_FLIGHT], check=True, capture_output=True, text=True, timeout=120
    )
    peak, num_threads = map(int, done.stdout.split())
    assert peak < 600 * 2**20
    assert num_threads == 2, "the loop's and the backend's"


def test_the_benchmark_weighs_programs_in_flight() -> None:
    assert 500 < bytes_in_flight(200) < 60_000


class Counting:
    """A backend that counts what is handed over to another one."""

    def __init__(self, backend: LocalBackend | ScriptedBackend) -> None:
        self._backend = backend
        self.name = backend.name
        self.capabilities = backend.capabilities
        self.token_counter = None
        self.num_runs = 0
        self.pieces: list[RequestGraph] = []

    def open(self, options: RunOptions, sink: EventSink) -> Session:
        self.num_runs += 1
        return _CountingSession(self, self._backend.open(options, sink))

    def stats(self) -> dict[str, float]:
        return self._backend.stats()

    def close(self) -> None:
        self._backend.close()


class _CountingSession:
    def __init__(self, backend: Counting, session: Session) -> None:
        self._backend = backend
        self._session = session

    def extend(self, piece: RequestGraph) -> None:
        self._backend.pieces.append(piece)
        self._session.extend(piece)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        self._session.cancel(nodes)

    def close(self) -> None:
        self._session.close()


@ub.function
def tree_of_thought(s: ub.State) -> None:
    """Two thoughts at each of four levels: 1 + 2 + 4 + 8 forks, 2 + 4 + 8 + 16 gens."""
    s += "Solve it. "
    grow(s, depth=4)


def grow(s: ub.State, depth: int) -> None:
    if depth == 0:
        return
    forks = s.fork(2)
    forks += " Then: " + ub.gen("thought", max_tokens=4)
    for branch in forks:
        grow(branch, depth - 1)
    forks.join()


def make_backend(kind: str) -> LocalBackend | ScriptedBackend:
    if kind == "scripted":
        return ScriptedBackend()
    config = EngineConfig(check_accounting=True)
    return LocalBackend(Engine(make_runner(), TOKENIZER, config, max_seq_len=512, grammar=GRAMMAR))


@pytest.mark.parametrize("kind", ["scripted", "engine"])
def test_a_static_tree_of_thirty_gens_and_fifteen_forks_is_one_submission(kind: str) -> None:
    with make_backend(kind) as backend:
        counting = Counting(backend)
        tree_of_thought.options(backend=counting).run()
    assert counting.num_runs == 1
    (graph,) = counting.pieces
    ops = [node.op for node in graph.nodes]
    assert sum(isinstance(op, Gen) for op in ops) == 30
    assert len({op.gang for op in ops if isinstance(op, Branch)}) == 15
