"""The ops the runtime's models are made of, chosen by device; imports nothing of umbel."""

from .dispatch import (
    Ops,
    SamplingOps,
    attention,
    attention_backend,
    compile_ahead,
    decode_plan,
    extend_plan,
    has_triton,
    ops_for,
    sampling_ops,
)
from .paged_attention import (
    AttentionBackend,
    AttentionLayout,
    AttentionPlan,
    AttentionShape,
    DecodePlan,
    ExtendPlan,
)
from .sampling_tensors import RowMasks, SamplingTensors, TokenBytes
from .staging import ArraySender, Staging, new_event

__all__ = [
    "ArraySender",
    "AttentionBackend",
    "AttentionLayout",
    "AttentionPlan",
    "AttentionShape",
    "DecodePlan",
    "ExtendPlan",
    "Ops",
    "RowMasks",
    "SamplingOps",
    "SamplingTensors",
    "Staging",
    "TokenBytes",
    "attention",
    "attention_backend",
    "compile_ahead",
    "decode_plan",
    "extend_plan",
    "has_triton",
    "new_event",
    "ops_for",
    "sampling_ops",
]
