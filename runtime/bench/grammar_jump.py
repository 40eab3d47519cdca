"""What a schema costs a batch that decodes, and what jumping over forced text brings back.

The same prompts run freely, under a schema token by token, and under it with jumps, in turns, each
on an engine of its own on one model. Knows engines; no engine of grammars.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from umbel.lang.constraints import JsonSchema
from umbel.lang.ir import Gen
from umbel.lang.sampling_params import SamplingParams

from .engines import BenchmarkModel
from .grammar_cases import INCIDENT, PERSON
from .live_steps import LiveSteps
from .offline import free_gen, num_tokens, num_valid, submit_prompts
from .random_text import RandomText

_PROMPT = 128  # tokens
_TEMPERATURE = 0.8

SCHEMAS: dict[str, dict[str, Any]] = {"fixed keys": INCIDENT, "nested": PERSON}


@dataclass(frozen=True, slots=True)
class JumpFigures:
    """One way to run a batch: medians over the repeats.

    Tokens are all of the output, those that were not sampled too. A live step is one in which all
    rows decode and nothing is prefilled. `step_ratio` is over the free run, at as many steps from
    the start, so with rows of the same lengths; with jumps rows grow faster, and there is none.
    """

    model: str
    schema: str
    way: str
    rows: int
    valid: int
    tokens: int
    forced: int  # of the tokens: appended, not sampled
    steps: int
    tokens_per_s: float
    times_faster: float | None  # with jumps: tokens/s over those without
    live_steps: int
    live_step_ms: float
    step_ratio: float | None


class _Run(NamedTuple):
    valid: int
    tokens: int
    forced: int
    steps: int
    seconds: float
    live: list[float]  # seconds of each live step

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def run_jump(
    model: BenchmarkModel, *, num_rows: int, max_tokens: int, repeats: int
) -> list[JumpFigures]:
    """Run batches under each schema; a first round of each is not counted."""
    figures = []
    for name, schema in SCHEMAS.items():
        constraint = JsonSchema(json.dumps(schema))
        model.grammar.compile(constraint)  # engines share what it has compiled
        sampling = SamplingParams(max_tokens=max_tokens, temperature=_TEMPERATURE)
        guided = Gen("", sampling, constraint)
        ways = {
            "free": (free_gen(max_tokens, _TEMPERATURE), False),
            "guided": (guided, False),
            "guided, jumps": (guided, True),
        }
        runs: dict[str, list[_Run]] = {way: [] for way in ways}
        for repeat in range(1 + repeats):
            text = RandomText(model.tokenizer, repeat)
            prompts = [text.draw(_PROMPT) for _ in range(num_rows)]
            for way, (gen, jumps) in ways.items():
                runs[way].append(_run(model, prompts, gen, jumps, constraint))
        counted = {way: found[1:] for way, found in runs.items()}
        figures += [_figures(model.name, name, num_rows, way, counted) for way in ways]
    return figures


def _run(
    model: BenchmarkModel,
    prompts: Sequence[str],
    gen: Gen,
    jumps: bool,
    constraint: JsonSchema,
) -> _Run:
    engine = model.new_engine(jump_forward=jumps)
    steps = LiveSteps(engine, len(prompts))
    started = time.perf_counter()
    batch = submit_prompts(engine, prompts, [gen] * len(prompts))
    while not batch.has_ended:
        steps.step()
    seconds = time.perf_counter() - started
    results = batch.results()
    num_steps = engine.core.scheduler.stats.steps
    engine.close()
    return _Run(
        0 if gen.constraint is None else num_valid(constraint, results),
        num_tokens(results),
        sum(result.usage.forced_tokens for result in results),
        num_steps,
        seconds,
        steps.seconds,
    )


def _figures(
    model: str, schema: str, num_rows: int, way: str, counted: dict[str, list[_Run]]
) -> JumpFigures:
    runs, middle = counted[way], statistics.median
    times_faster = step_ratio = None
    if way == "guided, jumps":
        pairs = zip(runs, counted["guided"], strict=True)
        times_faster = middle(run.tokens_per_s / plain.tokens_per_s for run, plain in pairs)
    elif way == "guided":
        pairs = zip(runs, counted["free"], strict=True)
        ratios = [_step_ratio(run.live, free.live) for run, free in pairs if run.live and free.live]
        step_ratio = middle(ratios) if ratios else None
    live = [seconds for run in runs for seconds in run.live]
    return JumpFigures(
        model,
        schema,
        way,
        num_rows,
        min(run.valid for run in runs),
        round(middle(run.tokens for run in runs)),
        round(middle(run.forced for run in runs)),
        round(middle(run.steps for run in runs)),
        middle(run.tokens_per_s for run in runs),
        times_faster,
        len(live),
        middle(live) * 1e3 if live else 0.0,
        step_ratio,
    )


def _step_ratio(guided: list[float], free: list[float]) -> float:
    """Return how many times as long a live step took, over as many steps of both from the start."""
    num = min(len(guided), len(free))
    return statistics.median(guided[:num]) / statistics.median(free[:num])
