"""The engine's settings: one frozen dataclass, checked when made; command-line flags come from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from umbel.lang.errors import EngineConfigError

from .scheduler.policy import POLICIES

DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises EngineConfigError that names the field and its bound."""

    dtype: DType = _setting("auto", "weights and KV: float32 on a CPU, bfloat16 on a GPU")
    device: Device = _setting("auto", "where the model runs: a GPU if there is one")
    max_step_tokens: int = _setting(512, "token budget of one forward pass")
    max_running: int = _setting(64, "requests that run at once")
    max_seq_len: int | None = _setting(None, "longest row; the model's own context by default")
    kv_tokens: int | None = _setting(None, "tokens the KV pool holds; measured by default")
    kv_memory_fraction: float = _setting(
        0.25, "share of the memory left beside weights and activations that the KV pool may take"
    )
    policy: str = _setting("program", "order of the waiting requests")
    prefix_cache: bool = _setting(True, "keep and share the KV of common prefixes")
    num_threads: int | None = _setting(None, "CPU threads of the forward pass")
    grammar_timeout_s: float = _setting(30.0, "longest time a constraint may take to compile")
    grammar_cache_bytes: int = _setting(256 << 20, "memory for compiled constraints")
    track_bound: bool = _setting(
        False, "count the least possible prefill, to compare with (costs memory per token)"
    )
    check_accounting: bool = _setting(False, "check the page accounting after every step")

    def __post_init__(self) -> None:
        """Check every field against its bound."""

        def need(ok: bool, name: str, bound: str) -> None:
            if not ok:
                raise EngineConfigError(f"{name} must be {bound}, not {getattr(self, name)!r}")

        need(self.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16")
        need(self.device in ("auto", "cpu", "cuda"), "device", "auto, cpu or cuda")
        need(self.max_step_tokens >= 1, "max_step_tokens", "at least 1")
        need(self.max_running >= 1, "max_running", "at least 1")
        need(self.max_seq_len is None or self.max_seq_len >= 2, "max_seq_len", "at least 2")
        need(self.kv_tokens is None or self.kv_tokens >= 2, "kv_tokens", "at least 2")
        need(0 < self.kv_memory_fraction <= 1, "kv_memory_fraction", "above 0 and at most 1")
        need(self.policy in POLICIES, "policy", f"one of {', '.join(sorted(POLICIES))}")
        need(self.num_threads is None or self.num_threads >= 1, "num_threads", "at least 1")
        need(self.grammar_timeout_s > 0, "grammar_timeout_s", "above 0")
        need(self.grammar_cache_bytes >= 0, "grammar_cache_bytes", "0 or more")
