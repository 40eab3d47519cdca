"""A GGUF file as a source of weights: ggml's names, types and row order made Hugging Face's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from umbel.lang.errors import ModelLoadError

from .gguf_file import GGUFFile
from .gguf_quants import BLOCK_FORMATS, dequantize
from .model_config import ModelConfig
from .rope import DividedFrequencies

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Read the configuration of the model in the file; its tensors complete the metadata.

    Raises ModelLoadError for a model that is not ours.
    """
    try:
        config = ModelConfig.from_gguf(file.metadata)
    except ModelLoadError as error:
        raise ModelLoadError(f"{file.path}: {error}") from error
    config = replace(config, tied_embeddings="output.weight" not in file.tensors)
    if _ROPE_DIVISORS in file.tensors:
        divisors = tuple(_values(file, _ROPE_DIVISORS).tolist())
        config = replace(config, rope=replace(config.rope, scaling=DividedFrequencies(divisors)))
    return config


class GGUFSource:
    """The tensors of a GGUF under their Hugging Face names, dequantised as they are copied."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.place = str(file.path)
        self._file = file
        self._config = config
        self._ggml_names = {hf_name(name): name for name in file.tensors if name != _ROPE_DIVISORS}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor there, rows first."""
        return {
            name: tuple(reversed(self._file.tensors[ggml].shape))
            for name, ggml in self._ggml_names.items()
        }

    def copy_into(self, name: str, out: Tensor) -> None:
        """Write the tensor to `out`."""
        values = _values(self._file, self._ggml_names[name]).view(out.shape)
        if self._config.architecture == "llama" and ".q_proj." in name:
            values = half_split_rows(values, self._config.num_heads)
        elif self._config.architecture == "llama" and ".k_proj." in name:
            values = half_split_rows(values, self._config.num_kv_heads)
        out.view(values.shape).copy_(values)


def hf_name(ggml_name: str) -> str:
    """Return the Hugging Face name of a tensor; one we don't know keeps its own."""
    if ggml_name in _TOP_NAMES:
        return _TOP_NAMES[ggml_name]
    match = _LAYER.fullmatch(ggml_name)
    if match is None or match[2] not in _LAYER_NAMES:
        return ggml_name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def half_split_rows(values: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of Q or K from pairs side by side to pairs half a head apart.

    llama.cpp rotates dimension 2 i with 2 i + 1 in models of the llama architecture, we rotate i
    with i + head_dim / 2. Returns a view [num_heads, 2, head_dim / 2, ...].
    """
    return torch.unflatten(values, 0, (num_heads, -1, 2)).transpose(1, 2)


def _values(file: GGUFFile, name: str) -> Tensor:
    info = file.tensors[name]
    if info.type_name not in BLOCK_FORMATS:
        raise ModelLoadError(
            f"tensor {name!r} of {file.path} has type {info.type_name}; umbel reads "
            f"{', '.join(BLOCK_FORMATS)}: take the model in one of these, such as Q8_0"
        )
    raw = torch.from_numpy(np.array(file.tensor_bytes(name)))
    out = torch.empty(math.prod(info.shape))
    dequantize(info.type_name, raw, out)
    return out
