from __future__ import annotations

import pytest

from umbel.lang.errors import EngineConfigError
from umbel.runtime.bench.engines import BenchmarkModel
from umbel.runtime.bench.step import DecodeSteps, StepCase, run_steps
from umbel.runtime.config import EngineConfig
from umbel.runtime.sampling.device_sampler import HostSampler


@pytest.fixture(scope="module")
def model() -> BenchmarkModel:
    return BenchmarkModel("small", EngineConfig(device="cpu", kv_tokens=600, max_running=8))


def test_a_step_is_fed_with_the_ids_of_the_one_before(model: BenchmarkModel) -> None:
    """Rows that share everything but their last slot's token part only by what was sampled."""
    sampler = HostSampler(model.parts.runner.vocab_size, 4)
    steps = DecodeSteps(model.parts.runner, sampler, StepCase(3, 5, num_shared=20))
    sampler.samples[:3] = 7
    steps.step()
    first = sampler.samples[:3].tolist()
    sampler.samples[:3] = sampler.samples[:3].flip(0)  # the next step must read what stands here
    steps.step()
    again = DecodeSteps(model.parts.runner, sampler, StepCase(3, 5, num_shared=20))
    sampler.samples[:3] = 7
    again.step()
    assert sampler.samples[:3].tolist() == first


def test_figures_stand_beside_a_floor(model: BenchmarkModel) -> None:
    cases = [StepCase(1, 16), StepCase(4, 16, num_shared=32, temperature=0.7)]
    figures = run_steps(model, cases, num_steps=3)
    assert [found.rows for found in figures] == [1, 4]
    assert all(found.floor_ms > 0 and found.step_ms > 0 for found in figures)
    assert figures[1].case == "4 x (32 shared + 16), temperature 0.7"
    assert model.parts.step_bytes > 0
    assert model.parts.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4


def test_a_case_that_does_not_fit_says_so(model: BenchmarkModel) -> None:
    with pytest.raises(EngineConfigError, match="the pool holds 600"):
        run_steps(model, [StepCase(4, 200)], num_steps=3)
