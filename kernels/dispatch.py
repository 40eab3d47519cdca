"""Chooses an implementation of every op, in one place: by device; attention by name and shape too.

No environment variable and no probing of packages at import: a backend that needs a package is
made when it is first asked for.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from . import packed_linear, reference
from .paged_attention import AttentionBackend, AttentionPlan, AttentionShape, DecodePlan, ExtendPlan
from .sampling_tensors import RowMasks, SamplingTensors, TokenBytes
from .torch_attention import TorchAttention

logger = logging.getLogger(__name__)


RopeAndCache = Callable[
    [
        Tensor,
        int,
        tuple[Tensor, float] | None,
        tuple[Tensor, Tensor],
        tuple[Tensor, Tensor, Tensor],
    ],
    Tensor,
]


class RowProduct(Protocol):
    """reference.row_product, or a kernel like it."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        add_to: Tensor | None = None,
        gates: bool = False,
    ) -> Tensor:
        """Return what reference.row_product says."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of the ops; each is described at its function in reference.py.

    `row_product` is None where passes of one token gain nothing by it.
    """

    linear: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    fused_add_rms_norm_: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rope_and_cache_: RopeAndCache
    silu_and_mul: Callable[[Tensor], Tensor]
    apply_token_bitmask_: Callable[[Tensor, Tensor], None]
    gather_logprobs: Callable[[Tensor, Tensor], Tensor]
    row_product: RowProduct | None = None


class Greedy(Protocol):
    """triton.greedy, or a kernel like it."""

    def __call__(self, logits: Tensor, masks: RowMasks | None = None) -> Tensor:
        """Return each row's likeliest id."""
        ...


class Sample(Protocol):
    """triton.sample, or a kernel like it."""

    def __call__(
        self, logits: Tensor, rows: SamplingTensors, masks: RowMasks | None = None
    ) -> Tensor:
        """Return one id per row. What the masks forbid may be -inf in the logits afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """Sampling kernels; see triton/sampling.py for the rules, and triton/dfa_step.py."""

    greedy: Greedy
    sample: Sample
    apply_token_bitmask_: Callable[[Tensor, Tensor], None]
    gather_logprobs: Callable[[Tensor, Tensor], Tensor]
    dfa_step: Callable[[Tensor, Tensor, Tensor, Tensor, TokenBytes, Tensor], None]


REFERENCE = Ops(
    linear=reference.linear,
    rms_norm=reference.rms_norm,
    fused_add_rms_norm_=reference.fused_add_rms_norm_,
    rope_and_cache_=reference.rope_and_cache_,
    silu_and_mul=reference.silu_and_mul,
    apply_token_bitmask_=reference.apply_token_bitmask_,
    gather_logprobs=reference.gather_logprobs,
)


@functools.cache
def has_triton() -> bool:
    """Say whether Triton is installed; a GPU without it runs plain torch, and one line says so."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning("triton is not installed: the GPU runs plain torch, which is slower")
    return found


def _triton_ops() -> Ops:
    from . import triton as kernels  # needs the triton package, which a CPU does without

    return replace(
        REFERENCE,
        rms_norm=kernels.rms_norm,
        fused_add_rms_norm_=kernels.fused_add_rms_norm_,
        rope_and_cache_=kernels.rope_and_cache_,
        silu_and_mul=kernels.silu_and_mul,
        apply_token_bitmask_=kernels.apply_token_bitmask_,
        gather_logprobs=kernels.gather_logprobs,
        row_product=kernels.row_product,
    )


#: device type -> what makes its ops; the reference runs anywhere
OPS: dict[str, Callable[[], Ops]] = {
    "cpu": lambda: replace(REFERENCE, linear=packed_linear.PackedLinears().linear),
    "cuda": lambda: _triton_ops() if has_triton() else REFERENCE,
}


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """Which kernels take what of a pass: torch, triton or flashinfer.

    FlashInfer takes no rows under a mask, and of captured passes only those of decodes alone;
    Triton takes these in its place.
    """

    decode: str
    extend: str
    min_new: int = 1  # FlashInfer takes extends of at least so many tokens,
    min_total: int = 1  # in passes that have at least so many in such ones


#: setting -> the choice; where FlashInfer can't run, it is that of the device
ATTENTION = {
    "torch": AttentionChoice("torch", "torch"),
    "triton": AttentionChoice("triton", "triton"),
    "flashinfer": AttentionChoice("flashinfer", "flashinfer"),
}

#: what is fastest on Hopper: Triton reads what sequences share once, and fa3 computes long extends,
#: where they are work enough to hide that it is called from Python, layer by layer
HOPPER_ATTENTION = AttentionChoice("triton", "flashinfer", min_new=128, min_total=2048)

#: what FlashInfer has kernels for
FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)
FLASHINFER_HEAD_DIMS = (64, 128, 256)


@functools.cache
def ops_for(device: torch.device) -> Ops:
    """Return the ops that suit `device`."""
    return OPS[device.type]() if device.type in OPS else REFERENCE


def sampling_ops() -> SamplingOps:
    """Return the kernels that sample on a device; they need Triton."""
    from . import triton as kernels

    return SamplingOps(
        greedy=kernels.greedy,
        sample=kernels.sample,
        apply_token_bitmask_=kernels.apply_token_bitmask_,
        gather_logprobs=kernels.gather_logprobs,
        dfa_step=kernels.dfa_step,
    )


def compile_ahead(dry_run: Callable[[], None], device: torch.device) -> int | None:
    """Compile side by side what `dry_run` would launch; see triton/launch.py. It needs Triton."""
    from . import triton as kernels

    return kernels.compile_ahead(dry_run, device)


def decode_plan(
    shape: AttentionShape, sizes: Sequence[int], max_slots: int, name: str = "auto"
) -> DecodePlan:
    """Return a plan for captured decode passes of `sizes` rows; it needs Triton."""
    if attention_choice(name, shape).decode == "flashinfer":
        from .flashinfer_attention import FlashInferDecode

        return FlashInferDecode(shape, sizes, max_slots)
    from . import triton as kernels

    return kernels.DecodeAttention(shape, max(sizes), max_slots)


def extend_plan(
    shape: AttentionShape, max_tokens: int, max_slots: int, max_mask: int
) -> ExtendPlan:
    """Return a plan for captured passes of any kind; it needs Triton.

    `max_mask` is the number of bytes that masks may take.
    """
    from . import triton as kernels

    return kernels.MixedAttention(shape, max_tokens, max_slots, max_mask)


def _flashinfer_lacks(shape: AttentionShape) -> str | None:
    """Return what keeps FlashInfer from running layers of this shape, or None."""
    if shape.device.type != "cuda":
        return "it needs a GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed (pip install 'umbel[flashinfer]')"
    if not has_triton():
        return "it needs Triton beside it"
    if shape.dtype not in FLASHINFER_DTYPES:
        return f"it has no kernels for {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it has no kernels for heads of {shape.head_dim}"
    return None


def _loads_flashinfer(shape: AttentionShape) -> bool:
    try:
        from .flashinfer_attention import load_extends

        load_extends(shape)
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("attention runs on triton alone: FlashInfer does not load here: %s", error)
        return False
    return True


@functools.cache
def attention_choice(name: str, shape: AttentionShape) -> AttentionChoice:
    """Return who takes what in layers of this shape; ValueError lists the names that exist.

    "auto" is what is fastest. FlashInfer that was asked for and can't run is said once.
    """
    if name not in (*ATTENTION, "auto"):
        raise ValueError(f"no attention backend {name!r}; there are {sorted(ATTENTION)}")
    usual = "triton" if shape.device.type == "cuda" and has_triton() else "torch"
    if name in ("torch", "triton"):
        return ATTENTION[name]
    lack = _flashinfer_lacks(shape)
    if name == "flashinfer" and lack is not None:
        logger.warning("attention runs on %s, not on FlashInfer: %s", usual, lack)
    if lack is not None:
        return ATTENTION[usual]
    if name == "flashinfer":
        return ATTENTION["flashinfer"]
    is_hopper = torch.cuda.get_device_capability(shape.device) == (9, 0)
    return HOPPER_ATTENTION if is_hopper and _loads_flashinfer(shape) else ATTENTION[usual]


def attention_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """Return a new backend for layers of this shape; see `attention_choice`."""
    choice = attention_choice(name, shape)
    if "flashinfer" in (choice.decode, choice.extend):
        from .flashinfer_attention import FlashInferAttention

        return FlashInferAttention(
            takes_decodes=choice.decode == "flashinfer",
            min_new=choice.min_new,
            min_total=choice.min_total,
        )
    if choice.decode == "triton":
        from . import triton as kernels

        return kernels.TritonAttention()
    return TorchAttention()


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> Tensor:
    """Run a planned pass in one layer; shapes as in `AttentionPlan.run`."""
    return plan.run(q, k_cache, v_cache)
