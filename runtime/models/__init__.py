"""The models: a path or a configuration in, a forward pass over the paged cache out."""

from .forward_batch import ForwardBatch
from .llama import CausalLM
from .loader import load_dummy_model, load_model
from .model_config import ModelConfig, read_config_json

__all__ = [
    "CausalLM",
    "ForwardBatch",
    "ModelConfig",
    "load_dummy_model",
    "load_model",
    "read_config_json",
]
