"""From a model reference to what an engine runs on: tokenizer, weights, and a KV pool that fits.

Knows files, devices and memory; nothing of requests.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from umbel.kernels import has_triton
from umbel.lang.errors import EngineConfigError, ModelLoadError

from .config import Device, DeviceLimits, EngineConfig
from .device_setup import DeviceSetup
from .grammar.device_arena import DeviceArena
from .kv_cache.kv_pool import KVPool
from .model_runner.runner import MAX_SCORED_ROWS, ModelRunner, Runner
from .model_store import ModelFiles, resolve
from .models import CausalLM, load_dummy_model, load_model, read_config_json
from .sampling.device_sampler import TokenSampler
from .tokenizer import Tokenizer
from .warm_up import whole_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine needs of a loaded model."""

    runner: Runner
    tokenizer: Tokenizer
    max_seq_len: int
    name: str
    config: EngineConfig  # with what suits the model, where nothing was set
    sampler: TokenSampler | None = None  # None: the host's
    step_bytes: int = 0  # weights that a pass of one token reads
    kv_bytes_per_token: int = 0


def load_parts(ref: str, config: EngineConfig) -> EngineParts:
    """Load the model that `ref` names; raises ModelLoadError, EngineConfigError."""
    device = find_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    files = resolve(ref, lambda step: logger.info("%s", step))
    dtype = _dtype(config, device)
    tokenizer, model = _read(files, config, dtype, device)
    config = config.suited_to(model.config.weights_read, device.type)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ModelLoadError(
            f"{files.name}: the tokenizer has {tokenizer.vocab_size} ids, the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    context = model.config.max_position_embeddings
    if config.max_seq_len is not None and config.max_seq_len > context:
        raise EngineConfigError(
            f"max_seq_len must be at most {context}, the context of {files.name}, "
            f"not {config.max_seq_len}"
        )
    max_seq_len = config.max_seq_len or context
    new_pool = partial(
        KVPool,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=dtype,
        device=device,
    )
    setup = _device_setup(model, config, max_seq_len, tokenizer)
    if config.kv_tokens is not None:
        _check_fits(config.kv_tokens, new_pool(num_slots=1).bytes_per_token, device)
    if setup is not None:
        measures = config.kv_tokens is None
        setup.compile_kernels(new_pool, _most_rows(model, setup.limits) if measures else 0)
    num_slots = config.kv_tokens or _kv_tokens(model, config, max_seq_len, new_pool, device)
    pool = new_pool(num_slots=num_slots)
    parts = EngineParts(
        ModelRunner(model, pool, device),
        tokenizer,
        max_seq_len,
        files.name,
        config,
        step_bytes=model.config.weights_read * dtype.itemsize,
        kv_bytes_per_token=pool.bytes_per_token,
    )
    if setup is None:
        return parts
    runner, sampler = setup.make(pool)
    return replace(parts, runner=runner, sampler=sampler)


def _read(
    files: ModelFiles, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tokenizer, CausalLM]:
    """Read a model's files, and say so: this takes long."""
    started = time.perf_counter()
    logger.info("loading %s from %s", files.name, files.path)
    tokenizer = Tokenizer.from_model(files, _template(config))
    if files.kind == "dummy":
        shape = read_config_json(files.path)
        model = load_dummy_model(shape, dtype=dtype, device=device, attention=config.attention)
    else:
        model = load_model(files.path, dtype=dtype, device=device, attention=config.attention)
    kind = str(dtype).removeprefix("torch.")
    seconds = time.perf_counter() - started
    logger.info("%s is on %s in %s after %.1f s", files.name, device, kind, seconds)
    return tokenizer, model


def _device_setup(
    model: CausalLM, config: EngineConfig, max_seq_len: int, tokenizer: Tokenizer
) -> DeviceSetup | None:
    """Return what makes a device's runner; None where the host's is used.

    Automata take their room here, before it is known what is left for the KV pool.
    """
    device = model.attention_shape.device
    if device.type != "cuda" or not has_triton():
        return None
    arena: DeviceArena | None = None
    if config.grammar_device_states != 0:
        arena = DeviceArena(tokenizer.vocabulary(), device, config.grammar_device_states)
    return DeviceSetup(
        model,
        config.limits(device.type),
        max_seq_len,
        config.attention,
        captures=config.capture and config.attention != "torch",
        arena=arena,
    )


def _template(config: EngineConfig) -> str | None:
    if config.template is None:
        return None
    try:
        return Path(config.template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EngineConfigError(
            f"template must be a text file with a chat template, not {config.template!r}: {error}"
        ) from error


def find_device(wanted: Device) -> torch.device:
    """Return the device that the setting leads to; raises EngineConfigError where there is none."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise EngineConfigError("device must be cpu here: no CUDA device was found")
    return torch.device("cuda" if has_gpu and wanted != "cpu" else "cpu")


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def _kv_tokens(
    model: CausalLM,
    config: EngineConfig,
    max_seq_len: int,
    new_pool: Callable[..., KVPool],
    device: torch.device,
) -> int:
    """Return how many tokens the pool may hold beside the largest forward pass, as measured."""
    limits = config.limits(device.type)
    num_rows = _most_rows(model, limits)
    pool = new_pool(num_slots=num_rows)
    peak = _peak_bytes(ModelRunner(model, pool, device), num_rows, limits.max_running, device)
    left = max(0, _available_bytes(device) - peak)
    fits = int(left * limits.kv_memory_fraction) // pool.bytes_per_token
    wanted = limits.max_running * max_seq_len
    tokens = min(fits, wanted)
    if tokens < 2:
        raise EngineConfigError(
            f"kv_memory_fraction leaves no room for a KV pool: {left >> 20} MiB are left beside "
            "weights and activations"
        )
    logger.info(
        "KV pool: %d tokens, %d MiB; a pass of %d tokens peaks at %d MiB",
        tokens,
        tokens * pool.bytes_per_token >> 20,
        num_rows,
        peak >> 20,
    )
    return tokens


def _most_rows(model: CausalLM, limits: DeviceLimits) -> int:
    """Return the rows of the largest forward pass."""
    return min(limits.max_step_tokens, model.config.max_position_embeddings)


def _check_fits(kv_tokens: int, bytes_per_token: int, device: torch.device) -> None:
    available = _available_bytes(device)
    if kv_tokens * bytes_per_token > available:
        raise EngineConfigError(
            f"kv_tokens={kv_tokens:,} needs {kv_tokens * bytes_per_token >> 20:,} MiB; "
            f"{available >> 20:,} MiB are left beside the weights, room for "
            f"{available // bytes_per_token:,} tokens"
        )


def _peak_bytes(runner: ModelRunner, n: int, max_running: int, device: torch.device) -> int:
    """Run the largest pass, of `n` rows, and return the memory it took beyond what was there."""
    num_logits = min(n, max(max_running, MAX_SCORED_ROWS))
    inputs = replace(whole_rows((n,)), logits_rows=np.arange(n - num_logits, n))
    before = _reset_peak(device)
    runner.forward(inputs).rows(0, num_logits)
    return max(0, _read_peak(device) - before)


_STATUS = Path("/proc/self/status")


def _reset_peak(device: torch.device) -> int:
    """Start a new peak measurement; return the memory in use now, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if not _STATUS.exists():
        return 0
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc_pid_clear_refs(5))
    except OSError:
        logger.debug("the peak of the resident memory can't be reset; the last one is used")
    return _status_bytes("VmRSS")


def _read_peak(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM") if _STATUS.exists() else 0


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # elsewhere there is no portable figure for what is free: half of what there is
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
