"""An engine whose device runs out of memory over rows of logits, wherever a test says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from umbel.runtime.engine import Engine
from umbel.runtime.model_runner.inputs import StepInputs
from umbel.runtime.model_runner.runner import PassLogits, Runner
from umbel.runtime.sampling import SamplingRow
from umbel.runtime.sampling.device_sampler import PendingLogprobs, PendingTokens, TokenSampler

Place = Literal["logits", "sample", "logprobs"]
PLACES: tuple[Place, ...] = ("logits", "sample", "logprobs")
#: asked with the place and the logits there: whether memory runs out
IsShort = Callable[[Place, Tensor], bool]


def short_of_memory(engine: Engine, is_short: IsShort) -> None:
    """Let making logits, sampling from them and looking tokens up in them fail, as `is_short` says.

    They fail when the work is done, as late as they can.
    """
    parts = engine.core._passes._parts
    engine.core._passes._parts = dataclasses.replace(
        parts, runner=_Runner(parts.runner, is_short), sampler=_Sampler(parts.sampler, is_short)
    )


class _Runner:
    def __init__(self, runner: Runner, is_short: IsShort) -> None:
        self._runner, self._is_short = runner, is_short
        self.vocab_size, self.num_slots = runner.vocab_size, runner.num_slots

    def forward(self, inputs: StepInputs) -> PassLogits:
        return _Logits(self._runner.forward(inputs), self._is_short)


class _Logits:
    def __init__(self, logits: PassLogits, is_short: IsShort) -> None:
        self._logits, self._is_short = logits, is_short

    def rows(self, start: int, end: int) -> Tensor:
        made = self._logits.rows(start, end)
        _raise_if(self._is_short("logits", made))
        return made


class _Sampler:
    def __init__(self, sampler: TokenSampler, is_short: IsShort) -> None:
        self._sampler, self._is_short = sampler, is_short
        self.samples, self.arena = sampler.samples, sampler.arena

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        bitmask: Tensor,
        at: Sequence[int] | None = None,
    ) -> PendingTokens:
        made = self._sampler.sample(logits, rows, bitmask, at)
        _raise_if(self._is_short("sample", logits if at is None else logits[list(at)]))
        return made

    def logprobs(self, logits: Tensor, token_ids: Any, at: Any) -> PendingLogprobs:
        made = self._sampler.logprobs(logits, token_ids, at)
        _raise_if(self._is_short("logprobs", logits))
        return made


def _raise_if(is_short: bool) -> None:
    if is_short:
        raise torch.OutOfMemoryError("CUDA out of memory")
