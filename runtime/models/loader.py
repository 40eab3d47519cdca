"""From a path to a model with its weights; knows no hub and no aliases."""

from __future__ import annotations

from pathlib import Path

import torch

from umbel.lang.errors import ModelLoadError

from .gguf_file import GGUFFile
from .gguf_weights import GGUFSource, read_gguf_config
from .layers import Placement
from .llama import CausalLM, LlamaForCausalLM
from .model_config import ModelConfig, read_config_json
from .qwen3 import Qwen3ForCausalLM
from .weights import RandomWeights, SafetensorsSource, StoredWeights, WeightSource

#: architecture -> class
MODELS: dict[str, type[LlamaForCausalLM]] = {
    "llama": LlamaForCausalLM,
    "mistral": LlamaForCausalLM,
    "qwen2": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def load_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, attention: str = "auto"
) -> CausalLM:
    """Load a GGUF file, or a folder in Hugging Face form (config.json and safetensors).

    Raises ModelLoadError for whatever can't be found, read or matched.
    """
    if not path.exists():
        raise ModelLoadError(f"there is no model at {path}")
    source: WeightSource
    if path.is_dir():
        config = read_config_json(path / "config.json")
        source = SafetensorsSource(path)
    else:
        file = GGUFFile(path)
        config = read_gguf_config(file)
        source = GGUFSource(file, config)
    weights = StoredWeights(source, Placement(dtype, device, attention))
    model = MODELS[config.architecture](config, weights)
    weights.finish(config)
    return model


def load_dummy_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = "auto",
    seed: int = 0,
) -> CausalLM:
    """Make a model with random weights, the same for the same seed, dtype and device."""
    weights = RandomWeights(Placement(dtype, device, attention), seed)
    return MODELS[config.architecture](config, weights)
