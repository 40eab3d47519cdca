"""The engine with a device's runner and sampler, interpreted: outputs are those of a CPU.

Captured passes are run again instead of replayed; everything else is what a GPU runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.model_runner.graph_cases import run_again
from tests.support.engine_harness import GRAMMAR, TOKENIZER, GraphMaker, check_idle, run_graphs
from tests.support.tiny_config import tiny_config

from umbel.kernels import decode_plan, extend_plan, sampling_ops
from umbel.lang.constraints import Regex
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Select, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.grammar.device_arena import DeviceArena
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.decode_graphs import DecodeGraphs, batch_sizes
from umbel.runtime.model_runner.pass_graphs import PassGraphs, pass_sizes
from umbel.runtime.model_runner.runner import DeviceRunner, ModelRunner
from umbel.runtime.models import load_dummy_model
from umbel.runtime.sampling.device_sampler import DeviceSampler

CPU = torch.device("cpu")
MAX_RUNNING = 4
CONFIG = tiny_config("qwen3", TOKENIZER.vocab_size, max_position_embeddings=256)
MODEL = load_dummy_model(CONFIG, dtype=torch.float32, device=CPU)


def make_pool() -> KVPool:
    return KVPool(
        num_layers=2, num_slots=400, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=CPU
    )


def make_engine(*, on_device: bool, num_states: int = 200, **options: Any) -> Engine:
    config = EngineConfig(
        max_running=MAX_RUNNING, check_accounting=True, **({"max_step_tokens": 64} | options)
    )
    pool = make_pool()
    if not on_device:
        runner: Any = ModelRunner(MODEL, pool, CPU)
        sampler = None
    else:
        arena = DeviceArena(TOKENIZER.vocabulary(), CPU, num_states) if num_states else None
        sampler = DeviceSampler(sampling_ops(), CONFIG.vocab_size, MAX_RUNNING, CPU, arena)
        decodes = DecodeGraphs(
            MODEL,
            pool,
            sampler.samples,
            decode_plan,
            sizes=batch_sizes(MAX_RUNNING),
            max_seq_len=256,
        )
        decodes.capture(run_again)
        passes = PassGraphs(MODEL, pool, sampler.samples, extend_plan, sizes=pass_sizes(32))
        passes.capture(run_again)
        runner = DeviceRunner(MODEL, pool, decodes, passes)
    return Engine(
        runner,
        TOKENIZER,
        config,
        max_seq_len=256,
        grammar=GRAMMAR,
        sampler=sampler,
        start=False,
    )


def programs() -> list[RequestGraph]:
    graphs = []
    for i in range(3):
        maker = GraphMaker()
        at = maker.add(Text(("the same start, " * 2 + f"row {i}: ",)), None)
        at = maker.add(Gen("a", SamplingParams(max_tokens=3, ignore_eos=True)), at)
        at = maker.add(Select("b", ("yes", "no", "maybe so")), at)
        at = maker.add(Gen("c", SamplingParams(max_tokens=12), Regex("[ab]xyxy[0-9]")), at)
        at = maker.add(Gen("d", SamplingParams(max_tokens=9 - i), Regex("([a-d]{1,3}-){2,5}")), at)
        graphs.append(maker.graph())
    return graphs


def texts_and_ids(engine: Engine) -> list[dict[int, Any]]:
    found = []
    for collector in run_graphs(engine, programs()):
        assert not collector.errors
        found.append(
            {
                node: (result.text, [sample.token_ids for sample in result.samples])
                for node, result in collector.results.items()
            }
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_states": 0},
        {"num_states": 20, "prefix_cache": False},
        {"overlap": False},
        {"max_step_tokens": 24, "page_size": 16},
    ],
    ids=str,
)
def test_a_devices_engine_gives_what_a_cpus_gives(options: dict[str, Any]) -> None:
    device, host = make_engine(on_device=True, **options), make_engine(on_device=False)
    assert texts_and_ids(device) == texts_and_ids(host)
    check_idle(device)
