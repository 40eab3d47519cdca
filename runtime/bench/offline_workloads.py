"""Offline workloads on one engine: throughput, a shared prefix, one stream, one batch, a schema.

They have the shapes that engines are commonly compared by, with random text of our own. Beside
each figure stands its floor: the least bytes that its passes must read, over a copy's bandwidth.
Knows engines and prompts; nothing of options.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import EngineConfigError, EngineError
from umbel.lang.ir import Gen
from umbel.lang.sampling_params import SamplingParams

from ..model_loading import EngineParts
from ..sampling.device_sampler import HostSampler
from .engines import BenchmarkModel
from .grammar_cases import PERSON
from .offline import free_gen, num_tokens, num_valid, submit_prompts
from .random_text import RandomText
from .step import StepCase, copy_bandwidth, step_seconds

_ALONE_STEPS = 32  # of the batch that is decoded without an engine, to compare with
_WARM_TOKENS = 32

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSizes:
    """How many requests, and of how many tokens, each workload has."""

    requests: int = 512  # throughput
    shortest: int = 100  # prompts and outputs are of random lengths
    longest: int = 1024
    sharing: int = 256  # requests behind one prefix
    prefix: int = 4096
    own: int = 64
    sharing_out: int = 128
    stream_prompt: int = 128
    stream_out: int = 256
    rows: int = 64  # decode
    context: int = 1024
    rows_out: int = 256
    guided: int = 64
    guided_prompt: int = 128
    guided_out: int = 256  # at most

    def scaled(self, scale: float) -> OfflineSizes:
        """Return sizes that are so many times as large, each at least 2."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: max(2, round(n * scale)) for name, n in sizes.items()})


@dataclass(frozen=True, slots=True)
class OfflineFigure:
    """One figure: the median of the repeats, and beside it what memory alone would allow.

    `ratio` is how many times the floor's time was taken. `idle` is the share of a decode step's
    time in which the device had nothing to do: what the same steps take without an engine, queued
    one behind the other, is left out of it.
    """

    workload: str
    what: str
    unit: str
    value: float
    each: tuple[float, ...]
    floor: float | None = None
    ratio: float | None = None
    idle: float | None = None


class _Floor(NamedTuple):
    """The least time that passes take: what they must read, over a copy's bandwidth."""

    step_bytes: int
    kv_bytes: int  # of one token
    bandwidth: float

    @classmethod
    def of(cls, parts: EngineParts) -> _Floor:
        device = torch.device("cpu") if parts.sampler is None else parts.sampler.samples.device
        return cls(parts.step_bytes, parts.kv_bytes_per_token, copy_bandwidth(device))

    def seconds(self, passes: int, kv_reads: float) -> float:
        """Return the time of passes that read `kv_reads` tokens' KV in all."""
        return (passes * self.step_bytes + kv_reads * self.kv_bytes) / self.bandwidth


class _Offline:
    """One engine, its prompts and its floor. A workload is a method that returns figures."""

    def __init__(
        self, model: BenchmarkModel, sizes: OfflineSizes, repeats: int, seed: int, alone_s: float
    ) -> None:
        self._sizes, self._repeats, self._alone_s = sizes, repeats, alone_s
        self._text = RandomText(model.tokenizer, seed)
        self._lengths = random.Random(seed)
        self._floor = _Floor.of(model.parts)
        self.engine = model.new_engine(threaded=True)

    def throughput(self) -> list[OfflineFigure]:
        """Run requests of random lengths, at temperature 0.6."""
        sizes = self._sizes

        def draw() -> int:
            return self._lengths.randint(sizes.shortest, sizes.longest)

        lengths = [(draw(), draw()) for _ in range(sizes.requests)]
        self._timed(self._prompts([sizes.shortest] * sizes.requests), _WARM_TOKENS, 0.6)
        prompts, outs = self._prompts([n for n, _ in lengths]), [n for _, n in lengths]
        times = []
        for _ in range(self._repeats):
            self.engine.reset_cache()
            times.append(self._timed(prompts, outs, 0.6))
        reads = sum(out * (prompt + out / 2) for prompt, out in lengths)
        what = f"{sizes.requests} requests of {sizes.shortest} to {sizes.longest}, in and out"
        return [_rate("throughput", what, times, sum(outs), self._floor.seconds(max(outs), reads))]

    def prefix(self) -> list[OfflineFigure]:
        """Run requests that share a prefix, greedy: with none of it in the cache, and with it."""
        sizes, figures = self._sizes, []
        self._timed(self._sharing(2), 8, 0.0)
        own = sizes.sharing * sizes.sharing_out * (sizes.own + sizes.sharing_out / 2)
        floor = self._floor.seconds(sizes.sharing_out, sizes.sharing_out * sizes.prefix + own)
        for state in ("cold", "warm"):
            times = []
            for _ in range(self._repeats):
                prompts = self._sharing(sizes.sharing)
                self.engine.reset_cache()
                if state == "warm":
                    self._timed(prompts[:1], 1, 0.0)
                times.append(self._timed(prompts, sizes.sharing_out, 0.0))
            what = f"{sizes.sharing} x ({sizes.prefix} shared + {sizes.own}), {state}"
            tokens = sizes.sharing * sizes.sharing_out
            figures.append(_rate("prefix", what, times, tokens, floor))
        return figures

    def stream(self) -> list[OfflineFigure]:
        """Run one request, greedy: what each token takes behind the first, and what that takes."""
        sizes, first, token = self._sizes, [], []
        for _ in range(1 + self._repeats):
            prompts = self._prompts([sizes.stream_prompt])
            self.engine.reset_cache()
            one = self._timed(prompts, 1, 0.0)
            self.engine.reset_cache()
            first.append(one)
            token.append((self._timed(prompts, 1 + sizes.stream_out, 0.0) - one) / sizes.stream_out)
        floor = self._floor.seconds(1, sizes.stream_prompt + sizes.stream_out / 2)
        what = f"1 request, {sizes.stream_prompt} + {sizes.stream_out}"
        return [
            _time("stream", what, "ms per token", token[1:], floor),
            _time("stream", f"{what}, to the first token", "ms", first[1:]),
        ]

    def decode(self) -> list[OfflineFigure]:
        """Run one batch, greedy: a step with all prompts in the cache, and filling the cache."""
        sizes, fills, steps = self._sizes, [], []
        for _ in range(1 + self._repeats):
            prompts = self._prompts([sizes.context] * sizes.rows)
            self.engine.reset_cache()
            fills.append(self._timed(prompts, 1, 0.0))
            one = self._timed(prompts, 1, 0.0)
            steps.append((self._timed(prompts, 1 + sizes.rows_out, 0.0) - one) / sizes.rows_out)
        floor = self._floor.seconds(1, sizes.rows * (sizes.context + sizes.rows_out / 2))
        what = f"{sizes.rows} x {sizes.context} + {sizes.rows_out}"
        step = _time("decode", what, "ms per step", steps[1:], floor)
        alone = _time("decode", f"{what}, no engine", "ms per step", [self._alone_s], floor)
        tokens = sizes.rows * sizes.context
        fill = _rate("decode", f"{what}, prompts", fills[1:], tokens, None, "prefilled tokens/s")
        return [replace(step, idle=1 - alone.value / step.value), alone, fill]

    def guided(self) -> list[OfflineFigure]:
        """Run requests under a JSON schema, at temperature 0.8, and the same without one."""
        sizes = self._sizes
        schema = JsonSchema(json.dumps(PERSON))
        sampling = SamplingParams(max_tokens=sizes.guided_out, temperature=0.8)
        gens = {
            "guided": Gen("", sampling, schema),
            "free": free_gen(sizes.guided_out, 0.8),
        }
        rates: dict[str, list[float]] = {way: [] for way in gens}
        valid = 0
        for _ in range(1 + self._repeats):
            prompts = self._prompts([sizes.guided_prompt] * sizes.guided)
            for way, gen in gens.items():
                self.engine.reset_cache()
                started = time.perf_counter()
                results = submit_prompts(self.engine, prompts, [gen] * len(prompts)).results()
                rates[way].append(num_tokens(results) / (time.perf_counter() - started))
                if way == "guided":
                    valid = num_valid(schema, results)
        about = {"guided": f"a schema, {valid} of {sizes.guided} valid", "free": "no schema"}
        return [
            _figure("guided", about[way], "output tokens/s", found[1:])
            for way, found in rates.items()
        ]

    def _prompts(self, lengths: Sequence[int]) -> list[str]:
        return [self._text.draw(length) for length in lengths]

    def _sharing(self, num: int) -> list[str]:
        prefix = self._text.draw(self._sizes.prefix)
        return [prefix + own for own in self._prompts([self._sizes.own] * num)]

    def _timed(self, prompts: Sequence[str], outs: int | list[int], temperature: float) -> float:
        """Return the seconds that generating outs[i] tokens behind each prompt takes."""
        outs = [outs] * len(prompts) if isinstance(outs, int) else outs
        gens = [free_gen(n, temperature) for n in outs]
        started = time.perf_counter()
        results = submit_prompts(self.engine, prompts, gens).results()
        seconds = time.perf_counter() - started
        if num_tokens(results) != sum(outs):
            raise EngineError(f"{num_tokens(results)} tokens came back, {sum(outs)} were asked")
        return seconds


#: what can be measured, by name
OFFLINE_WORKLOADS: dict[str, Callable[[_Offline], list[OfflineFigure]]] = {
    "throughput": _Offline.throughput,
    "prefix": _Offline.prefix,
    "stream": _Offline.stream,
    "decode": _Offline.decode,
    "guided": _Offline.guided,
}


def run_offline(
    load: Callable[[], BenchmarkModel],
    workloads: Sequence[str],
    sizes: OfflineSizes,
    *,
    repeats: int,
    seed: int,
    progress: Progress,
) -> list[OfflineFigure]:
    """Load a model, and measure workloads on one engine. Raises EngineConfigError, EngineError."""
    started = time.perf_counter()
    model = load()
    try:
        ready_s = time.perf_counter() - started
        progress(f"{model.name} is ready")
        alone_s = _alone_seconds(model, sizes) if "decode" in workloads else 0.0
        offline = _Offline(model, sizes, repeats, seed, alone_s)
        figures = [_figure("start", "from loading to ready", "s", [ready_s])]
        try:
            for name in workloads:
                started = time.perf_counter()
                figures += OFFLINE_WORKLOADS[name](offline)
                progress(f"{name}: {time.perf_counter() - started:.1f} s")
        finally:
            offline.engine.close()
    finally:
        model.close()
    return figures


def as_table(figures: Sequence[OfflineFigure]) -> str:
    """Return the figures, a line for each."""
    lines = [f"{'workload':10} {'':50} {'median':>10} {'floor':>10} {'ratio':>6} {'idle':>6}"]
    for found in figures:
        floor, ratio, idle = (
            "" if value is None else format(value, form)
            for value, form in ((found.floor, ",.2f"), (found.ratio, ".2f"), (found.idle, ".1%"))
        )
        lines.append(
            f"{found.workload:10} {found.what:50} {found.value:10,.2f} {floor:>10} {ratio:>6} "
            f"{idle:>6}  {found.unit}"
        )
    return "\n".join(lines)


def _alone_seconds(model: BenchmarkModel, sizes: OfflineSizes) -> float:
    """Return what a step of `decode` takes, half way, with no engine around it."""
    runner, sampler = model.parts.runner, model.parts.sampler
    case = StepCase(sizes.rows, sizes.context + sizes.rows_out // 2)
    if sampler is not None and sizes.rows > len(sampler.samples):
        raise EngineConfigError(f"{sizes.rows} rows at once: raise --max-running")
    return step_seconds(
        runner, sampler or HostSampler(runner.vocab_size, sizes.rows), case, _ALONE_STEPS
    )


def _figure(workload: str, what: str, unit: str, each: Sequence[float]) -> OfflineFigure:
    return OfflineFigure(workload, what, unit, statistics.median(each), tuple(each))


def _time(
    workload: str, what: str, unit: str, seconds: Sequence[float], floor_s: float | None = None
) -> OfflineFigure:
    """Return a figure in milliseconds."""
    figure = _figure(workload, what, unit, [1e3 * s for s in seconds])
    if not floor_s:  # without a model nothing is read
        return figure
    return replace(figure, floor=1e3 * floor_s, ratio=figure.value / (1e3 * floor_s))


def _rate(
    workload: str,
    what: str,
    seconds: Sequence[float],
    tokens: int,
    floor_s: float | None,
    unit: str = "output tokens/s",
) -> OfflineFigure:
    """Return a figure in tokens per second."""
    figure = _figure(workload, what, unit, [tokens / s for s in seconds])
    if not floor_s:
        return figure
    floor = tokens / floor_s
    return replace(figure, floor=floor, ratio=floor / figure.value)
