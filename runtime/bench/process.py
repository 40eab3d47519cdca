"""What it costs to have the engine in another process: events a second, time a token, a read.

Both ways run the same programs on an engine without a model, so that what is left is the host's
work and the way between the two.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen
from umbel.lang.results import Event, NodeFailed, NodeFinished, RunOptions
from umbel.lang.sampling_params import SamplingParams

from ..config import EngineConfig
from ..engine import Engine
from ..engine_process import EngineClient
from .clients import BenchmarkError
from .engines import NULL, BenchmarkModel
from .graph_builder import GraphBuilder

_FACTORY = f"{__name__}:null_engine"
_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """One way to run the engine. Times are medians over the repeats, in microseconds."""

    way: str
    tokens_per_s: float
    events_per_s: float
    token_us: float  # of wall time, with all programs at once
    own_cpu_us: float  # of this process's CPU time for each token
    all_cpu_us: float  # the same with that of the engine's process, where there is one
    read_us: float  # from handing in a gen of one token to its end, nothing else running
    least_read_us: float


def null_engine(max_running: int) -> Engine:
    """Return a started engine without a model; called in its process by `EngineClient`."""
    return _null_model(max_running).new_engine(threaded=True)


def _null_model(max_running: int) -> BenchmarkModel:
    return BenchmarkModel(NULL, EngineConfig(max_running=max_running, max_step_tokens=4096))


def run_process(
    *, programs: int, tokens: int, reads: int, repeats: int, progress: Callable[[str], None]
) -> list[ProcessFigures]:
    """Measure both ways, in turns."""
    runs: dict[str, list[_Burst]] = {"thread": [], "process": []}
    times: dict[str, list[float]] = {"thread": [], "process": []}
    with _engines(min(programs, 512)) as engines:
        for repeat in range(repeats + 1):
            for way, engine in engines.items():
                measured = _burst(engine, programs, tokens)
                seconds = _reads(engine, reads)
                if repeat:  # the first one warms up
                    runs[way].append(measured)
                    times[way] += seconds
            progress(f"repeat {repeat} of {repeats}")
    return [_figures(way, runs[way], times[way], programs * tokens) for way in runs]


@contextmanager
def _engines(max_running: int) -> Iterator[dict[str, Engine | EngineClient]]:
    model = _null_model(max_running)
    engine = model.new_engine(threaded=True)
    client = EngineClient(_FACTORY, {"max_running": max_running})
    try:
        yield {"thread": engine, "process": client}
    finally:
        client.close()
        engine.close()
        model.close()


@dataclass(frozen=True, slots=True)
class _Burst:
    """What one burst of programs took."""

    seconds: float
    own_cpu_s: float
    all_cpu_s: float
    num_events: int


class _Sink:
    """Counts events, and nodes that end."""

    def __init__(self) -> None:
        self.num_events = 0
        self._num_ended = 0
        self._changed = threading.Condition()

    def __call__(self, events: Sequence[Event]) -> None:
        with self._changed:
            self.num_events += len(events)
            for event in events:
                if isinstance(event, NodeFailed):
                    raise BenchmarkError(f"a node failed: {event.error.message}")
                self._num_ended += isinstance(event, NodeFinished)
            self._changed.notify_all()

    def wait(self, num_nodes: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_ended >= num_nodes, _WAIT_S):
                raise BenchmarkError(f"nothing came for {_WAIT_S:g} s")


def _burst(engine: Engine | EngineClient, programs: int, tokens: int) -> _Burst:
    """Run programs at once."""
    sink = _Sink()
    graphs = []
    for i in range(programs):
        builder = GraphBuilder()
        builder.gen(tokens, builder.text(f"{i} ", None))
        graphs.append(builder.graph())
    own, others, started = time.process_time(), _child_cpu_s(engine), time.perf_counter()
    for graph in graphs:
        session = engine.open(RunOptions(), sink)
        session.extend(graph)
        session.close()
    sink.wait(2 * programs)
    seconds, own = time.perf_counter() - started, time.process_time() - own
    return _Burst(seconds, own, own + _child_cpu_s(engine) - others, sink.num_events)


def _child_cpu_s(engine: Engine | EngineClient) -> float:
    """Return the CPU seconds of the engine's process so far; 0 where it is this one."""
    if isinstance(engine, Engine) or not Path("/proc").is_dir():
        return 0.0
    fields = Path(f"/proc/{engine.process_id}/stat").read_text().rpartition(")")[2].split()
    user, system = fields[11:13]  # proc_pid_stat(5): the 14th and the 15th of all
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _reads(engine: Engine | EngineClient, reads: int) -> list[float]:
    """Return the seconds that each of many reads takes in one program that grows."""
    sink = _Sink()
    builder = GraphBuilder()
    at = builder.text("a", None)
    session = engine.open(RunOptions(), sink)
    session.extend(builder.graph())
    sink.wait(1)
    times = []
    for i in range(1, reads + 1):
        op = Gen(f"x{i}", SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        at = builder.add(op, at)
        piece = RequestGraph((builder.graph().nodes[-1],), base=i)
        started = time.perf_counter()
        session.extend(piece)
        sink.wait(i + 1)
        times.append(time.perf_counter() - started)
    session.close()
    return times


def _figures(way: str, runs: list[_Burst], times: list[float], num_tokens: int) -> ProcessFigures:
    seconds = statistics.median(run.seconds for run in runs)
    return ProcessFigures(
        way=way,
        tokens_per_s=num_tokens / seconds,
        events_per_s=statistics.median(run.num_events for run in runs) / seconds,
        token_us=1e6 * seconds / num_tokens,
        own_cpu_us=1e6 * statistics.median(run.own_cpu_s for run in runs) / num_tokens,
        all_cpu_us=1e6 * statistics.median(run.all_cpu_s for run in runs) / num_tokens,
        read_us=1e6 * statistics.median(times),
        least_read_us=1e6 * min(times),
    )


def as_data(results: Sequence[ProcessFigures]) -> list[dict[str, Any]]:
    """Return the figures as plain data."""
    return [asdict(figures) for figures in results]


def as_table(results: Sequence[ProcessFigures]) -> str:
    """Return the figures as a table, one way a line."""
    names = ("tokens/s", "events/s", "us/token", "own cpu", "all cpu", "us/read")
    lines = [f"{'engine in a':12}" + "".join(f"{name:>10}" for name in names) + f"{'least':>8}"]
    for r in results:
        lines.append(
            f"{r.way:12}{r.tokens_per_s:>10,.0f}{r.events_per_s:>10,.0f}{r.token_us:>10.1f}"
            f"{r.own_cpu_us:>10.1f}{r.all_cpu_us:>10.1f}{r.read_us:>10,.0f}{r.least_read_us:>8,.0f}"
        )
    return "\n".join(lines)
