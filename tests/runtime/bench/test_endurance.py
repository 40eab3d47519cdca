"""Storms and soaks, small: what must be exact is asserted, memory over a long run only measured."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from umbel.runtime.bench.endurance import run_soak, run_storm
from umbel.runtime.bench.engines import NULL, BenchmarkModel
from umbel.runtime.bench.host_time import run_host_time
from umbel.runtime.config import EngineConfig


@pytest.fixture(scope="module")
def model() -> Iterator[BenchmarkModel]:
    config = EngineConfig(
        max_running=16, max_step_tokens=128, kv_tokens=2048, check_accounting=True
    )
    model = BenchmarkModel(NULL, config)
    yield model
    model.close()


def test_a_storm_of_cancels_leaves_nothing_behind(model: BenchmarkModel) -> None:
    figures = run_storm(model, programs=60, span_s=0.5)
    assert figures.lost_slots == figures.left_requests == 0
    assert figures.finished + figures.cancelled == 60
    assert figures.cancelled > 0


def test_every_program_of_a_soak_ends(model: BenchmarkModel) -> None:
    lines: list[str] = []
    figures = run_soak(model, programs=100, at_once=8, progress=lines.append)
    assert figures.programs == 100
    assert len(lines) == 10
    assert 0 < figures.first_tenth_mib <= figures.end_mib * 1.5


@pytest.mark.slow
def test_memory_stays_flat_over_many_short_programs() -> None:
    blocks: list[int] = []

    def count(_: str) -> None:
        gc.collect()
        blocks.append(sys.getallocatedblocks())  # of Python's allocator

    model = BenchmarkModel(NULL, EngineConfig(max_running=64, kv_tokens=1024))
    try:
        figures = run_soak(model, programs=20_000, progress=count)
    finally:
        model.close()
    # As many programs are under way at both: one object that each leaves would make 8,000.
    assert blocks[8] - blocks[4] < 2000
    # from the middle on: until then the tokenizer fills its own cache, of 10,000 pieces of text
    assert figures.end_mib / figures.tenths_mib[4] - 1 < 0.01  # 270 bytes a program


def test_host_time_is_measured_with_and_without_a_queue() -> None:
    results = run_host_time(running=8, waiting=20, steps=5, repeats=1, policy="program")
    places = [(result.part, result.case, result.waiting) for result in results]
    cases = [("", 0), ("a queue", 20), ("cache off", 0)]
    assert places == [(part, *case) for part in ("scheduler", "engine") for case in cases]
    assert all(0 < result.median_us <= result.p95_us for result in results)
