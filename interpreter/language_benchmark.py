"""What the language itself costs: time of a program, memory in flight, threads; needs no model.

Runs on the scripted backend, which answers at once, so that all that is measured is ours. Knows
nothing of engines.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from umbel.lang.primitives import gen
from umbel.lang.program import function
from umbel.lang.runner import use_runner
from umbel.lang.state import State

from .backends.scripted import ScriptedBackend
from .backends.scripted_replies import Reply, ScriptedCall
from .interpreter import Interpreter

Progress = Callable[[str], None]

MAX_DEF_THREADS = 64


@dataclass(frozen=True, slots=True)
class ProgramTime:
    """Microseconds of one program in a batch: the medians, and each batch's."""

    results_are_kept: bool  # those of the batch before, while the next one runs
    wall_us: float
    cpu_us: float  # of all threads of the process
    each_wall_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LanguageFigures:
    """All that is measured. Threads are those that came on top, at most, while programs ran."""

    num_programs: int
    dropped: ProgramTime
    kept: ProgramTime
    num_in_flight: int
    bytes_per_program: float
    threads_without_reads: int
    threads_with_reads: int
    max_def_threads: int = MAX_DEF_THREADS

    def table(self) -> str:
        """Return the figures for people."""
        lines = [f"one gen a program, {self.num_programs:,} in run_batch"]
        for times in (self.dropped, self.kept):
            what = "kept" if times.results_are_kept else "dropped"
            each = ", ".join(f"{each:.1f}" for each in times.each_wall_us)
            lines.append(
                f"  earlier results {what}: {times.wall_us:.1f} us wall, {times.cpu_us:.1f} us CPU "
                f"(medians; wall of each: {each})"
            )
        return "\n".join(
            [
                *lines,
                f"async programs in flight, {self.num_in_flight:,}: "
                f"{self.bytes_per_program:,.0f} bytes each",
                "64 programs x 8 forks: "
                f"{self.threads_without_reads} threads more without reads, "
                f"{self.threads_with_reads} with reads (limit {self.max_def_threads}, and the "
                "backend's)",
            ]
        )


@function
def _ask(s: State, question: str) -> None:
    s += "Question: " + question
    s += gen("answer", max_tokens=8)


@function
async def _ask_and_wait(s: State, question: str) -> Any:
    s += "Question: " + question
    s += gen("answer", max_tokens=8)
    return await s.get("answer")


@function
def _fork(s: State) -> None:
    forks = s.fork(8)
    forks += gen("answer", max_tokens=8)
    forks.join()


@function
def _fork_and_read(s: State) -> list[Any]:
    forks = s.fork(8)
    forks += gen("answer", max_tokens=8)
    return forks.join()["answer"]


def program_time(num_programs: int, repeats: int, *, keep: bool) -> ProgramTime:
    """Time batches of one-gen programs, after one that is not counted."""
    rows = [{"question": str(i)} for i in range(num_programs)]
    wall, cpu = [], []
    kept: list[Any] = []
    with ScriptedBackend({"answer": "yes"}) as backend:
        program = _ask.options(backend=backend)
        for _ in range(repeats + 1):
            began, cpu_began = time.perf_counter(), time.process_time()
            results = _batch(program, rows)
            cpu.append((time.process_time() - cpu_began) / num_programs * 1e6)
            wall.append((time.perf_counter() - began) / num_programs * 1e6)
            kept = results if keep else []
            del results
    assert bool(kept) is keep, "what was to be kept was"
    return ProgramTime(
        keep, statistics.median(wall[1:]), statistics.median(cpu[1:]), tuple(wall[1:])
    )


def bytes_in_flight(num_programs: int) -> float:
    """Return what one of many waiting `async def` programs takes, in bytes of Python's memory."""
    asked = threading.Semaphore(0)

    def stall(call: ScriptedCall) -> Reply:
        asked.release()
        return Reply(stalls=True)

    async def measure() -> float:
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        rows = ((str(i),) for i in range(num_programs))
        batch = asyncio.ensure_future(
            _ask_and_wait.options(backend=backend).arun_batch(
                rows, max_in_flight=num_programs, progress=False
            )
        )
        for _ in range(num_programs):
            while not asked.acquire(blocking=False):
                await asyncio.sleep(0.001)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)
        return (after - before) / num_programs

    with ScriptedBackend(stall) as backend, use_runner(Interpreter(backend)):
        return asyncio.run(measure())


def threads_added(*, reads: bool) -> int:
    """Return how many threads more there were at most while 64 programs of 8 forks ran."""
    before = threading.active_count()
    most = before

    def count(call: ScriptedCall) -> Reply:
        nonlocal most
        most = max(most, threading.active_count())
        return Reply(text="yes", latency=0.02)

    with ScriptedBackend(count) as backend:
        program = _fork_and_read if reads else _fork
        _batch(program.options(backend=backend), [()] * 64)
    return most - before


def measure_language(
    progress: Progress, *, num_programs: int = 10_000, repeats: int = 5
) -> LanguageFigures:
    """Measure everything, threads and memory first: the rest would leave its marks on them."""
    progress("threads")
    without_reads, with_reads = threads_added(reads=False), threads_added(reads=True)
    progress(f"{num_programs:,} async programs in flight")
    in_flight = bytes_in_flight(num_programs)
    progress("time of a program, results dropped")
    dropped = program_time(num_programs, repeats, keep=False)
    progress("time of a program, results kept")
    kept = program_time(num_programs, repeats, keep=True)
    return LanguageFigures(
        num_programs, dropped, kept, num_programs, in_flight, without_reads, with_reads
    )


def add_command(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `umbel bench language` to the benchmarks' parsers."""
    text = "what a program costs without a model: time, memory in flight, threads"
    parser = commands.add_parser("language", parents=[common], help=text, description=text)
    parser.add_argument("--programs", type=int, default=10_000, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="figures for machines")
    parser.set_defaults(bench=_run)


def _run(options: argparse.Namespace, progress: Progress) -> str:
    figures = measure_language(progress, num_programs=options.programs, repeats=options.repeats)
    return json.dumps(asdict(figures)) if options.json else figures.table()


def _batch(program: Any, rows: Any) -> list[Any]:
    with use_runner(Interpreter(max_def_threads=MAX_DEF_THREADS)):
        results: list[Any] = program.run_batch(rows, progress=False)
        return results
