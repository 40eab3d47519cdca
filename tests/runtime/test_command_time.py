"""With overlap, commands get the time in which the device is at work anyway, and a little more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tests.support.engine_harness import GRAMMAR, TOKENIZER, drive, make_runner, open_run
from tests.support.graphs import GraphBuilder

from umbel.lang.ir import Gen, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.sampling import SampledTokens, SamplingRow
from umbel.runtime.sampling.device_sampler import HostSampler, PendingTokens


@dataclass
class Late:
    """Samples that are on their way until somebody waits for them."""

    pending: PendingTokens
    is_ready: bool

    def wait(self) -> SampledTokens:
        self.is_ready = True
        return self.pending.wait()


class LateSampler(HostSampler):
    is_busy = True

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        bitmask: torch.Tensor,
        at: Sequence[int] | None = None,
    ) -> PendingTokens:
        return Late(super().sample(logits, rows, bitmask, at), not self.is_busy)


def make_engine(sampler: LateSampler) -> Engine:
    config = EngineConfig(max_running=8, max_step_tokens=64, overlap=True)
    return Engine(
        make_runner(), TOKENIZER, config, max_seq_len=512, grammar=GRAMMAR, sampler=sampler,
        start=False,
    )  # fmt: skip


def num_run_by_a_step(*, is_busy: bool) -> int:
    """Post commands that take longer than a step may wait for; count those that one step runs."""
    sampler = LateSampler(TOKENIZER.vocabulary().size, 8)
    sampler.is_busy = is_busy
    engine = make_engine(sampler)
    builder = GraphBuilder()
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    builder.add(Gen("a", sampling), builder.add(Text(("abc",)), None))
    open_run(engine, builder.piece())
    engine.step()
    num_run = 0

    def command() -> None:
        nonlocal num_run
        num_run += 1
        time.sleep(0.02)

    for _ in range(3):
        engine.post(command)
    assert engine.step()
    found = num_run
    drive(engine)
    assert num_run == 3, "a command was left behind"
    return found


def test_a_busy_device_gives_commands_all_the_time_they_want() -> None:
    assert num_run_by_a_step(is_busy=True) == 3


def test_an_idle_device_does_not_wait_for_a_thousand_commands() -> None:
    assert num_run_by_a_step(is_busy=False) == 1
