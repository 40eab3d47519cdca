"""One batch, step after step, with no scheduler: what the device and its launches take.

Knows model runners and samplers; nothing of requests or programs.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from umbel.lang.errors import EngineConfigError
from umbel.lang.sampling_params import SamplingParams

from ..model_runner.inputs import StepInputs
from ..model_runner.runner import Runner
from ..sampling import SamplingRow
from ..sampling.device_sampler import HostSampler, TokenSampler
from .engines import BenchmarkModel

_NUM_WARM = 8


@dataclass(frozen=True, slots=True)
class StepCase:
    """Sequences that share a first part and have one of their own."""

    num_seqs: int
    num_own: int  # slots of each sequence alone, at the first step
    num_shared: int = 0  # slots of all before them
    temperature: float = 0.0

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV a step must read at least once, at the first step."""
        return self.num_shared + self.num_seqs * self.num_own

    @property
    def name(self) -> str:
        """The case in words."""
        shared = f"{self.num_shared:,} shared + " if self.num_shared else ""
        drawn = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"{self.num_seqs} x ({shared}{self.num_own:,}), {drawn}"


class DecodeSteps:
    """Decodes one batch, each step fed with the samples of the one before it."""

    def __init__(self, runner: Runner, sampler: TokenSampler, case: StepCase) -> None:
        self._runner, self._sampler, self._case = runner, sampler, case
        self._rows = [
            SamplingRow(SamplingParams(temperature=case.temperature), seed=i)
            for i in range(case.num_seqs)
        ]
        self._bitmask = torch.zeros(0)
        shared = np.arange(case.num_shared)
        own = case.num_shared + np.arange(case.num_seqs * case.num_own)
        per_seq = own.reshape(case.num_own, case.num_seqs).T  # as they grow together
        self._slots = [array("q", np.concatenate([shared, row]).tolist()) for row in per_seq]
        self._next = case.kv_tokens

    def step(self) -> None:
        """Queue a forward pass and its sampling."""
        n = len(self._slots)
        new = np.arange(self._next, self._next + n)
        self._next += n
        for slots, slot in zip(self._slots, new.tolist(), strict=True):
            slots.append(slot)
        length = len(self._slots[0])
        inputs = StepInputs(
            token_ids=np.arange(n),
            positions=np.full(n, length - 1),
            slot_mapping=new,
            query_indptr=np.arange(n + 1),
            kv_indptr=np.arange(n + 1) * length,
            kv_slots=tuple(self._slots),
            logits_rows=np.arange(n),
            tree_masks={},
            carried=np.arange(n),
            samples=self._sampler.samples,
            keys=tuple((i, 0) for i in range(n)),
        )
        logits = self._runner.forward(inputs).rows(0, n)
        self._sampler.sample(logits, self._rows, self._bitmask)
        for row in self._rows:
            row.num_sampled += 1


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a case took, beside the least it can take."""

    case: str
    rows: int
    step_ms: float
    floor_ms: float  # the weights and the KV that a step must read, over a copy's bandwidth

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all rows together get in a second."""
        return self.rows / self.step_ms * 1e3


def run_steps(
    model: BenchmarkModel, cases: Sequence[StepCase], num_steps: int
) -> list[StepFigures]:
    """Measure cases one after the other; raises EngineConfigError for one that does not fit."""
    parts = model.parts
    most = max(case.num_seqs for case in cases)
    if parts.sampler is not None and most > len(parts.sampler.samples):
        raise EngineConfigError(
            f"{most} rows at once: this engine was made for {len(parts.sampler.samples)}; "
            "raise --max-running"
        )
    sampler = parts.sampler or HostSampler(parts.runner.vocab_size, most)
    bandwidth = copy_bandwidth(sampler.samples.device)
    figures = []
    for case in cases:
        seconds = step_seconds(parts.runner, sampler, case, num_steps)
        kv_tokens = case.kv_tokens + case.num_seqs * (_NUM_WARM + num_steps // 2)  # half way
        floor = (parts.step_bytes + parts.kv_bytes_per_token * kv_tokens) / bandwidth
        figures.append(StepFigures(case.name, case.num_seqs, seconds * 1e3, floor * 1e3))
    return figures


def step_seconds(runner: Runner, sampler: TokenSampler, case: StepCase, num_steps: int) -> float:
    """Return the median seconds of a step, after some that are not counted.

    On a device steps are queued one behind the other, so only their mean can be told.
    """
    needed = case.kv_tokens + (num_steps + _NUM_WARM) * case.num_seqs
    if needed > runner.num_slots:
        raise EngineConfigError(
            f"{case.name} needs KV for {needed:,} tokens; the pool holds {runner.num_slots:,}: "
            "raise --kv-tokens"
        )
    steps = DecodeSteps(runner, sampler, case)
    for _ in range(_NUM_WARM):
        steps.step()
    _wait(sampler.samples)
    times = []
    started = time.perf_counter()
    for _ in range(num_steps):
        before = time.perf_counter()
        steps.step()
        times.append(time.perf_counter() - before)
    _wait(sampler.samples)
    if sampler.samples.device.type == "cuda":
        return (time.perf_counter() - started) / num_steps
    return statistics.median(times)


def copy_bandwidth(device: torch.device, num_bytes: int = 1 << 28) -> float:
    """Return the bytes per second that a copy reads and writes: the floor's measure."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    _wait(target)
    started, repeats = time.perf_counter(), 10
    for _ in range(repeats):
        target.copy_(source)
    _wait(target)
    return 2 * num_bytes * repeats / (time.perf_counter() - started)


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
