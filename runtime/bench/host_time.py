"""Host time of a step without a model: the scheduler alone, and the whole engine.

Requests end and are replaced all the time, so that admission is part of what is measured. Times
are CPU times of the one thread that works, so that what else the machine does counts little.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..config import EngineConfig
from ..kv_cache import PageAllocator, RadixCache
from ..request import Request
from ..scheduler import Scheduler, SchedulerLimits
from .clients import Client
from .engines import NULL, BenchmarkModel
from .graph_builder import GraphBuilder
from .random_text import RandomText

Part = Literal["scheduler", "engine"]

_PROMPT = 64
_MAX_OUTPUT = 256  # so many steps until a batch has been replaced once
_SLACK = 64  # requests that wait where none is meant to: enough to replace what ends


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Microseconds of one step, medians over the repeats."""

    part: Part
    case: str
    running: int
    waiting: int
    median_us: float
    mean_us: float
    p95_us: float
    times_first: float  # the median over that of the first line of the same part


class _Case(NamedTuple):
    name: str
    waiting: int
    prefix_cache: bool = True


#: gives the seconds of many steps: of a case, so many running, steps, policy, seed
_Measure = Callable[[_Case, int, int, str, int], list[float]]


def run_host_time(
    *, running: int, waiting: int, steps: int, repeats: int, policy: str
) -> list[StepFigures]:
    """Measure both parts with so many requests running: none waiting, many, and no cache.

    No two requests have a prefix in common, so that the cache only costs.
    """
    cases = (_Case("", 0), _Case("a queue", waiting), _Case("cache off", 0, False))
    results = []
    parts: dict[Part, _Measure] = {"scheduler": _scheduler_steps, "engine": _engine_steps}
    for part, measure in parts.items():
        runs: list[list[list[float]]] = [[] for _ in cases]
        for repeat in range(repeats):
            for case, done in zip(cases, runs, strict=True):
                done.append(measure(case, running, steps, policy, repeat))
        medians = [[statistics.median(times) for times in done] for done in runs]
        for case, done, middle in zip(cases, runs, medians, strict=True):
            ratios = [a / b for a, b in zip(middle, medians[0], strict=True)]
            results.append(
                StepFigures(
                    part=part,
                    case=case.name,
                    running=running,
                    waiting=case.waiting,
                    median_us=1e6 * statistics.median(middle),
                    mean_us=1e6 * statistics.median(map(statistics.fmean, done)),
                    p95_us=1e6
                    * statistics.median(sorted(times)[int(0.95 * len(times))] for times in done),
                    times_first=statistics.median(ratios),
                )
            )
    return results


def as_table(results: list[StepFigures]) -> str:
    """Return the figures for people."""
    lines = [
        f"{'part':<11}{'case':<11}{'running':>9}{'waiting':>9}{'median us':>11}{'mean us':>9}"
        f"{'p95 us':>9}{'x':>7}"
    ]
    lines += [
        f"{r.part:<11}{r.case:<11}{r.running:>9,}{r.waiting:>9,}{r.median_us:>11,.0f}"
        f"{r.mean_us:>9,.0f}{r.p95_us:>9,.0f}{r.times_first:>7.2f}"
        for r in results
    ]
    return "\n".join(lines)


def _scheduler_steps(case: _Case, running: int, steps: int, policy: str, seed: int) -> list[float]:
    """Return the seconds that each of many steps takes the scheduler, its finishes included."""
    source = random.Random(seed)
    scheduler = Scheduler(
        RadixCache(),
        PageAllocator(_pool(running)),
        SchedulerLimits(running + 8 * _PROMPT, running),
        policy=policy,
        cache_enabled=case.prefix_cache,
    )
    added = 0

    def add() -> None:
        nonlocal added
        tokens = [source.randrange(50_000) for _ in range(_PROMPT)]
        limit = _PROMPT + source.randint(2, _MAX_OUTPUT)
        scheduler.add(Request(added, added, 0, tokens, limit, arrival=added))
        added += 1

    for _ in range(running + _SLACK + case.waiting):
        add()
    times: list[float] = []
    while len(times) < steps:
        started = time.thread_time()
        batch = scheduler.schedule()
        assert batch is not None, "requests wait, and nothing runs"
        scheduler.complete(batch)
        elapsed = time.thread_time() - started
        for scheduled in batch.requests:
            if scheduled.reaches_end:
                scheduled.request.token_ids.append(source.randrange(50_000))
        requests = [scheduled.request for scheduled in batch.requests]
        ended = [request for request in requests if len(request.token_ids) >= request.limit]
        started = time.thread_time()
        for request in ended:
            scheduler.finish(request)
        elapsed += time.thread_time() - started
        for _ in ended:
            add()
        if batch.num_decodes >= 0.9 * running:
            times.append(elapsed)
    return times


def _pool(running: int) -> int:
    """Return a size that holds what runs, and is soon full of what has ended."""
    return running * (_PROMPT + _MAX_OUTPUT)


def _engine_steps(case: _Case, running: int, steps: int, policy: str, seed: int) -> list[float]:
    """Return the seconds of `Engine.step`, whose pass takes no time, in each of many steps."""
    config = EngineConfig(
        policy=policy,
        max_running=running,
        max_step_tokens=running + 8 * _PROMPT,
        kv_tokens=_pool(running),
        prefix_cache=case.prefix_cache,
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

    num_added = running + _SLACK + case.waiting
    for row in range(num_added):
        add(row)
    times: list[float] = []
    try:
        engine.step()  # takes them all in
        while len(times) < steps:
            decoded = engine.core.scheduler.stats.tokens_decoded
            started = time.thread_time()
            engine.step()
            elapsed = time.thread_time() - started
            if engine.core.scheduler.stats.tokens_decoded - decoded >= 0.9 * running:
                times.append(elapsed)
            while ended:
                ended.pop()
                add(num_added)
                num_added += 1
    finally:
        engine.close()
        model.close()
    return times
