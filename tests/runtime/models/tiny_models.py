"""Random models of every family, as transformers makes them, and passes to run ours with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.inputs import build_inputs
from umbel.runtime.models import CausalLM, ForwardBatch, load_model
from umbel.runtime.request import Request
from umbel.runtime.scheduler.batch import Batch, ScheduledRequest

CPU = torch.device("cpu")
VOCAB_SIZE, MAX_CONTEXT = 96, 64
NUM_SLOTS = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": 0.2,
}
_ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ORIGINAL}
_FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

#: name -> (family, what differs from the shape above)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", **_LLAMA3}}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **_ORIGINAL}}),
    "llama-yarn-given": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
                "truncate": False,
                **_ORIGINAL,
            }
        },
    ),
    "llama-yarn-mscale": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                **_ORIGINAL,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


def make_oracle(variant: str) -> PreTrainedModel:
    """Return transformers' model with random weights, norms and biases among them."""
    family, changes = VARIANTS[variant]
    config_class, model_class = _FAMILIES[family]
    torch.manual_seed(len(variant))
    if "rope_parameters" in changes:
        changes = {
            **changes,
            "rope_parameters": {"rope_theta": 500.0, **changes["rope_parameters"]},
        }
    model = model_class(config_class(**{**_SHAPE, **changes}))
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.data.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
    return model.eval()  # type: ignore[no-any-return]


def make_gguf_oracle(path: Path) -> PreTrainedModel:
    """Return transformers' model with a GGUF's weights, by its own reader of names and order.

    Its from_pretrained would do the same, but asks for one more package.
    """
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    read = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(path), return_tensors=True, model_to_load=model
    )
    absent, unknown = model.load_state_dict(read["tensors"], strict=False)
    assert not unknown
    assert absent == (["lm_head.weight"] if config.tie_word_embeddings else [])
    model.eval()  # type: ignore[no-untyped-call]
    return model


def oracle_logits(oracle: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits at every position, [len(token_ids), vocab_size]."""
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def load(path: Path) -> CausalLM:
    """Load a model of ours in float32."""
    return load_model(path, dtype=torch.float32, device=CPU)


def make_pool(model: CausalLM, dtype: torch.dtype = torch.float32) -> KVPool:
    """Return a pool whose slots hold NaN until they are written."""
    config = model.config
    pool = KVPool(config.num_layers, NUM_SLOTS, config.num_kv_heads, config.head_dim, dtype, CPU)
    for cache in pool.k + pool.v:
        cache.fill_(torch.nan)
    return pool


def run_pass(
    model: CausalLM, pool: KVPool, pieces: Sequence[tuple[Request, int, int]]
) -> torch.Tensor:
    """Compute rows [start, end) of each request in one pass; return the logits of all of them."""
    batch = Batch(tuple(ScheduledRequest(*piece) for piece in pieces), 0)
    inputs = build_inputs(batch, list(range(batch.num_tokens)))
    return model.forward(ForwardBatch.from_inputs(inputs, CPU), pool)
