"""`umbel bench programs`: every workload in every arm, what it took against the least possible."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from umbel.lang.errors import EngineConfigError

from .arms import ARMS, Arm
from .clients import DriveResult, drive
from .engines import BenchmarkModel
from .random_text import RandomText
from .workloads import WORKLOADS, Limits, Size, Workload, make_workload


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of one workload in one arm. Tokens and steps are exact, times are not.

    `prefilled` counts rows that were computed and not sampled, those of selects' token trees
    too; `prompt` counts what a run without any sharing had to compute of them. The host's time is
    CPU time of the engine's thread outside forward passes, so that other programs on the machine
    count little.
    """

    time_s: float
    mean_latency_s: float
    mean_latency_steps: float
    latency_p50_s: float
    latency_p95_s: float
    prefilled: int
    tree: int  # of these, in token trees
    prompt: int
    cached: int
    decoded: int
    steps: int
    decode_steps: int
    retractions: int
    host_us_per_step: float
    peak_kv: int


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """Medians over the repeats of one arm; `times_default` is the median of ratios in a repeat."""

    workload: str
    arm: str
    figures: RunFigures
    least_prefill: int  # of the workload as it is, with an endless cache
    times_default: dict[str, float]  # time, mean latency and host time over the first arm's

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' rows that were found in the cache."""
        return self.figures.cached / max(1, self.figures.prompt)


def run_once(model: BenchmarkModel, workload: Workload, arm: Arm) -> RunFigures:
    """Run a workload on an engine of its own, its cache empty."""
    engine = model.new_engine(workload.pool_tokens, **arm.settings)
    try:
        driven = drive(engine, [arm.rewrite(g) for g in workload.graphs], arm.submission)
        return _figures(driven, engine.stats(), driven.cpu_s - model.forward_cpu_s)
    finally:
        engine.close()


def count_least(model: BenchmarkModel, workload: Workload) -> int:
    """Return the least prefill of a workload: rows that no cache could have held.

    The rows of selects' token trees are among them: each is scored once.
    """
    engine = model.new_engine(None, track_bound=True)
    try:
        drive(engine, workload.graphs, "graph")
        stats = engine.stats()
        return int(stats["least_prefill"] + stats["tree_tokens"])
    finally:
        engine.close()


def run_workload(
    model: BenchmarkModel, workload: Workload, arms: Sequence[Arm], repeats: int
) -> list[ArmFigures]:
    """Run a workload in each arm, in turn, `repeats` times; the first arm is compared with.

    A run before them, which counts the least prefill, warms up what is to be compiled.
    """
    least = count_least(model, workload)
    runs: list[list[RunFigures]] = [[] for _ in arms]
    for _ in range(repeats):
        for arm, done in zip(arms, runs, strict=True):
            done.append(run_once(model, workload, arm))
    return [
        ArmFigures(workload.name, arm.name, _median(done), least, _ratios(done, runs[0]))
        for arm, done in zip(arms, runs, strict=True)
    ]


def run_programs(
    model: BenchmarkModel,
    *,
    workloads: Iterable[str],
    arms: Iterable[str],
    size: Size,
    repeats: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[ArmFigures]:
    """Run workloads by name in arms by name; raises EngineConfigError, BenchmarkError."""
    limits = Limits(model.limits.max_running, model.limits.max_step_tokens)
    chosen = [ARMS[name] for name in arms]
    results = []
    for name in workloads:
        text = RandomText(model.tokenizer, seed)
        workload = make_workload(name, text, size, limits)
        if workload.max_tokens > model.max_seq_len:
            raise EngineConfigError(
                f"{name} has rows of {workload.max_tokens:,} tokens; {model.name} takes "
                f"{model.max_seq_len:,}: use another model, or --size small"
            )
        progress(f"{name}: {WORKLOADS[name].about}")
        results += run_workload(model, workload, chosen, repeats)
    return results


def as_table(results: Sequence[ArmFigures]) -> str:
    """Return the figures for people: a block for each workload, a line for each arm."""
    lines: list[str] = []
    workload = ""
    for result in results:
        if result.workload != workload:
            workload = result.workload
            about = WORKLOADS[workload].about
            lines += ["", f"{workload}: {about}; least prefill {result.least_prefill:,}", _HEADER]
        lines.append(_line(result))
    return "\n".join(lines[1:])


def as_data(results: Sequence[ArmFigures]) -> list[dict[str, Any]]:
    """Return the figures for machines."""
    return [asdict(result) | {"hit_rate": result.hit_rate} for result in results]


_HEADER = (
    f"{'arm':<12}{'time s':>9}{'x':>7}{'mean s':>9}{'p50 s':>9}{'p95 s':>9}"
    f"{'prefilled':>11}{'/least':>8}{'hits':>7}{'steps':>8}{'decode':>8}"
    f"{'host us':>9}{'peak KV':>9}"
)


def _line(result: ArmFigures) -> str:
    run = result.figures
    return (
        f"{result.arm:<12}{run.time_s:>9.3f}{result.times_default['time']:>7.2f}"
        f"{run.mean_latency_s:>9.3f}{run.latency_p50_s:>9.3f}{run.latency_p95_s:>9.3f}"
        f"{run.prefilled:>11,}{run.prefilled / result.least_prefill:>8.3f}{result.hit_rate:>7.1%}"
        f"{run.steps:>8,}{run.decode_steps:>8,}{run.host_us_per_step:>9,.0f}{run.peak_kv:>9,}"
    )


def _figures(driven: DriveResult, stats: dict[str, float], host_s: float) -> RunFigures:
    latencies = sorted(driven.latencies_s)
    steps = int(stats["steps"])
    prefilled = int(stats["tokens_prefilled"] + stats["tree_tokens"])
    return RunFigures(
        time_s=driven.time_s,
        mean_latency_s=statistics.fmean(latencies),
        mean_latency_steps=statistics.fmean(driven.latencies_steps),
        latency_p50_s=_quantile(latencies, 0.5),
        latency_p95_s=_quantile(latencies, 0.95),
        prefilled=prefilled,
        tree=int(stats["tree_tokens"]),
        prompt=prefilled + int(stats["cached_tokens"]),
        cached=int(stats["cached_tokens"]),
        decoded=int(stats["tokens_decoded"]),
        steps=steps,
        decode_steps=driven.decode_steps,
        retractions=int(stats["retractions"]),
        host_us_per_step=1e6 * host_s / steps,
        peak_kv=driven.peak_kv_tokens,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def _median(runs: Sequence[RunFigures]) -> RunFigures:
    columns = [asdict(run) for run in runs]
    middle = {name: statistics.median(column[name] for column in columns) for name in columns[0]}
    whole = {name: int(v) for name, v in middle.items() if isinstance(columns[0][name], int)}
    return RunFigures(**(middle | whole))


def _ratios(runs: Sequence[RunFigures], first: Sequence[RunFigures]) -> dict[str, float]:
    def ratio(value: Callable[[RunFigures], float]) -> float:
        pairs = zip(runs, first, strict=True)
        return statistics.median(value(run) / value(base) for run, base in pairs)

    return {
        "time": ratio(lambda run: run.time_s),
        "mean_latency": ratio(lambda run: run.mean_latency_s),
        "mean_latency_steps": ratio(lambda run: run.mean_latency_steps),
        "prefilled": ratio(lambda run: run.prefilled),
        "host": ratio(lambda run: run.host_us_per_step),
    }
