"""The few layers the models share. Each names its weights as Hugging Face's files do.

A layer may hold several of a file's tensors merged into one; `named_weights` then gives views, so
that a loader fills each by its name and never sees the merge. Knows no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from umbel.kernels import ops_for

from .rope import Rope, rope_frequencies

NamedWeights = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights live, and in which dtype."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        """Return uninitialised memory for a weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Linear:
    """x W^T + b, for one or more projections of the same input laid side by side."""

    def __init__(
        self, in_features: int, out_features: Sequence[int], *, bias: bool, placement: Placement
    ) -> None:
        self.out_features = list(out_features)
        self.weight = placement.empty(sum(out_features), in_features)
        self.bias = placement.empty(sum(out_features)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [num_tokens, sum(out_features)] of x [num_tokens, in_features]."""
        return F.linear(x, self.weight, self.bias)

    def named_weights(self, names: Sequence[str]) -> NamedWeights:
        """Yield one weight (and bias) per name, in the order of `out_features`."""
        for name, weight in zip(names, torch.split(self.weight, self.out_features), strict=True):
            yield f"{name}.weight", weight
        if self.bias is not None:
            for name, bias in zip(names, torch.split(self.bias, self.out_features), strict=True):
                yield f"{name}.bias", bias


class RMSNorm:
    """Root-mean-square norm, alone or fused with the residual sum before it."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = placement.empty(size)
        self._eps = eps
        self._ops = ops_for(placement.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., size]."""
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add_(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place and return the norm of the sum."""
        return self._ops.fused_add_rms_norm_(x, residual, self.weight, self._eps)

    def named_weights(self, name: str) -> NamedWeights:
        """Yield the weight."""
        yield f"{name}.weight", self.weight


class RotaryEmbedding:
    """Angles of positions, computed once a pass and used in every layer."""

    def __init__(self, rope: Rope, head_dim: int, placement: Placement) -> None:
        frequencies, self._scale = rope_frequencies(rope, head_dim)
        self._frequencies = frequencies.to(placement.device)
        self._dtype = placement.dtype

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [num_tokens, 1, head_dim / 2]."""
        angles = positions[:, None, None].float() * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return cos.to(self._dtype), sin.to(self._dtype)


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, placement: Placement
    ) -> None:
        sizes = (intermediate_size, intermediate_size)
        self.gate_up = Linear(hidden_size, sizes, bias=bias, placement=placement)
        self.down = Linear(intermediate_size, (hidden_size,), bias=bias, placement=placement)
        self._ops = ops_for(placement.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size]."""
        return self.down(self._ops.silu_and_mul(self.gate_up(x)))

    def named_weights(self, prefix: str) -> NamedWeights:
        """Yield gate, up and down."""
        yield from self.gate_up.named_weights((f"{prefix}.gate_proj", f"{prefix}.up_proj"))
        yield from self.down.named_weights((f"{prefix}.down_proj",))
