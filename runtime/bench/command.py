"""The benchmarks as commands: their options, and what each returns to be printed.

A benchmark joins by one function that adds its parser, called in `add_benchmarks`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from umbel.lang.errors import EngineConfigError

from ..config import EngineConfig
from ..model_loading import find_device
from ..scheduler import POLICIES
from . import endurance, grammar_command, host_time, offline_workloads, process, programs, step
from .arms import ARMS
from .engines import NULL, SHAPES, BenchmarkModel
from .workloads import LIMITS, WORKLOADS

Progress = Callable[[str], None]
#: what a benchmark's parser has as its default `bench`: gives the text for stdout
Benchmark = Callable[[argparse.Namespace, Progress], str]


def add_benchmarks(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> Any:
    """Add one command for each benchmark, with its options; return argparse's group of them."""
    commands = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")

    def add(name: str, benchmark: Benchmark, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[common], help=text, description=text)
        added.set_defaults(bench=partial(_on_its_device, benchmark))
        added.add_argument("--json", action="store_true", help="figures for machines")
        return added

    _add_programs(add("programs", _programs, "program-shaped workloads, against other ways"))
    _add_step(add("step", _step, "one batch, step after step, without a scheduler"))
    _add_offline(add("offline", _offline, "batches of prompts, as engines are compared by"))
    _add_scheduler(add("scheduler", _scheduler, "host time of a step, without a model"))
    _add_storm(add("storm", _storm, "programs that are cancelled at random times"))
    _add_soak(add("soak", _soak, "memory over many short programs"))
    _add_process(add("process", _process, "an engine in a process of its own, against a thread"))
    grammar_command.add_options(add("grammar", _grammar, "what constraints cost"))
    return commands


def _on_its_device(benchmark: Benchmark, options: argparse.Namespace, progress: Progress) -> str:
    """Run a benchmark whose device, where it has one, is there: not each part looks for it."""
    if "device" in options:
        find_device(options.device)
    return benchmark(options, progress)


def _add_programs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        nargs="*",
        metavar="WORKLOAD",
        help=f"all by default: {', '.join(WORKLOADS)}",
    )
    parser.add_argument(
        "--arms",
        type=_names,
        default=list(ARMS),
        metavar="ARM,...",
        help="ways to run them, the first to compare with; all by default: "
        + "; ".join(f"{arm.name} ({arm.about})" for arm in ARMS.values()),
    )
    parser.add_argument("--size", choices=list(LIMITS), default="full")
    parser.add_argument("--repeats", type=_positive, default=3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random text (default: 0)")
    _add_model(parser)
    parser.add_argument("--max-running", type=_positive, help="requests that run at once")
    parser.add_argument("--max-step-tokens", type=_positive, help="token budget of one pass")


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=_counts, default=[1, 8, 64], metavar="N,...", help="(default: 1,8,64)"
    )
    parser.add_argument(
        "--context", type=_positive, default=128, help="tokens of each row (default: 128)"
    )
    parser.add_argument("--shared", type=int, default=0, help="tokens that all rows share before")
    parser.add_argument("--temperature", type=float, default=0.0, help="(default: greedy)")
    parser.add_argument("--steps", type=_positive, default=32, help="(default: %(default)s)")
    _add_model(parser)


def _add_offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        nargs="*",
        metavar="WORKLOAD",
        help=f"all by default: {', '.join(offline_workloads.OFFLINE_WORKLOADS)}",
    )
    parser.add_argument(
        "--requests", type=_positive, default=512, help="of throughput (default: %(default)s)"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="multiplies how many requests and tokens there are, for small machines (default: 1)",
    )
    parser.add_argument("--repeats", type=_positive, default=3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random text (default: 0)")
    _add_model(parser)
    add_tokenizer(parser)
    parser.add_argument("--max-seq-len", type=_positive, help="longest row (default: the model's)")
    parser.add_argument("--max-running", type=_positive, help="requests that run at once")


def _add_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=_positive, default=256, help="(default: %(default)s)")
    parser.add_argument(
        "--waiting", type=_positive, default=10_000, help="compared with none (default: 10000)"
    )
    parser.add_argument("--steps", type=_positive, default=300, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=_positive, default=5, help="(default: %(default)s)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="program")


def _add_storm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=_positive, default=1000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--span", type=float, default=2.0, help="seconds they come in (default: %(default)s)"
    )
    _add_model(parser)


def _add_soak(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--programs", type=_positive, default=200_000, help="(default: %(default)s)"
    )
    parser.add_argument("--at-once", type=_positive, default=128, help="(default: %(default)s)")
    _add_model(parser)


def _add_process(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=_positive, default=256, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=_positive, default=64, help="(default: %(default)s)")
    parser.add_argument("--reads", type=_positive, default=200, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=_positive, default=5, help="(default: %(default)s)")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=NULL,
        metavar="REF",
        help=f"{NULL} (no model, the default), random weights in the shape of "
        f"{', '.join(SHAPES)}, or a model as `umbel run` takes it",
    )
    parser.add_argument("--kv-tokens", type=_positive, help="tokens the KV pool holds")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--num-threads", type=_positive, help="CPU threads of a pass")


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add the option that gives a shape a tokenizer."""
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder with the tokenizer.json of a shape, whose tokens are bytes without it",
    )


def _programs(options: argparse.Namespace, progress: Progress) -> str:
    workloads = options.workload or list(WORKLOADS)
    _check_known("workload", workloads, WORKLOADS)
    _check_known("arm", options.arms, ARMS)
    limits = LIMITS[options.size]
    model = _model(
        options,
        options.max_running or limits.max_running,
        options.max_step_tokens or limits.max_step_tokens,
    )
    try:
        results = programs.run_programs(
            model,
            workloads=workloads,
            arms=options.arms,
            size=options.size,
            repeats=options.repeats,
            seed=options.seed,
            progress=progress,
        )
    finally:
        model.close()
    return _as_json(programs.as_data(results)) if options.json else programs.as_table(results)


def _step(options: argparse.Namespace, progress: Progress) -> str:
    cases = [
        step.StepCase(rows, options.context, options.shared, options.temperature)
        for rows in options.rows
    ]
    model = _model(options, max(64, *options.rows), 512)
    try:
        figures = step.run_steps(model, cases, options.steps)
    finally:
        model.close()
    if options.json:
        return _as_json([asdict(found) for found in figures])
    lines = [f"{model.name}", f"{'rows x context':40} {'ms':>9} {'floor':>9} {'tokens/s':>10}"]
    lines += [
        f"{found.case:40} {found.step_ms:9.3f} {found.floor_ms:9.3f} {found.tokens_per_s:10,.0f}"
        for found in figures
    ]
    return "\n".join(lines)


def _offline(options: argparse.Namespace, progress: Progress) -> str:
    workloads = options.workload or list(offline_workloads.OFFLINE_WORKLOADS)
    _check_known("workload", workloads, offline_workloads.OFFLINE_WORKLOADS)
    sizes = offline_workloads.OfflineSizes(requests=options.requests).scaled(options.scale)
    config = EngineConfig(
        max_running=options.max_running,
        max_seq_len=options.max_seq_len,
        kv_tokens=options.kv_tokens,
        device=options.device,
        num_threads=options.num_threads,
    )
    figures = offline_workloads.run_offline(
        lambda: BenchmarkModel(options.model, config, options.tokenizer),
        workloads,
        sizes,
        repeats=options.repeats,
        seed=options.seed,
        progress=progress,
    )
    if options.json:
        return _as_json([asdict(found) for found in figures])
    return offline_workloads.as_table(figures)


def _process(options: argparse.Namespace, progress: Progress) -> str:
    results = process.run_process(
        programs=options.programs,
        tokens=options.tokens,
        reads=options.reads,
        repeats=options.repeats,
        progress=progress,
    )
    return _as_json(process.as_data(results)) if options.json else process.as_table(results)


def _scheduler(options: argparse.Namespace, progress: Progress) -> str:
    results = host_time.run_host_time(
        running=options.running,
        waiting=options.waiting,
        steps=options.steps,
        repeats=options.repeats,
        policy=options.policy,
    )
    if options.json:
        return _as_json([asdict(result) for result in results])
    return host_time.as_table(results)


def _storm(options: argparse.Namespace, progress: Progress) -> str:
    model = _model(options, 64, 512, default_pool=16_384)
    try:
        figures = endurance.run_storm(
            model, programs=options.programs, seed=options.seed, span_s=options.span
        )
    finally:
        model.close()
    if options.json:
        return _as_json(asdict(figures))
    return (
        f"{figures.programs:,} programs, {figures.cancelled:,} cancelled before their end: settled "
        f"{figures.settle_s:.3f} s after the last cancel; slots lost: {figures.lost_slots}, "
        f"requests left: {figures.left_requests}"
    )


def _soak(options: argparse.Namespace, progress: Progress) -> str:
    # a small pool, which is full, and so resident, long before a tenth of the programs have run
    model = _model(options, 64, 512, default_pool=2048)
    try:
        figures = endurance.run_soak(
            model, programs=options.programs, at_once=options.at_once, progress=progress
        )
    finally:
        model.close()
    if options.json:
        return _as_json(asdict(figures))
    return (
        f"{figures.programs:,} programs in {figures.time_s:,.0f} s "
        f"({figures.programs_per_s:,.0f}/s): {figures.first_tenth_mib:,.1f} MiB after the first "
        f"tenth, {figures.end_mib:,.1f} at the end ({figures.growth:+.2%})"
    )


def _grammar(options: argparse.Namespace, progress: Progress) -> str:
    results = grammar_command.run(options, progress)
    if options.json:
        return _as_json(grammar_command.as_data(results))
    return grammar_command.as_table(results)


def _model(
    options: argparse.Namespace,
    max_running: int,
    max_step_tokens: int,
    default_pool: int | None = None,
) -> BenchmarkModel:
    config = EngineConfig(
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        kv_tokens=options.kv_tokens or default_pool,
        device=options.device,
        num_threads=options.num_threads,
    )
    return BenchmarkModel(options.model, config)


def _check_known(kind: str, names: Sequence[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(known)):
        raise EngineConfigError(
            f"there is no {kind} {', '.join(unknown)}; there are: {', '.join(known)}"
        )


def _as_json(data: object) -> str:
    return json.dumps(data, indent=2)


def _names(text: str) -> list[str]:
    return text.split(",")


def _counts(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not at least 1")
    return value
