"""Host time of a step without a model: the scheduler alone, and the whole engine.

Requests end and are replaced all the time, so that admission is part of what is measured. Times
are CPU times of the one thread that works, so that what else the machine does counts little.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from ..config import EngineConfig
from ..kv_cache import PageAllocator, RadixCache
from ..request import Request
from ..scheduler import Scheduler
from .clients import Client
from .engines import NULL, BenchmarkModel
from .graph_builder import GraphBuilder
from .random_text import RandomText

Part = Literal["scheduler", "engine"]

_PROMPT = 32
_MAX_OUTPUT = 256  # so many steps until a batch has been replaced once
_SLACK = 64  # requests that wait where none is meant to: enough to replace what ends


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Microseconds of one step, medians over the repeats."""

    part: Part
    running: int
    waiting: int
    median_us: float
    p95_us: float
    times_first: float  # the median over that of the first line of the same part


def run_host_time(
    *, running: int, waiting: tuple[int, ...], steps: int, repeats: int, policy: str
) -> list[StepFigures]:
    """Measure both parts with so many requests running, for each number that waits."""
    results = []
    for part in ("scheduler", "engine"):
        runs: list[list[list[float]]] = [[] for _ in waiting]
        for repeat in range(repeats):
            for number, done in zip(waiting, runs, strict=True):
                if part == "scheduler":
                    done.append(_scheduler_steps(running, number, steps, policy, repeat))
                else:
                    done.append(_engine_steps(running, number, steps, policy, repeat))
        medians = [[statistics.median(times) for times in done] for done in runs]
        for number, done, middle in zip(waiting, runs, medians, strict=True):
            ratios = [a / b for a, b in zip(middle, medians[0], strict=True)]
            p95 = statistics.median(sorted(times)[int(0.95 * len(times))] for times in done)
            results.append(
                StepFigures(
                    part,
                    running,
                    number,
                    1e6 * statistics.median(middle),
                    1e6 * p95,
                    statistics.median(ratios),
                )
            )
    return results


def as_table(results: list[StepFigures]) -> str:
    """Return the figures for people."""
    header = f"{'part':<12}{'running':>9}{'waiting':>9}{'median us':>11}{'p95 us':>9}{'x':>7}"
    return "\n".join(
        [
            header,
            *(
                f"{r.part:<12}{r.running:>9,}{r.waiting:>9,}{r.median_us:>11,.0f}"
                f"{r.p95_us:>9,.0f}{r.times_first:>7.2f}"
                for r in results
            ),
        ]
    )


def _scheduler_steps(running: int, waiting: int, steps: int, policy: str, seed: int) -> list[float]:
    """Return the seconds of `schedule` and `complete` in each of many steps."""
    source = random.Random(seed)
    scheduler = Scheduler(
        RadixCache(),
        PageAllocator(2 * running * (_PROMPT + _MAX_OUTPUT)),
        max_step_tokens=2 * running,
        max_running=running,
        policy=policy,
    )
    added = 0

    def add() -> None:
        nonlocal added
        tokens = [source.randrange(50_000) for _ in range(_PROMPT)]
        limit = _PROMPT + source.randint(2, _MAX_OUTPUT)
        scheduler.add(Request(added, added, 0, tokens, limit, arrival=added))
        added += 1

    for _ in range(running + _SLACK + waiting):
        add()
    times: list[float] = []
    while len(times) < steps:
        started = time.thread_time()
        batch = scheduler.schedule()
        elapsed = time.thread_time() - started
        assert batch is not None, "requests wait, and nothing runs"
        started = time.thread_time()
        scheduler.complete(batch)
        elapsed += time.thread_time() - started
        is_steady = batch.num_decodes >= 0.9 * running
        for scheduled in batch.requests:
            request = scheduled.request
            if scheduled.reaches_end:
                request.token_ids.append(source.randrange(50_000))
            if len(request.token_ids) >= request.limit:
                started = time.thread_time()
                scheduler.finish(request)
                elapsed += time.thread_time() - started
                add()
        if is_steady:
            times.append(elapsed)
    return times


def _engine_steps(running: int, waiting: int, steps: int, policy: str, seed: int) -> list[float]:
    """Return the seconds of `Engine.step`, whose pass takes no time, in each of many steps."""
    config = EngineConfig(
        policy=policy,
        max_running=running,
        max_step_tokens=2 * running,
        kv_tokens=2 * running * (_PROMPT + _MAX_OUTPUT),
    )
    model = BenchmarkModel(NULL, config)
    engine = model.new_engine()
    text = RandomText(model.tokenizer, seed)
    source = random.Random(seed)
    ended: deque[None] = deque()

    def add(row: int) -> None:
        builder = GraphBuilder()
        builder.gen(source.randint(2, _MAX_OUTPUT), builder.text(text.draw(_PROMPT), None))
        client = Client(engine, builder.graph(), row)
        client.start("graph", lambda: ended.append(None))

    num_added = running + _SLACK + waiting
    for row in range(num_added):
        add(row)
    times: list[float] = []
    try:
        engine.step()  # takes them all in
        while len(times) < steps:
            decoded = engine.scheduler.stats.tokens_decoded
            started = time.thread_time()
            engine.step()
            elapsed = time.thread_time() - started
            if engine.scheduler.stats.tokens_decoded - decoded >= 0.9 * running:
                times.append(elapsed)
            while ended:
                ended.pop()
                add(num_added)
                num_added += 1
    finally:
        engine.close()
        model.close()
    return times
