"""From a model on a device to the runner and the sampler of its engine, their kernels compiled.

Knows pools, graphs and what a first request may ask for; nothing of files, or of how large a pool
may be.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from umbel.kernels import compile_ahead, decode_plan, extend_plan, sampling_ops

from .config import DeviceLimits
from .grammar import TokenBitmask
from .grammar.device_arena import DeviceArena
from .kv_cache.kv_pool import KVPool
from .model_runner.decode_graphs import Capture, DecodeGraphs, batch_sizes, cuda_capture
from .model_runner.pass_graphs import PassGraphs, pass_sizes
from .model_runner.runner import DeviceRunner, ModelRunner
from .models import CausalLM
from .sampling.device_sampler import DeviceSampler
from .warm_up import NUM_SLOTS, warm_up, whole_rows

logger = logging.getLogger(__name__)

#: sizes of captured passes that a dry run takes beside the largest: kernels are compiled for a
#: number that is 1, for those that 16 divides and for all others, and tiles are chosen by bounds
_DRY_SIZES = (1, 2, 8, 16, 128)


@dataclass(frozen=True, slots=True)
class DeviceSetup:
    """Makes a model's runner and sampler over a pool, or all of it dry, over a small one."""

    model: CausalLM
    limits: DeviceLimits
    max_seq_len: int
    attention: str  # a backend of `kernels.dispatch`
    captures: bool  # passes, where the backend can be captured
    arena: DeviceArena | None

    def compile_kernels(self, new_pool: Callable[..., KVPool], num_rows: int) -> None:
        """Compile side by side what loading launches from here on; nothing of it is kept.

        `num_rows`: of the largest pass, where one will be measured; else 0.
        """
        started = time.perf_counter()
        device = self.model.attention_shape.device
        num_kernels = compile_ahead(partial(self.dry_run, new_pool, num_rows), device)
        if num_kernels is None:
            logger.info("kernels are interpreted: none is compiled")
            return
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later does not count as free
        logger.info(
            "%d kernels compiled, or read from Triton's cache, in %.1f s",
            num_kernels,
            time.perf_counter() - started,
        )

    def dry_run(self, new_pool: Callable[..., KVPool], num_rows: int) -> None:
        """Come by all launches of loading, made for `compile_ahead`: see there.

        What a pass leaves is undefined then. So no token comes from the pass before, and no
        log-probability is asked for of a sampled id.
        """
        if num_rows:
            device = self.model.attention_shape.device
            largest = ModelRunner(self.model, new_pool(num_slots=num_rows), device)
            largest.forward(whole_rows((num_rows,))).rows(0, 1)
            del largest
        self._make(new_pool(num_slots=NUM_SLOTS), _undefined, is_dry=True)

    def make(self, pool: KVPool) -> tuple[DeviceRunner, DeviceSampler]:
        """Return a runner and a sampler that wait for no compiler, with small passes captured."""
        return self._make(pool, cuda_capture(), is_dry=False)

    def _make(
        self, pool: KVPool, capture: Capture, *, is_dry: bool
    ) -> tuple[DeviceRunner, DeviceSampler]:
        model, device = self.model, pool.k[0].device
        num_samples = min(self.limits.max_running, self.limits.max_step_tokens)
        sampler = DeviceSampler(
            sampling_ops(), model.config.vocab_size, num_samples, device, self.arena
        )
        decodes: DecodeGraphs | None = None
        passes: PassGraphs | None = None
        if self.captures:
            rows, tokens = batch_sizes(num_samples), pass_sizes(self.limits.max_step_tokens)
            if is_dry:
                rows, tokens = _few(rows), _few(tokens)
            new_plan = partial(decode_plan, name=self.attention)
            decodes = DecodeGraphs(
                model, pool, sampler.samples, new_plan, sizes=rows, max_seq_len=self.max_seq_len
            )
            passes = PassGraphs(model, pool, sampler.samples, extend_plan, sizes=tokens)
            with _timed(f"captured decode steps of {len(rows)} sizes", is_dry):
                decodes.capture(capture)
            with _timed(f"captured passes of {len(tokens)} sizes", is_dry):
                passes.capture(capture)
        runner = DeviceRunner(model, pool, decodes, passes)
        bitmask = TokenBitmask(num_samples, model.config.vocab_size).tensor
        with _timed("ran passes and samples of every kind", is_dry):
            warm_up(runner, sampler, bitmask, is_dry=is_dry)
        return runner, sampler


def _few(sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size in _DRY_SIZES or size == sizes[-1]]


def _undefined(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stand in for a capture in a dry run: a replay's logits are what the memory holds."""
    logits = run()
    return lambda: logits


@contextmanager
def _timed(what: str, is_dry: bool) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if not is_dry:
        logger.info("%s in %.1f s", what, time.perf_counter() - started)
