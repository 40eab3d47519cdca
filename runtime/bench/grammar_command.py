"""The grammar benchmark as a command: which parts run, on what, and how they are printed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from umbel.lang.errors import EngineConfigError

from ..config import EngineConfig
from ..grammar import GrammarCompiler
from ..vocabulary import Vocabulary
from . import grammar, grammar_beside, grammar_device, grammar_jump, grammar_steps
from .engines import NULL, BenchmarkModel
from .grammar_vocabulary import load_vocabulary, made_up_vocabulary

PARTS = ("fills", "builds", "share", "jump", "beside", "device")
_TIMEOUT_S = 120.0

Progress = Callable[[str], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="fills (masks by engine), builds (mask rows against outlines-core), share (of a "
        "model's step), jump (a batch under a schema, with jumps over forced text, without, and "
        "free), beside (decoding while constraints compile), device (automata on it); by default "
        "those that the options have what they need for",
    )
    parser.add_argument(
        "--vocabulary",
        default="151936",
        metavar="N|REF",
        help="of all but share and jump: a made-up one of N ids, or a model's, by its folder, GGUF "
        "file or alias (default: %(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=_rows,
        default=[64, 256],
        metavar="N,...",
        help="of all but builds and beside (default: 64,256)",
    )
    parser.add_argument("--steps", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--model",
        default=NULL,
        metavar="REF",
        help="of share, jump and beside: as in bench programs",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="of the model: as in bench offline"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=256, help="of each row of jump (default: %(default)s)"
    )
    parser.add_argument("--kv-tokens", type=int, help="tokens the model's KV pool holds")
    parser.add_argument(
        "--num-threads", type=int, default=1, help="CPU threads of a pass (default: 1)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="of beside: alone, and at least so long beside a compile (default: 10)",
    )


def run(options: argparse.Namespace, progress: Progress) -> dict[str, list[Any]]:
    """Run the parts that were asked for; return each one's figures."""
    parts = options.parts or _possible(options)
    if unknown := sorted(set(parts) - set(PARTS)):
        raise EngineConfigError(
            f"there is no part {', '.join(unknown)}; there are: {', '.join(PARTS)}"
        )
    results: dict[str, list[Any]] = {}
    if {"fills", "builds", "device"} & set(parts):
        _on_vocabulary(options, parts, progress, results)
    if {"share", "jump", "beside"} & set(parts):
        _on_model(options, parts, progress, results)
    return results


def as_data(results: dict[str, list[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the figures for machines."""
    return {part: [asdict(row) for row in rows] for part, rows in results.items()}


def as_table(results: dict[str, list[Any]]) -> str:
    """Return a table for each part."""
    return "\n\n".join(f"{part}\n{_table(rows)}" for part, rows in results.items())


def _possible(options: argparse.Namespace) -> list[str]:
    found = ["fills", "builds"]
    if options.model != NULL:
        found += ["share", "jump", "beside"]
    return [*found, "device"] if options.device == "cuda" else found


def _on_vocabulary(
    options: argparse.Namespace,
    parts: Sequence[str],
    progress: Progress,
    results: dict[str, list[Any]],
) -> None:
    vocabulary = _vocabulary(options.vocabulary)
    compiler = GrammarCompiler(vocabulary, timeout_s=_TIMEOUT_S)
    try:
        if "fills" in parts:
            results["fills"] = []
            for num_rows in options.rows:
                progress(f"fills: {num_rows} rows, {vocabulary.size:,} ids")
                results["fills"] += grammar.run_fills(
                    compiler,
                    num_rows=num_rows,
                    steps=options.steps,
                    repeats=options.repeats,
                    num_threads=os.cpu_count() or 1,
                )
        if "builds" in parts:
            progress(f"builds: {vocabulary.size:,} ids")
            results["builds"] = list(grammar.run_builds(vocabulary, repeats=options.repeats))
        if "device" in parts:
            progress(f"device: {options.device}")
            results["device"] = list(
                grammar_device.run_device(
                    compiler,
                    torch.device(options.device),
                    rows=options.rows,
                    repeats=options.repeats,
                )
            )
    finally:
        compiler.close()


def _vocabulary(wanted: str) -> Vocabulary:
    return made_up_vocabulary(int(wanted)) if wanted.isdigit() else load_vocabulary(wanted)


def _on_model(
    options: argparse.Namespace,
    parts: Sequence[str],
    progress: Progress,
    results: dict[str, list[Any]],
) -> None:
    most = max(options.rows)
    config = EngineConfig(
        max_running=most,
        max_step_tokens=most if most > 512 else None,  # a row of each in a step
        kv_tokens=options.kv_tokens,
        device=options.device,
        num_threads=options.num_threads,
    )
    model = BenchmarkModel(options.model, config, options.tokenizer)
    try:
        if "share" in parts:
            results["share"] = []
            for num_rows in options.rows:
                for engine in ("umbel-dfa", "llguidance"):
                    progress(f"share: {num_rows} rows of {options.model}, {engine}")
                    figures = grammar_steps.run_share(
                        model, num_rows=num_rows, steps=options.steps, engine=engine
                    )
                    results["share"].append(figures)
        if "jump" in parts:
            results["jump"] = []
            for num_rows in options.rows:
                progress(f"jump: {num_rows} rows of {options.model}")
                results["jump"] += grammar_jump.run_jump(
                    model,
                    num_rows=num_rows,
                    max_tokens=options.max_tokens,
                    repeats=options.repeats,
                )
        if "beside" in parts:
            progress(f"beside: {options.seconds:g} s alone, and at least as long beside compiles")
            vocabulary = _vocabulary(options.vocabulary)
            results["beside"] = [
                grammar_beside.run_beside(model, vocabulary, seconds=options.seconds)
            ]
    finally:
        model.close()


def _table(rows: Sequence[Any]) -> str:
    names = [field.name for field in fields(rows[0])]
    cells = [names, *([_cell(getattr(row, name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rows(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(f"{text}: numbers of rows are at least 1")
    return found
