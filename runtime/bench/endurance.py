"""Long runs: a storm of cancelled programs, and a soak of many short ones with memory watched."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from umbel.lang.graph import RequestGraph
from umbel.lang.results import Event, NodeFailed, NodeFinished, RunOptions

from ..engine import Engine
from ..engine_session import EngineSession
from .clients import BenchmarkError, Client
from .engines import BenchmarkModel
from .graph_builder import GraphBuilder
from .random_text import RandomText

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class StormFigures:
    """What was left after the last cancel, and how long it took until nothing was."""

    programs: int
    finished: int  # programs that ended well before their cancel
    cancelled: int
    settle_s: float  # from the last cancel until every node of every program had ended
    lost_slots: int  # neither free nor evictable at the end
    left_requests: int  # running or waiting at the end


@dataclass(frozen=True, slots=True)
class SoakFigures:
    """Resident memory over many short programs."""

    programs: int
    time_s: float
    tenths_mib: tuple[float, ...]  # after each tenth of the programs

    @property
    def first_tenth_mib(self) -> float:
        """Memory after the first tenth."""
        return self.tenths_mib[0]

    @property
    def end_mib(self) -> float:
        """Memory at the end."""
        return self.tenths_mib[-1]

    @property
    def growth(self) -> float:
        """Share of the memory after the first tenth that came until the end."""
        return self.end_mib / self.first_tenth_mib - 1

    @property
    def programs_per_s(self) -> float:
        """Programs that ended in a second."""
        return self.programs / self.time_s


def run_storm(
    model: BenchmarkModel, *, programs: int, seed: int = 0, span_s: float = 5.0
) -> StormFigures:
    """Submit forking programs and cancel each at a random time; the engine has its own thread.

    Raises BenchmarkError if nodes have not ended a minute after the last cancel.
    """
    source = random.Random(seed)
    text = RandomText(model.tokenizer, seed)
    engine = model.new_engine(threaded=True)
    try:
        watches = [_Watch() for _ in range(programs)]
        # two times for each program: at the first it comes, at the second it is cancelled
        times = sorted((source.uniform(0, span_s), row) for row in 2 * list(range(programs)))
        sessions: dict[int, EngineSession] = {}
        started = time.monotonic()
        for at, row in times:
            time.sleep(max(0.0, started + at - time.monotonic()))
            if row in sessions:
                sessions[row].cancel()
                continue
            graph = _forking_program(text, source)
            watches[row].expect(len(graph.nodes))
            sessions[row] = engine.open(RunOptions(row=row), watches[row])
            sessions[row].extend(graph)
            sessions[row].close()
        last_cancel = time.monotonic()
        for watch in watches:
            if not watch.ended.wait(max(0.0, last_cancel + 60 - time.monotonic())):
                raise BenchmarkError("a program's nodes have not ended a minute after its cancel")
        settled = time.monotonic() - last_cancel
        _wait_until(lambda: _left(engine) == (0, 0), 2.0)
        lost, left = _left(engine)
        cancelled = sum(watch.failed for watch in watches)
        return StormFigures(programs, programs - cancelled, cancelled, settled, lost, left)
    finally:
        engine.close()


def run_soak(
    model: BenchmarkModel,
    *,
    programs: int,
    at_once: int = 128,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> SoakFigures:
    """Run short programs, so many at once, on one engine; raises BenchmarkError if one fails."""
    source = random.Random(seed)
    text = RandomText(model.tokenizer, seed)
    engine = model.new_engine()
    num_started = num_ended = 0

    def on_end() -> None:
        nonlocal num_ended
        num_ended += 1

    memory: list[float] = []
    open_clients: list[Client] = []
    started = time.perf_counter()
    try:
        while num_ended < programs:
            while num_started < programs and num_started - num_ended < at_once:
                client = Client(engine, _short_program(text, source), num_started)
                client.start("graph", on_end)
                open_clients.append(client)
                num_started += 1
            if not engine.step():
                time.sleep(0.0002)
            if num_ended * 10 >= (len(memory) + 1) * programs:
                memory.append(_resident_mib())
                progress(f"{num_ended:,} programs: {memory[-1]:,.1f} MiB")
            if len(open_clients) > 4 * at_once:
                open_clients = _without_ended(open_clients)
        _without_ended(open_clients)
        elapsed = time.perf_counter() - started
    finally:
        engine.close()
    return SoakFigures(programs, elapsed, tuple(memory))


class _Watch:
    """A sink that says when every node of its program has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.failed = False
        self._left = 0

    def expect(self, num_nodes: int) -> None:
        self._left = num_nodes

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, NodeFailed):
                self.failed = True
            if isinstance(event, NodeFailed | NodeFinished):
                self._left -= 1
        if self._left == 0:
            self.ended.set()


def _forking_program(text: RandomText, source: random.Random) -> RequestGraph:
    builder = GraphBuilder()
    trunk = builder.text(text.draw(source.randint(1, 200)), None)
    ends = []
    width = source.randint(1, 4)
    for index in range(width):
        at = builder.text(text.draw(source.randint(1, 8)), builder.branch(index, width, trunk))
        ends.append(builder.gen(source.randint(1, 60), at))
    joined = builder.after(tuple(ends), trunk)
    choices = tuple(text.draw(4) + str(index) for index in range(3))
    builder.gen(source.randint(1, 20), builder.select(choices, joined))
    return builder.graph()


def _short_program(text: RandomText, source: random.Random) -> RequestGraph:
    builder = GraphBuilder()
    at = builder.gen(source.randint(1, 4), builder.text(text.draw(source.randint(4, 16)), None))
    builder.gen(source.randint(1, 4), builder.text(text.draw(2), at))
    return builder.graph()


def _without_ended(clients: list[Client]) -> list[Client]:
    for client in clients:
        if client.error:
            raise BenchmarkError(f"program {client.row} failed: {client.error}")
    return [client for client in clients if not client.ended_s]


def _left(engine: Engine) -> tuple[int, int]:
    scheduler = engine.core.scheduler
    lost = scheduler.allocator.num_slots - scheduler.num_available
    return lost, scheduler.num_running + scheduler.num_waiting


def _wait_until(is_true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)


def _resident_mib() -> float:
    """Return the resident memory of this process, as Linux tells it (proc_pid_status(5))."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise BenchmarkError(f"{_STATUS} does not tell the resident memory")
