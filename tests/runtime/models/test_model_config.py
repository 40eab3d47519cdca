from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from umbel.lang.errors import ModelLoadError
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.models import ModelConfig, read_config_json
from umbel.runtime.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**CONFIG, **changes})


def test_a_config_is_read() -> None:
    assert config() == ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=Rope(10_000.0),
        max_position_embeddings=512,
        tied_embeddings=False,
    )


def test_the_first_llamas_share_no_key_value_heads() -> None:
    assert config(num_key_value_heads=None).num_kv_heads == 4


SCALING: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2}, LinearScaling(2.0)),
        ({"type": "dynamic", "factor": 2.0}, None),
        ({"rope_type": "llama3", **SCALING}, Llama3Scaling(8.0, 1.0, 4.0, 512.0)),
        (
            {"rope_type": "llama3", "original_max_position_embeddings": 128, **SCALING},
            Llama3Scaling(8.0, 1.0, 4.0, 128.0),
        ),
        (
            {"type": "yarn", "original_max_position_embeddings": 128},
            YarnScaling(factor=4.0, original_context=128.0),
        ),
    ],
)
def test_scaling_is_read_in_both_forms_of_the_file(scaling: dict[str, Any], expected: Any) -> None:
    old = config(rope_theta=5e5, rope_scaling=scaling)
    new = config(rope_parameters={"rope_theta": 5e5, **scaling})
    assert old.rope == new.rope == Rope(5e5, expected)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "mistral", "sliding_window": None}, 512),
        ({"model_type": "mistral", "max_position_embeddings": 32_768}, 4096),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, 128),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, 512),
        ({"sliding_window": 128}, 512),
    ],
)
def test_a_sliding_window_limits_the_context(changes: dict[str, Any], limit: int) -> None:
    assert config(**changes).max_position_embeddings == limit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; umbel has llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; umbel has silu"),
        ({"hidden_size": None}, "hidden_size is None, expected a whole number"),
        ({"vocab_size": True}, "vocab_size is True, expected a whole number"),
        ({"num_hidden_layers": 0}, "num_layers is 0, expected a number above 0"),
        ({"num_key_value_heads": 3}, "4 query heads can't share 3 key-value heads"),
        ({"model_type": "qwen2", "num_key_value_heads": None}, "num_key_value_heads is None"),
        ({"head_dim": 15}, "head_dim is 15; rotary embedding needs it even"),
        ({"rope_scaling": {"type": "longrope"}}, "unknown RoPE scaling 'longrope'; umbel knows"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs a number 'factor', found None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; umbel rotates whole heads"),
    ],
)
def test_what_we_do_not_have_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        config(**changes)
    assert message in str(caught.value)


def test_a_config_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert read_config_json(path) == config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a model folder needs a config.json"),
        ("{", "is not JSON"),
        ("[]", "holds a list, expected an object"),
        ('{"model_type": "bert"}', "config.json: the model's model_type is 'bert'"),
    ],
)
def test_a_config_file_that_cant_be_used_is_named(
    tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelLoadError) as caught:
        read_config_json(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_pools_bytes_are_those_of_its_tensors() -> None:
    shape = config()
    pool = KVPool(
        shape.num_layers,
        10,
        shape.num_kv_heads,
        shape.head_dim,
        torch.bfloat16,
        torch.device("cpu"),
    )
    assert len(pool.k) == len(pool.v) == 3
    assert {cache.shape for cache in pool.k + pool.v} == {(11, 2, 16)}  # ten and the spare one
    assert pool.bytes_per_token * 11 == sum(cache.nbytes for cache in pool.k + pool.v)
    assert pool.bytes_per_token == pool.num_bytes // 10
