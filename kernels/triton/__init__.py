"""The ops as Triton kernels: one launch each, with the names and meanings of reference.py.

They run compiled on a GPU, and under Triton's interpreter (TRITON_INTERPRET=1) on a CPU. Attention
is planned on the host once per pass and takes one or two launches per layer.
"""

from .activation import silu_and_mul
from .attention import MixedAttention, TritonAttention
from .decode_attention import DecodeAttention
from .dfa_step import dfa_step
from .extend_attention import ExtendAttention
from .launch import compile_ahead
from .logprobs import gather_logprobs
from .norm import fused_add_rms_norm_, rms_norm
from .rope import apply_rope_, norm_rope_write_kv_, rope_and_cache_, write_kv_
from .row_product import row_product
from .sampling import greedy, sample
from .token_bitmask import apply_token_bitmask_

__all__ = [
    "DecodeAttention",
    "ExtendAttention",
    "MixedAttention",
    "TritonAttention",
    "apply_rope_",
    "apply_token_bitmask_",
    "compile_ahead",
    "dfa_step",
    "fused_add_rms_norm_",
    "gather_logprobs",
    "greedy",
    "norm_rope_write_kv_",
    "rms_norm",
    "rope_and_cache_",
    "row_product",
    "sample",
    "silu_and_mul",
    "write_kv_",
]
