"""Rotary position frequencies: the plain ones and the published ways to stretch them.

Reads what a config.json or a GGUF's metadata says; applies nothing (kernels rotate).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from umbel.lang.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp over dimensions, and an attention temperature."""

    factor: float
    original_context: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1
    truncate: bool = True  # the ramp's ends at whole dimensions


@dataclass(frozen=True, slots=True)
class DividedFrequencies:
    """Each frequency divided by a number of its own, as llama.cpp ships Llama 3.1's scaling."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DividedFrequencies


@dataclass(frozen=True, slots=True)
class Rope:
    """Base and scaling of the rotary frequencies."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None


def rope_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Return the angle a position adds per pair [head_dim / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case DividedFrequencies(divisors):
            if len(divisors) != len(frequencies):
                raise ModelLoadError(
                    f"rope_freqs.weight has {len(divisors)} values, and a head of {head_dim} "
                    f"dimensions needs {len(frequencies)}"
                )
            return frequencies / torch.tensor(divisors), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(frequencies, scaling, rope.theta, head_dim)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    # how often a pair turns within the original context decides how much of it is stretched
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(
    frequencies: Tensor, scaling: YarnScaling, theta: float, head_dim: int
) -> tuple[Tensor, float]:
    def dimension(turns: float) -> float:  # of the pair that turns so often in the context
        wavelengths = scaling.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretched = ((torch.arange(head_dim // 2) - low) / span).clamp(0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return frequencies * (1 - stretched + stretched / scaling.factor), factor


def rope_from_hf(config: Mapping[str, Any], context: int) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    `dynamic` changes nothing within the trained context, which is as far as we go: it is read as
    no scaling. Raises ModelLoadError for a kind we don't know or a missing value.
    """
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    rotated = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if rotated != 1.0:
        raise ModelLoadError(
            f"partial_rotary_factor is {rotated}; umbel rotates whole heads only: "
            "use a model whose partial_rotary_factor is 1"
        )
    kind = given.get("rope_type") or given.get("type") or "default"

    def number(name: str) -> float:
        if not isinstance(value := given.get(name), int | float):
            raise ModelLoadError(f"RoPE scaling {kind!r} needs a number {name!r}, found {value!r}")
        return float(value)

    def original() -> float:
        outer = config.get("original_max_position_embeddings")
        return float(outer or given.get("original_max_position_embeddings") or context)

    match kind:
        case "default" | "dynamic":
            return Rope(theta)
        case "linear":
            return Rope(theta, LinearScaling(number("factor")))
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            return Rope(theta, Llama3Scaling(number("factor"), low, high, original()))
        case "yarn":
            return Rope(theta, _yarn_from_hf(given, context, original()))
    raise ModelLoadError(
        f"unknown RoPE scaling {kind!r}; umbel knows default, linear, dynamic, llama3 and yarn"
    )


def _yarn_from_hf(given: Mapping[str, Any], context: int, original: float) -> YarnScaling:
    factor = float(given.get("factor") or context / original)
    attention = given.get("attention_factor")
    scale, all_dims = given.get("mscale"), given.get("mscale_all_dim")
    if attention is None and scale and all_dims and factor > 1:
        log = 0.1 * math.log(factor)
        attention = (scale * log + 1) / (all_dims * log + 1)
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        attention_factor=attention,
        truncate=bool(given.get("truncate", True)),
    )


def rope_from_gguf(metadata: Mapping[str, Any], architecture: str, context: int) -> Rope:
    """Read `<architecture>.rope.*`; ModelLoadError for a kind we don't know."""
    prefix = f"{architecture}.rope."
    theta = float(metadata.get(prefix + "freq_base", 10_000.0))
    kind = metadata.get(prefix + "scaling.type", "none")
    factor = float(metadata.get(prefix + "scaling.factor", 0.0))
    if kind not in ("none", "linear", "yarn"):
        raise ModelLoadError(f"{prefix}scaling.type is {kind!r}; umbel knows none, linear and yarn")
    if kind == "none" or factor in (0.0, 1.0):  # llama.cpp reads a factor of 0 as none
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, LinearScaling(factor))
    own = float(metadata.get(prefix + "scaling.attn_factor", 1.0))
    return Rope(
        theta,
        YarnScaling(
            factor=factor,
            original_context=float(
                metadata.get(prefix + "scaling.original_context_length") or context
            ),
            beta_fast=float(metadata.get(prefix + "scaling.yarn_beta_fast", 32.0)),
            beta_slow=float(metadata.get(prefix + "scaling.yarn_beta_slow", 1.0)),
            attention_factor=own * (0.1 * math.log(factor) + 1.0),
        ),
    )
