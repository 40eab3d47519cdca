"""Models to benchmark, and engines on them: many engines, one after the other, on one model."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from umbel.lang.errors import EngineConfigError

from ..config import EngineConfig
from ..engine import Engine
from ..grammar import GrammarCompiler
from ..model_loading import EngineParts, load_parts
from ..model_runner.inputs import StepInputs
from ..model_runner.runner import PassLogits, Runner
from ..tokenizer import Tokenizer
from .null_runner import NullRunner

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}

#: config.json of the shapes that have dummy weights, by name
SHAPES: dict[str, dict[str, Any]] = {
    "small": _LLAMA
    | {
        "vocab_size": 4096,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}

NULL = "null"
_NULL_SLOTS = 1 << 18
_NULL_CONTEXT = 1 << 15
_NULL_VOCABULARY = 512


class _Pool:
    """A runner seen with a pool of at most `num_slots`, whose passes are timed."""

    def __init__(self, runner: Runner, num_slots: int | None) -> None:
        self.num_slots = min(runner.num_slots, num_slots or runner.num_slots)
        self.vocab_size = runner.vocab_size
        self.cpu_s = 0.0  # of this thread, in passes
        self._runner = runner

    def forward(self, inputs: StepInputs) -> PassLogits:
        started = time.thread_time()
        logits = self._runner.forward(inputs)
        self.count(started)
        return _PoolLogits(self, logits)

    def count(self, started: float) -> None:
        """Count what was begun at `started`, in this thread's CPU time."""
        self.cpu_s += time.thread_time() - started


class _PoolLogits:
    """The logits of a pass, whose making is counted too."""

    def __init__(self, pool: _Pool, logits: PassLogits) -> None:
        self._pool = pool
        self._logits = logits

    def rows(self, start: int, end: int) -> Tensor:
        started = time.thread_time()
        made = self._logits.rows(start, end)
        self._pool.count(started)
        return made


class BenchmarkModel:
    """A loaded model, or the null runner, and the settings of the engines that are made on it."""

    def __init__(self, name: str, config: EngineConfig, tokenizer: Path | None = None) -> None:
        """Load it; a shape's tokenizer is one of bytes, or that in the folder `tokenizer`.

        Raises ModelLoadError, EngineConfigError.
        """
        if tokenizer is not None and name not in SHAPES:
            raise EngineConfigError(f"{name} has its own tokenizer: the shapes have none")
        self.name = name
        self.parts = _null_parts(config) if name == NULL else _load(name, config, tokenizer)
        self.config = config = self.parts.config
        self._pool = _Pool(self.parts.runner, None)
        sampler = self.parts.sampler
        self.limits = config.limits("cpu" if sampler is None else sampler.samples.device.type)
        self.tokenizer = self.parts.tokenizer
        self.max_seq_len = self.parts.max_seq_len
        self.grammar = GrammarCompiler(
            self.tokenizer.vocabulary(),
            cache_bytes=config.grammar_cache_bytes,
            timeout_s=config.grammar_timeout_s,
            engine=None if config.grammar_engine == "auto" else config.grammar_engine,
        )

    def new_engine(
        self, pool_tokens: int | None = None, *, threaded: bool = False, **settings: Any
    ) -> Engine:
        """Return an engine with an empty cache; one at a time is in use.

        Without a thread of its own the caller drives it by `step`.
        """
        self._pool = _Pool(self.parts.runner, pool_tokens)
        return Engine(
            self._pool,
            self.tokenizer,
            replace(self.config, **settings),
            max_seq_len=self.max_seq_len,
            grammar=self.grammar,
            sampler=self.parts.sampler,
            start=threaded,
        )

    @property
    def forward_cpu_s(self) -> float:
        """CPU time of the thread that drives the newest engine, spent in forward passes."""
        return self._pool.cpu_s

    def close(self) -> None:
        """End the threads and processes that compile constraints."""
        self.grammar.close()


def _load(name: str, config: EngineConfig, tokenizer: Path | None) -> EngineParts:
    shape = SHAPES.get(name)
    if shape is None:
        return load_parts(name, config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.json"
        if tokenizer is not None:
            for part in tokenizer.glob("tokenizer*"):
                shutil.copy(part, folder)
            least = Tokenizer.from_folder(tokenizer).vocab_size
            shape = shape | {"vocab_size": max(least, shape["vocab_size"])}
        path.write_text(json.dumps(shape), encoding="utf-8")
        return load_parts(f"dummy:{path}", config)


def _null_parts(config: EngineConfig) -> EngineParts:
    if config.max_seq_len is not None and config.max_seq_len > _NULL_CONTEXT:
        raise EngineConfigError(f"max_seq_len must be at most {_NULL_CONTEXT:,} without a model")
    runner = NullRunner(config.kv_tokens or _NULL_SLOTS, _NULL_VOCABULARY)
    tokenizer = Tokenizer.byte_level(_NULL_VOCABULARY)
    return EngineParts(runner, tokenizer, config.max_seq_len or _NULL_CONTEXT, NULL, config)
