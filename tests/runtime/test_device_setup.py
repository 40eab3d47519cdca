"""A dry run comes by every launch of a start, asks for nothing undefined, and keeps nothing."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.runtime.model_runner.graph_cases import run_again
from tests.support.engine_harness import TOKENIZER
from tests.support.tiny_config import tiny_config

from umbel.kernels import dispatch
from umbel.runtime import device_setup, model_loading
from umbel.runtime.config import DeviceLimits
from umbel.runtime.device_setup import DeviceSetup
from umbel.runtime.grammar.device_arena import DeviceArena
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.runner import ModelRunner
from umbel.runtime.models import load_dummy_model

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or not find_spec("triton"),
    reason="needs Triton's interpreter",
)

CPU = torch.device("cpu")
NUM_ROWS = 1024
#: whose outputs a start looks at; those of all others only go into numbers
SAMPLING = ("dfa_step", "logprobs", "sampling", "token_bitmask")
new_pool = partial(
    KVPool, num_layers=2, num_kv_heads=8, head_dim=16, dtype=torch.bfloat16, device=CPU
)


class Launches:
    """Stands where a dry run's launches go: notes what kernels would be compiled for.

    `launches` says which are launched all the same.
    """

    def __init__(self, launches: Callable[[Any], bool] = lambda kernel: False) -> None:
        self.variants: set[tuple[Any, ...]] = set()
        self._launches = launches

    def take(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        any_number = kernel.kwargs["do_not_specialize"] or ()
        named = zip(kernel.arg_names, args, strict=False)
        kinds = [None if name in any_number else _kind(value) for name, value in named]
        self.variants.add((kernel.fn.__name__, *kinds, *options.items()))
        if self._launches(kernel):
            kernel[grid](*args, **options)

    def __enter__(self) -> Launches:
        from umbel.kernels.triton import launch

        launch._ahead.set(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *error: object) -> None:
        from umbel.kernels.triton import launch

        launch._ahead.set(None)


def _kind(value: object) -> object:
    """Return what Triton compiles a kernel for."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return "int", value == 1, value % 16 == 0
    return type(value).__name__


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a model on a CPU take the ops of a GPU; captures are stood in for."""
    monkeypatch.setitem(dispatch.OPS, "cpu", dispatch._triton_ops)
    monkeypatch.setattr(device_setup, "cuda_capture", lambda: run_again)
    dispatch.ops_for.cache_clear()
    yield
    dispatch.ops_for.cache_clear()


def make_setup(
    architecture: str = "llama", *, captures: bool = True, has_arena: bool = True
) -> DeviceSetup:
    config = tiny_config(
        architecture,
        TOKENIZER.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_heads=32,
        num_kv_heads=8,
        max_position_embeddings=2048,
    )
    model = load_dummy_model(config, dtype=torch.bfloat16, device=CPU, attention="triton")
    arena = DeviceArena(TOKENIZER.vocabulary(), CPU, 20) if has_arena else None
    limits = DeviceLimits(max_step_tokens=NUM_ROWS, max_running=72, kv_memory_fraction=0.5)
    return DeviceSetup(model, limits, 2048, "triton", captures, arena)


def is_sampling(kernel: Any) -> bool:
    return kernel.fn.__module__.rpartition(".")[2] in SAMPLING


def start(setup: DeviceSetup, num_slots: int) -> None:
    """Do what loading does after the dry run."""
    pool = new_pool(num_slots=NUM_ROWS)
    model_loading._peak_bytes(ModelRunner(setup.model, pool, CPU), NUM_ROWS, 72, CPU)
    setup.make(new_pool(num_slots=num_slots))


@pytest.fixture
def undefined_memory() -> Iterator[None]:
    """Fill what is taken and not written with NaN, and with the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("undefined_memory")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the interpreter, at NaN
@pytest.mark.parametrize(
    ("architecture", "captures", "has_arena"),
    [("llama", True, True), ("qwen3", True, False), ("llama", False, True)],
)
def test_a_start_launches_what_its_dry_run_came_by(
    architecture: str, captures: bool, has_arena: bool
) -> None:
    setup = make_setup(architecture, captures=captures, has_arena=has_arena)
    with Launches() as dry:
        setup.dry_run(new_pool, NUM_ROWS)
    with Launches(is_sampling) as real:
        start(setup, num_slots=5000)
    names = {variant[0] for variant in real.variants}
    assert {"decode_kernel", "extend_kernel", "_sample_kernel", "_logprobs_kernel"} <= names
    assert real.variants - dry.variants == set()


@pytest.mark.usefixtures("undefined_memory")
def test_a_dry_run_takes_nothing_undefined_for_an_index() -> None:
    assert int(torch.empty(1, dtype=torch.int64)) == torch.iinfo(torch.int64).max
    setup = make_setup()
    with Launches():
        setup.dry_run(new_pool, NUM_ROWS)
        with pytest.raises(RuntimeError, match="out of bounds"):  # where the start itself looks
            setup.make(new_pool(num_slots=500))


def test_a_dry_run_keeps_no_memory_until_the_collector_comes() -> None:
    pools: list[weakref.ref[KVPool]] = []
    setup = make_setup()

    def noted_pool(**options: Any) -> KVPool:
        pool = new_pool(**options)
        pools.append(weakref.ref(pool))
        return pool

    gc.disable()
    try:
        with Launches():
            setup.dry_run(noted_pool, NUM_ROWS)
    finally:
        gc.enable()
    assert len(pools) == 2
    assert [pool() for pool in pools] == [None, None]


def test_without_a_compiler_nothing_is_run_dry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_setup, "compile_ahead", lambda dry_run, device: None)
    with caplog.at_level("INFO"):
        make_setup().compile_kernels(new_pool, 0)
    assert caplog.messages == ["kernels are interpreted: none is compiled"]


def test_a_start_says_what_it_compiled_and_a_dry_run_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ahead(dry_run: Callable[[], None], device: torch.device) -> int:
        with Launches() as found:
            dry_run()
        return len(found.variants)

    monkeypatch.setattr(device_setup, "compile_ahead", ahead)
    with caplog.at_level("INFO"):
        make_setup().compile_kernels(new_pool, 0)
    (message,) = (r.message for r in caplog.records if r.name == device_setup.__name__)
    assert "kernels compiled, or read from Triton's cache" in message
