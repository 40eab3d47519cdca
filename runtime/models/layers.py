"""The few layers the models share; each takes its weights by the names of Hugging Face's files.

A layer may hold several of a file's tensors merged into one, and in a form of its own: it asks for
them one by one, so no loader sees that. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from umbel.kernels import ops_for

from .rope import Rope, rope_frequencies


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights live, in which dtype, and which attention backend reads their KV.

    `attention` names a backend of `kernels.dispatch`; "auto" is the one that suits the device.
    """

    dtype: torch.dtype
    device: torch.device
    attention: str = "auto"


class Weights(Protocol):
    """Gives a model that is being built its weights."""

    @property
    def placement(self) -> Placement:
        """Where the model lives."""
        ...

    def fill(self, name: str, out: Tensor) -> None:
        """Write the weight of that name to `out`, which has its shape."""
        ...


def take(weights: Weights, name: str, *shape: int) -> Tensor:
    """Return the weight of that name and shape."""
    return take_merged(weights, [name], list(shape[:1]), *shape[1:])


def take_merged(
    weights: Weights, names: Sequence[str], sizes: Sequence[int], *row_shape: int
) -> Tensor:
    """Return the weights of these names, of `sizes` rows each, laid one after the other."""
    placement = weights.placement
    merged = torch.empty((sum(sizes), *row_shape), dtype=placement.dtype, device=placement.device)
    for name, part in zip(names, torch.split(merged, list(sizes)), strict=True):
        weights.fill(name, part)
    return merged


class Linear:
    """x W^T + b, for one or more projections of the same input laid side by side.

    `row` is the product for one token with what surrounds it, `row_product` without the weights;
    None where the device has none.
    """

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
    ) -> None:
        weight = take_merged(
            weights, [f"{name}.weight" for name in names], out_features, in_features
        )
        offset: Tensor | None = None
        if bias:
            offset = take_merged(weights, [f"{name}.bias" for name in names], out_features)
        self._use(weight, offset)

    @classmethod
    def tied(cls, weight: Tensor) -> Linear:
        """Return the product with a weight that the model has already, such as its embedding."""
        linear = cls.__new__(cls)
        linear._use(weight, None)
        return linear

    def _use(self, weight: Tensor, bias: Tensor | None) -> None:
        ops = ops_for(weight.device)
        self._product = ops.linear(weight, bias)
        self.row: Callable[..., Tensor] | None = None
        if ops.row_product is not None:
            self.row = partial(ops.row_product, weight=weight, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [num_tokens, sum(out_features)] of x [num_tokens, in_features]."""
        return self._product(x)


class RMSNorm:
    """Root-mean-square norm, alone or fused with the residual sum before it."""

    def __init__(self, weights: Weights, name: str, size: int, eps: float) -> None:
        self.weight = take(weights, f"{name}.weight", size)
        self._eps = eps
        self._ops = ops_for(weights.placement.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., size]."""
        return self._ops.rms_norm(x, self.weight, self._eps)

    @property
    def parts(self) -> tuple[Tensor, float]:
        """The weight and eps, for a product that norms its input itself."""
        return self.weight, self._eps

    def add_(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place and return the norm of the sum."""
        return self._ops.fused_add_rms_norm_(x, residual, self.weight, self._eps)


class RotaryEmbedding:
    """Angles of positions, looked up once a pass and used in every layer.

    A GPU reads them from a table of all positions, one launch where computing them takes eight; a
    CPU computes what a pass needs.
    """

    def __init__(self, rope: Rope, head_dim: int, max_positions: int, placement: Placement) -> None:
        frequencies, self._scale = rope_frequencies(rope, head_dim)
        self._frequencies = frequencies.to(placement.device)
        self._dtype = placement.dtype
        self._table: Tensor | None = None  # [max_positions, 2, head_dim / 2]
        if placement.device.type == "cuda":
            self._table = self._angles(torch.arange(max_positions, device=placement.device))

    def _angles(self, positions: Tensor) -> Tensor:
        angles = positions[:, None].float() * self._frequencies
        return (torch.stack((angles.cos(), angles.sin()), 1) * self._scale).to(self._dtype)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [num_tokens, 1, head_dim / 2]."""
        table = self._table
        both = self._angles(positions) if table is None else table.index_select(0, positions)
        return both[:, :1], both[:, 1:]


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
    ) -> None:
        self.gate_up = Linear(
            weights,
            (f"{name}.gate_proj", f"{name}.up_proj"),
            hidden_size,
            (intermediate_size, intermediate_size),
            bias=bias,
        )
        self.down = Linear(
            weights, (f"{name}.down_proj",), intermediate_size, (hidden_size,), bias=bias
        )
        self._ops = ops_for(weights.placement.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size]."""
        return self.down(self._ops.silu_and_mul(self.gate_up(x)))

    def add_row_(self, stream: Tensor, norm: RMSNorm) -> None:
        """Add the result for one token, `stream` [1, hidden_size] normed, to `stream`."""
        assert self.gate_up.row is not None
        assert self.down.row is not None
        self.down.row(self.gate_up.row(stream, norm=norm.parts, gates=True), add_to=stream)
