"""What masks take of a model's step. Knows models and samplers; no engine of grammars by name."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from umbel.lang.constraints import JsonSchema, Regex
from umbel.lang.errors import EngineError

from ..grammar import TokenBitmask
from ..grammar.matcher import CompiledGrammar, GrammarMatcher
from ..sampling import SamplingRow
from ..sampling.device_sampler import (
    HostSampler,
    IntArray,
    PendingLogprobs,
    PendingTokens,
    TokenSampler,
)
from .engines import BenchmarkModel
from .grammar_cases import FLAT
from .step import DecodeSteps, StepCase

#: lines of words and numbers, which never end
ENDLESS = Regex(r"([a-z]{1,12}( [a-z]{1,12}){0,5}: [0-9]{1,6}\n)*")

_WARM_STEPS = 2


@dataclass(frozen=True, slots=True)
class ShareFigures:
    """One batch with every row constrained: medians over the steps.

    On a CPU the working thread's own time, so that what else the machine does counts little: give
    the pass one thread, or its other threads' part of the step is left out.
    """

    model: str
    engine: str
    rows: int
    step_ms: float  # without constraints: forward pass and sampling
    masks_ms: float  # filling and stepping all rows, and what sampling takes longer
    share: float  # of the step; the median of the ratios of neighbouring steps


class _MaskedSampler:
    """A sampler that masks every row while `grammar` is set, and times what that takes."""

    def __init__(self, inner: TokenSampler, vocab_size: int, num_rows: int) -> None:
        self.samples, self.arena = inner.samples, inner.arena
        self.grammar: CompiledGrammar | None = None
        self.mask_s = 0.0  # of the last call: filling, and stepping
        self.sample_s = 0.0
        self._inner = inner
        on_gpu = inner.samples.device.type == "cuda"
        self.clock = time.perf_counter if on_gpu else time.thread_time
        self._bitmask = TokenBitmask(num_rows, vocab_size, pin_memory=on_gpu)
        self._matchers: list[GrammarMatcher] = []

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        bitmask: Tensor,
        at: Sequence[int] | None = None,
    ) -> PendingTokens:
        """Sample, masked or not, and wait for the tokens."""
        grammar, started = self.grammar, self.clock()
        if grammar is not None:
            if not self._matchers:
                self._matchers = [grammar.matcher() for _ in rows]
            for index, (matcher, row) in enumerate(zip(self._matchers, rows, strict=True)):
                row.bitmask = self._bitmask.row(index)
                matcher.fill(row.bitmask)
        filled = self.clock()
        pending = self._inner.sample(logits, rows, self._bitmask.tensor, at)
        token_ids = pending.wait().token_ids
        sampled = self.clock()
        if grammar is not None:
            for index, token_id in enumerate(token_ids):
                rows[index].bitmask = None
                if not self._matchers[index].accept(token_id):
                    self._matchers[index] = grammar.matcher()  # it has ended
        self.sample_s = sampled - filled
        self.mask_s = filled - started + self.clock() - sampled
        return pending

    def logprobs(self, logits: Tensor, token_ids: IntArray, at: IntArray) -> PendingLogprobs:
        """Pass on."""
        return self._inner.logprobs(logits, token_ids, at)


def run_share(model: BenchmarkModel, *, num_rows: int, steps: int, engine: str) -> ShareFigures:
    """Decode one batch, every other step with all rows constrained to lists of flat objects.

    `engine` is the one of grammars. Raises EngineError where the KV pool is too small.
    """
    records = {"type": "array", "items": FLAT}
    grammar = model.grammar.compile(JsonSchema(json.dumps(records)), engine)
    runner = model.parts.runner
    inner = model.parts.sampler or HostSampler(runner.vocab_size, num_rows)
    sampler = _MaskedSampler(inner, runner.vocab_size, num_rows)
    case = StepCase(num_rows, 32, temperature=1.0)
    needed = case.kv_tokens + 2 * (steps + _WARM_STEPS) * num_rows
    if needed > runner.num_slots:
        raise EngineError(f"{num_rows} rows need {needed:,} KV slots: raise --kv-tokens")
    batch = DecodeSteps(runner, sampler, case)
    free_s, masks_s, shares = [], [], []
    for step in range(steps + _WARM_STEPS):
        sampler.grammar = None
        started = sampler.clock()
        batch.step()
        free, sample = sampler.clock() - started, sampler.sample_s
        sampler.grammar = grammar
        batch.step()
        masks = sampler.mask_s + sampler.sample_s - sample
        if step >= _WARM_STEPS:
            free_s.append(free)
            masks_s.append(masks)
            shares.append(masks / free)
    middle = statistics.median
    return ShareFigures(
        model.name, engine, num_rows, middle(free_s) * 1e3, middle(masks_s) * 1e3, middle(shares)
    )
