"""What automata on a device add to sampling there: masks by state, and the walk over each token.

Needs a GPU for figures of use: launches are captured, so that the host counts for nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from umbel.kernels import RowMasks, SamplingOps, SamplingTensors, sampling_ops
from umbel.lang.sampling_params import SamplingParams

from ..grammar import GrammarCompiler
from ..grammar.byte_dfa import START
from ..grammar.device_arena import DeviceArena
from ..grammar.token_dfa import TokenDFA
from ..sampling import SamplingRow
from .grammar_steps import ENDLESS

_REPLAYS = 200
_ARENA_STATES = 2048
_SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(temperature=1.0),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50),
}


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Microseconds of one step's sampling; medians over repeats whose ways take turns."""

    device: str
    rows: int
    vocab_size: int
    sampling: str  # a name of _SAMPLINGS
    free_us: float  # without constraints
    automata_us: float  # masks by state, and stepping every row
    added_us: float
    masked_us: float  # masks from the host: copied, applied in a launch of their own, no stepping


def run_device(
    compiler: GrammarCompiler, device: torch.device, *, rows: list[int], repeats: int
) -> list[DeviceFigures]:
    """Time sampling of random logits with every row in an automaton, and without.

    On a GPU each way is one captured graph, replayed.
    """
    grammar = compiler.compile(ENDLESS, "umbel-dfa")
    assert isinstance(grammar, TokenDFA)
    arena = DeviceArena(compiler.vocabulary, device, _ARENA_STATES)
    base = arena.hold(grammar)
    assert base is not None, "the automaton of the benchmark fits"
    ops = sampling_ops()
    figures = []
    for num_rows in rows:
        for name, params in _SAMPLINGS.items():
            batch = _Batch(ops, arena, base + START, num_rows, params)
            ways = [_runnable(way, device) for way in (batch.free, batch.automata, batch.masked)]
            times: list[list[float]] = [[] for _ in ways]
            for _ in range(repeats):
                for way, found in zip(ways, times, strict=True):
                    found.append(_seconds(way, device) * 1e6)
            free, automata, masked = map(statistics.median, times)
            added = statistics.median(b - a for a, b in zip(times[0], times[1], strict=True))
            figures.append(
                DeviceFigures(
                    _name(device), num_rows, batch.vocab_size, name, free, automata, added, masked
                )
            )
    return figures


class _Batch:
    """The tensors of one step, and the three ways to sample it."""

    def __init__(
        self,
        ops: SamplingOps,
        arena: DeviceArena,
        state: int,
        num_rows: int,
        params: SamplingParams,
    ) -> None:
        device, self.vocab_size = arena.rows.device, len(arena.tokens.starts) - 1
        generator = torch.Generator(device.type).manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._logits = torch.randn(
            num_rows, self.vocab_size, generator=generator, device=device
        ).to(dtype)
        # filters leave masks in the logits they are given: each run must find the same ones there
        self._constrained = self._logits.clone()
        self._ops, self._arena = ops, arena
        self._states = torch.full((num_rows,), state, dtype=torch.int32, device=device)
        self._next_states = torch.empty_like(self._states)
        # every row goes on from its own place
        self._all_sampled = -1 - torch.arange(num_rows, dtype=torch.int32, device=device)
        self._params = params

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        self._rows = SamplingTensors(
            temperature=column(params.temperature, torch.float32),
            top_k=column(params.top_k, torch.int32),
            top_p=column(params.top_p, torch.float32),
            min_p=column(0, torch.float32),
            seeds=torch.arange(num_rows, device=device),
            counters=column(0, torch.int64),
            is_filtered=SamplingRow(params).is_filtered,
        )
        on_gpu = device.type == "cuda"
        host = arena.rows[state].cpu().repeat(num_rows, 1)
        self._host_masks = host.pin_memory() if on_gpu else host
        self._device_masks = torch.empty_like(host, device=device)

    def free(self) -> None:
        """Sample without constraints."""
        self._draw(self._logits, None)

    def automata(self) -> None:
        """Sample what the states allow, and step from them; every run begins at the same ones."""
        ids = self._draw(self._constrained, self._arena.masks(self._states))
        arena, then = self._arena, self._next_states
        self._ops.dfa_step(
            self._all_sampled, self._states, ids, arena.transitions, arena.tokens, then
        )

    def masked(self) -> None:
        """Copy masks from the host, and sample what they allow."""
        self._device_masks.copy_(self._host_masks, non_blocking=True)
        logits = self._logits.clone()  # which the masks are written to
        self._ops.apply_token_bitmask_(logits, self._device_masks)
        self._draw(logits, None)

    def _draw(self, logits: Tensor, masks: RowMasks | None) -> Tensor:
        if self._params.temperature == 0.0:
            return self._ops.greedy(logits, masks)
        return self._ops.sample(logits, self._rows, masks)


def _runnable(way: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return what runs a way: captured where that is possible, compiled and warm in any case."""
    if device.type != "cuda":
        way()
        return way
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            way()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph.replay


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """Return the mean seconds of one run."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    run()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(_REPLAYS):  # replays are queued faster than they run
        run()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / _REPLAYS


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
