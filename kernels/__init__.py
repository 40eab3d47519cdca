"""The ops the runtime's models are made of, chosen by device; imports nothing of umbel."""

from .dispatch import (
    Ops,
    attention,
    attention_backend,
    attention_for,
    ops_for,
)
from .paged_attention import AttentionBackend, AttentionLayout, AttentionPlan, AttentionShape

__all__ = [
    "AttentionBackend",
    "AttentionLayout",
    "AttentionPlan",
    "AttentionShape",
    "Ops",
    "attention",
    "attention_backend",
    "attention_for",
    "ops_for",
]
