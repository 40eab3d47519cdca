"""Starts an engine and serves requests of every kind; prints what was compiled, when and where.

`python -m tests.support.compile_counts CONFIG SETTINGS HOW`, in a process of its own: kernels stay
in one. SETTINGS is the engine's as JSON; HOW is "ahead", or "launched": nothing is compiled ahead.
Prints {"load": [...], "serve": [...]}, the threads of what Triton compiled, and "ids", of all gens.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tests.support.device_programs import CHOICES, PATTERN, SCHEMA, run
from tests.support.engine_harness import GraphMaker

from umbel.lang.constraints import Constraint, JsonSchema, Regex
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Select, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.device_setup import DeviceSetup
from umbel.runtime.engine import Engine

#: every way to sample that kernels know apart, free and under constraints of both kinds
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"logprobs": True, "top_logprobs": 3},
    {"presence_penalty": 0.5, "logprobs": True},
    {"temperature": 0.8, "frequency_penalty": 0.5, "top_k": 20},
    {"prompt_logprobs": True, "logprobs": True},
)
CONSTRAINTS: tuple[Constraint | None, ...] = (None, Regex(PATTERN), JsonSchema(SCHEMA))


def graphs() -> Iterator[RequestGraph]:
    """Short prompts, so that all their passes are small: larger ones are not a start's business."""
    for sampling in SAMPLING:
        for constraint in CONSTRAINTS:
            maker = GraphMaker()
            at = maker.add(Text(("start, ",)), None)
            params = SamplingParams(max_tokens=12 if constraint is None else 60, **sampling)
            at = maker.add(Gen("a", params, constraint), at)
            at = maker.add(Text((" and ",)), at)
            maker.add(Select("b", CHOICES), at)
            yield maker.graph()


def main(config: str, settings: str, how: str) -> None:
    """Start, serve, and print what was counted."""
    import triton

    threads: list[str] = []

    def note(*, cache_hit: bool, **_what: Any) -> None:
        if not cache_hit:
            threads.append(threading.current_thread().name)

    triton.knobs.compilation.listener = note
    if how == "launched":
        DeviceSetup.compile_kernels = lambda self, new_pool, num_rows: None  # type: ignore[method-assign]
    engine = Engine.from_model(f"dummy:{config}", **json.loads(settings))
    loaded = list(threads)
    ids = []
    for batch in ([graph] for graph in graphs()):  # alone, and then all of them together
        ids += _ids(engine, batch)
    ids += _ids(engine, list(graphs()))
    engine.close()
    found = {"load": loaded, "serve": threads[len(loaded) :], "ids": ids}
    sys.stdout.write(f"{json.dumps(found)}\n")


def _ids(engine: Engine, batch: list[RequestGraph]) -> list[Any]:
    collectors = run(engine, batch)
    assert not any(collector.errors for collector in collectors)
    return [
        [
            [sample.token_ids for sample in result.samples]
            for _node, result in sorted(collector.results.items())
        ]
        for collector in collectors
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
