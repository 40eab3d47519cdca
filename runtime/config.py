"""The engine's settings: one frozen dataclass, checked when made; command flags come from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args

from umbel.lang.errors import EngineConfigError

from .kv_cache import EVICTION_POLICIES
from .scheduler.policy import POLICIES

DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["auto", "torch", "triton", "flashinfer"]
GrammarEngine = Literal["auto", "umbel-dfa", "outlines-core", "llguidance"]


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """How much runs at once, as given or as suits the device."""

    max_step_tokens: int
    max_running: int
    kv_memory_fraction: float


#: a GPU computes thousands of rows in the time that it takes to read the weights
_CPU_LIMITS = DeviceLimits(512, 64, 0.25)
_GPU_LIMITS = DeviceLimits(8192, 512, 0.9)

#: a pass of this many weights takes a GPU less time, at 8,192 tokens, than the host needs to launch
#: it kernel by kernel: twice the tokens cost the host nothing
_FEW_WEIGHTS = 1_000_000_000
_STEP_TOKENS_OF_FEW = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; each field's annotation says what it is for.

    Raises EngineConfigError that names the field and its bound.
    """

    dtype: Annotated[DType, "weights and KV: float32 on a CPU, bfloat16 on a GPU"] = "auto"
    device: Annotated[Device, "where the model runs: a GPU if there is one"] = "auto"
    attention: Annotated[
        Attention,
        "attention kernels: auto takes triton on a GPU that has it, beside it flashinfer for long "
        "extends on a Hopper that has that, and torch elsewhere",
    ] = "auto"
    max_step_tokens: Annotated[
        int | None,
        "token budget of one forward pass: 512 on a CPU, 8,192 on a GPU, 16,384 there for a model "
        "of less than a billion weights",
    ] = None
    max_running: Annotated[int | None, "requests that run at once: 64 on a CPU, 512 on a GPU"] = (
        None
    )
    max_seq_len: Annotated[int | None, "longest row; the model's context by default"] = None
    kv_tokens: Annotated[int | None, "tokens the KV pool holds; measured by default"] = None
    kv_memory_fraction: Annotated[
        float | None,
        "share of the memory left beside weights and activations that the pool may take: a quarter "
        "on a CPU, nine tenths on a GPU",
    ] = None
    capture: Annotated[bool, "replay decode steps from captured graphs, on a GPU"] = True
    template: Annotated[
        str | None, "file with a chat template that replaces the model's own; empty: no chat"
    ] = None
    policy: Annotated[
        str,
        "order of the waiting requests: program, fcfs, lpm, dfs-weight, lof, hrrn, priority or "
        "random",
    ] = "program"
    eviction: Annotated[
        str,
        "which cached prefixes go first when programs need more than the pool holds: next-use or "
        "lru",
    ] = "next-use"
    page_size: Annotated[
        int, "tokens of a KV page, a power of two; only whole pages are shared"
    ] = 1
    prefix_cache: Annotated[bool, "keep and share the KV of common prefixes"] = True
    num_threads: Annotated[int | None, "CPU threads of the forward pass"] = None
    grammar_engine: Annotated[
        GrammarEngine,
        "what follows constraints: auto takes umbel-dfa for what is regular and not too large, and "
        "llguidance for the rest; a name takes that one for all, and refuses what it lacks",
    ] = "auto"
    grammar_timeout_s: Annotated[float, "longest time a constraint may take to compile"] = 30.0
    grammar_cache_bytes: Annotated[int, "memory for compiled constraints"] = 256 << 20
    grammar_device_states: Annotated[
        int | None,
        "states of regular constraints that a GPU has room for, to mask by itself: what 256 MiB "
        "hold by default; 0: the host fills every mask",
    ] = None
    overlap: Annotated[
        bool | None, "prepare a step on the host while the device runs the one before: on a GPU"
    ] = None
    step_timeout_s: Annotated[
        float | None,
        "a forward pass that takes longer ends the engine, and with it every run, instead of "
        "hanging silently; the first passes of a kind, which compile, may take ten times as long; "
        "0: no limit",
    ] = 600.0
    jump_forward: Annotated[bool, "append longer forced text without sampling it"] = True
    track_bound: Annotated[
        bool, "count the least possible prefill, to compare with (memory for each token)"
    ] = False
    process: Annotated[
        bool, "run the engine in a process of its own, beside that of the programs or the server"
    ] = False
    check_accounting: Annotated[bool, "check the page accounting after every step"] = False

    def __post_init__(self) -> None:
        """Check every field against its bound."""

        def need(ok: bool, name: str, bound: str) -> None:
            if not ok:
                raise EngineConfigError(f"{name} must be {bound}, not {getattr(self, name)!r}")

        need(self.dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16")
        need(self.device in ("auto", "cpu", "cuda"), "device", "auto, cpu or cuda")
        backends = ("auto", "torch", "triton", "flashinfer")
        need(self.attention in backends, "attention", "auto, torch, triton or flashinfer")
        engines = get_args(GrammarEngine)
        need(self.grammar_engine in engines, "grammar_engine", f"one of {', '.join(engines)}")
        for name in ("max_step_tokens", "max_running"):
            value = getattr(self, name)
            need(value is None or value >= 1, name, "at least 1")
        need(self.max_seq_len is None or self.max_seq_len >= 2, "max_seq_len", "at least 2")
        need(self.kv_tokens is None or self.kv_tokens >= 2, "kv_tokens", "at least 2")
        share = self.kv_memory_fraction
        need(share is None or 0 < share <= 1, "kv_memory_fraction", "above 0 and at most 1")
        need(self.policy in POLICIES, "policy", f"one of {', '.join(sorted(POLICIES))}")
        policies = ", ".join(sorted(EVICTION_POLICIES))
        need(self.eviction in EVICTION_POLICIES, "eviction", f"one of {policies}")
        size = self.page_size
        is_power = 1 <= size <= 256 and size & (size - 1) == 0
        need(is_power, "page_size", "a power of two from 1 to 256")
        need(
            self.kv_tokens is None or self.kv_tokens >= size,
            "kv_tokens",
            f"at least {size}, one page",
        )
        need(self.num_threads is None or 1 <= self.num_threads <= 1024, "num_threads", "1 to 1024")
        need(0 < self.grammar_timeout_s <= 86400, "grammar_timeout_s", "above 0 and at most a day")
        limit = self.step_timeout_s
        need(limit is None or limit >= 0, "step_timeout_s", "0 or more")
        need(self.grammar_cache_bytes >= 0, "grammar_cache_bytes", "0 or more")
        states = self.grammar_device_states
        need(states is None or states >= 0, "grammar_device_states", "0 or more")

    def suited_to(self, num_weights: int, device_type: str) -> EngineConfig:
        """Return the settings with what a model's size decides, where it is not set."""
        is_small = device_type == "cuda" and num_weights < _FEW_WEIGHTS
        if self.max_step_tokens is not None or not is_small:
            return self
        return replace(self, max_step_tokens=_STEP_TOKENS_OF_FEW)

    def limits(self, device_type: str) -> DeviceLimits:
        """Return the limits for a torch device type, what is not set chosen for it."""
        default = _GPU_LIMITS if device_type == "cuda" else _CPU_LIMITS
        return DeviceLimits(
            self.max_step_tokens or default.max_step_tokens,
            self.max_running or default.max_running,
            self.kv_memory_fraction or default.kv_memory_fraction,
        )


def config_of(options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration with these fields; raises EngineConfigError."""
    known = {field.name for field in fields(EngineConfig)}
    if unknown := sorted(set(options) - known):
        raise EngineConfigError(
            f"there is no setting {', '.join(unknown)}; the engine's settings: "
            f"{', '.join(sorted(known))}"
        )
    return EngineConfig(**options)
