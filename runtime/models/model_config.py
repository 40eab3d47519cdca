"""The model's shape, read from a config.json or from a GGUF's metadata; loads no weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.lang.errors import ModelLoadError

from .rope import Rope, rope_from_gguf, rope_from_hf

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
#: general.architecture -> ours; llama.cpp calls Mistral and SmolLM2 llama as well
_GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the forward pass needs to know of a model; ModelLoadError where it can't be."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_position_embeddings: int  # tokens of a sequence; less where a sliding window limits it
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelLoadError(
                f"unknown architecture {self.architecture!r}; umbel has {', '.join(ARCHITECTURES)}"
            )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"the model's {name} is {value!r}, expected a number above 0")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} query heads can't share {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim is {self.head_dim}; rotary embedding needs it even")

    @property
    def weights_read(self) -> int:
        """Weights that a pass of one token reads: all but norms and, where it is not tied, the
        embedding.
        """
        attention = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dictionary of a Hugging Face config.json.

        Raises ModelLoadError for an architecture or a feature we don't have, never a guess.
        """
        architecture = config.get("model_type")
        if architecture not in ARCHITECTURES:
            raise ModelLoadError(
                f"the model's model_type is {architecture!r}; umbel has {', '.join(ARCHITECTURES)}"
            )
        if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise ModelLoadError(f"hidden_act is {activation!r}; umbel has silu")
        reader = _Reader(config)
        num_heads = reader.number("num_attention_heads")
        hidden_size = reader.number("hidden_size")
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
        # the first Llamas name no key-value heads: each query head has its own
        is_plain = architecture == "llama" and config.get("num_key_value_heads") is None
        num_kv_heads = num_heads if is_plain else reader.number("num_key_value_heads")
        context = reader.number("max_position_embeddings")
        bias = bool(config.get("attention_bias", False)) and architecture in ("llama", "qwen3")
        return cls(
            architecture=architecture,
            vocab_size=reader.number("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.number("intermediate_size"),
            num_layers=reader.number("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope_from_hf(config, context),
            max_position_embeddings=_within_window(config, context),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or architecture == "qwen2",
            output_bias=bias,
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "llama",
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ModelConfig:
        """Read a GGUF's metadata; `tied_embeddings` is decided by its tensors, see gguf_weights.

        Raises ModelLoadError for an architecture we don't have or a missing value.
        """
        named = metadata.get("general.architecture")
        if named not in _GGUF_ARCHITECTURES:
            raise ModelLoadError(
                f"the GGUF's general.architecture is {named!r}; "
                f"umbel reads {', '.join(_GGUF_ARCHITECTURES)}"
            )
        reader = _Reader(metadata, f"{named}.")
        num_heads = reader.number("attention.head_count")
        hidden_size = reader.number("embedding_length")
        head_dim = metadata.get(f"{named}.attention.key_length", hidden_size // num_heads)
        rotated = metadata.get(f"{named}.rope.dimension_count", head_dim)
        values = metadata.get(f"{named}.attention.value_length", head_dim)
        if rotated != head_dim or values != head_dim:
            raise ModelLoadError(
                f"heads have {head_dim} dimensions, of which {rotated} rotate, and values "
                f"{values}; umbel needs the three to be equal"
            )
        context = reader.number("context_length")
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        return cls(
            architecture=_GGUF_ARCHITECTURES[named],
            vocab_size=metadata.get(f"{named}.vocab_size", len(tokens)),
            hidden_size=hidden_size,
            intermediate_size=reader.number("feed_forward_length"),
            num_layers=reader.number("block_count"),
            num_heads=num_heads,
            num_kv_heads=metadata.get(f"{named}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            norm_eps=float(metadata.get(f"{named}.attention.layer_norm_rms_epsilon", 1e-6)),
            rope=rope_from_gguf(metadata, named, context),
            max_position_embeddings=context,
            tied_embeddings=False,
            qkv_bias=named == "qwen2",
        )


class _Reader:
    """Takes required numbers from a mapping; a missing one is an error that names it."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def number(self, name: str) -> int:
        value = self.values.get(self.prefix + name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelLoadError(
                f"the model's {self.prefix + name} is {value!r}, expected a whole number"
            )
        return value


def _within_window(config: Mapping[str, Any], context: int) -> int:
    # Up to the window's length, attention over a sliding window is attention over everything.
    is_mistral = config.get("model_type") == "mistral"
    window = config.get("sliding_window", 4096 if is_mistral else None)
    windowed = is_mistral or config.get("use_sliding_window", False)
    if not windowed or not isinstance(window, int) or window >= context:
        return context
    logger.info(
        "the model attends within a sliding window of %d: sequences are limited to it", window
    )
    return window


def read_config_json(path: Path) -> ModelConfig:
    """Read a config.json; ModelLoadError names the file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(
            f"can't read {path}: {error.strerror or error}; a model folder needs a config.json"
        ) from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} holds a {type(config).__name__}, expected an object")
    try:
        return ModelConfig.from_hf(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
