"""GGUF files that the gguf package writes, loaded by us and by transformers."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.runtime.models.tiny_models import (
    MAX_CONTEXT,
    load,
    make_gguf_oracle,
    make_pool,
    oracle_logits,
    run_pass,
)

from umbel.lang.errors import ModelLoadError
from umbel.runtime.models.gguf_file import GGUFFile
from umbel.runtime.models.gguf_weights import half_split_rows, read_gguf_config
from umbel.runtime.models.rope import (
    DividedFrequencies,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    rope_frequencies,
)
from umbel.runtime.request import Request

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 512, 2, 4, 2, 64, 64
QWEN3_HEAD_DIM = 128  # the only one that transformers expects in a GGUF
Tensors = dict[str, tuple[tuple[int, ...], str]]


def head_dim_of(architecture: str) -> int:
    return QWEN3_HEAD_DIM if architecture == "qwen3" else HEAD_DIM


def tensors_of(architecture: str, matrix_type: str, *, tied: bool = True) -> Tensors:
    """Names, shapes (rows first) and types of a small model's tensors."""
    tensors: Tensors = {
        "token_embd.weight": ((VOCAB, HIDDEN), "Q8_0"),
        "output_norm.weight": ((HIDDEN,), "F32"),
    }
    if not tied:
        tensors["output.weight"] = ((VOCAB, HIDDEN), "Q6_K")
    head_dim = head_dim_of(architecture)
    for i in range(LAYERS):
        for name, shape in {
            "attn_q": (HEADS * head_dim, HIDDEN),
            "attn_k": (KV_HEADS * head_dim, HIDDEN),
            "attn_v": (KV_HEADS * head_dim, HIDDEN),
            "attn_output": (HIDDEN, HEADS * head_dim),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }.items():
            tensors[f"blk.{i}.{name}.weight"] = (shape, matrix_type)
            if architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{i}.{name}.bias"] = (shape[:1], "F32")
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = ((HIDDEN,), "F32")
        if architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                tensors[f"blk.{i}.{name}.weight"] = ((head_dim,), "F32")
    return tensors


def write_gguf(
    path: Path, architecture: str, tensors: Tensors, metadata: dict[str, Any] | None = None
) -> Path:
    """Write a model with random weights of the given types; more metadata as floats or strings."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(VOCAB)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim_of(architecture))
    writer.add_value_length(head_dim_of(architecture))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(MAX_CONTEXT)
    writer.add_rope_freq_base(500.0)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key, value)
    rng = np.random.default_rng(len(architecture))
    for name, (shape, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name]
        values = rng.normal(0.0 if name.endswith("bias") else 1.0, 0.2, shape).astype(np.float32)
        if len(shape) == 2:
            values = rng.normal(0.0, 0.1, shape).astype(np.float32)
        if type_name.endswith("_K"):
            writer.add_tensor(name, random_k_blocks(rng, shape, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_k_blocks(
    rng: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # the package can't quantise these: random blocks with small scales do
    values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // values, block_bytes), np.uint8)
    scale = np.array([2e-5 if kind.name == "Q6_K" else 1e-4], np.float16).view(np.uint8)
    at = 208 if kind.name == "Q6_K" else 0
    blocks[..., at : at + 2] = scale
    if kind.name != "Q6_K":
        blocks[..., 2:4] = scale
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize(
    ("architecture", "matrix_type", "tied"),
    [
        ("llama", "F32", True),
        ("llama", "Q4_1", False),
        ("llama", "Q6_K", True),
        ("qwen2", "Q8_0", True),
        ("qwen2", "Q4_K", False),
        ("qwen3", "Q5_0", True),
        ("qwen3", "F16", False),
    ],
)
def test_a_gguf_gives_the_logits_it_gives_in_transformers(
    tmp_path: Path, architecture: str, matrix_type: str, tied: bool
) -> None:
    tensors = tensors_of(architecture, matrix_type, tied=tied)
    path = write_gguf(tmp_path / "model.gguf", architecture, tensors)
    oracle = make_gguf_oracle(path)
    model = load(path)
    assert model.config.tied_embeddings == tied
    token_ids = np.random.default_rng(0).integers(0, VOCAB, MAX_CONTEXT).tolist()
    row = Request(0, 0, 0, token_ids, limit=MAX_CONTEXT, slots=array("q", range(MAX_CONTEXT)))
    found = run_pass(model, make_pool(model), [(row, 0, MAX_CONTEXT)])
    torch.testing.assert_close(found, oracle_logits(oracle, token_ids), atol=1e-4, rtol=0)


def test_half_split_rows_undoes_the_order_of_llama_cpp() -> None:
    weight = torch.randn(3 * 8, 5)
    # the order that llama.cpp's converter writes
    written = weight.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    assert torch.equal(half_split_rows(written, 3).reshape(24, 5), weight)
    assert torch.equal(half_split_rows(written[:, 0], 3).reshape(24), weight[:, 0])


def test_scaling_shipped_as_divisors_is_read_and_equals_llama3(tmp_path: Path) -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 32.0)
    plain, _ = rope_frequencies(Rope(500.0), HEAD_DIM)
    scaled, _ = rope_frequencies(Rope(500.0, scaling), HEAD_DIM)
    writer_tensors = tensors_of("llama", "F32")
    path = write_gguf(tmp_path / "model.gguf", "llama", writer_tensors)
    assert read_gguf_config(GGUFFile(path)).rope == Rope(500.0)

    writer_tensors["rope_freqs.weight"] = ((HEAD_DIM // 2,), "F32")
    path = write_gguf(tmp_path / "scaled.gguf", "llama", writer_tensors)
    config = read_gguf_config(GGUFFile(path))
    given = np.frombuffer(GGUFFile(path).tensor_bytes("rope_freqs.weight"), np.float32)
    assert config.rope == Rope(500.0, DividedFrequencies(tuple(given.tolist())))
    load(path)  # the divisors are no unexpected weight

    divided = Rope(500.0, DividedFrequencies(tuple((plain / scaled).tolist())))
    torch.testing.assert_close(rope_frequencies(divided, HEAD_DIM)[0], scaled)


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 4.0}, LinearScaling(4.0)),
        (
            {"type": "yarn", "factor": 4.0, "attn_factor": 1.0},
            YarnScaling(4.0, float(MAX_CONTEXT), attention_factor=0.1 * np.log(4.0) + 1),
        ),
    ],
)
def test_scaling_kinds_of_the_metadata_are_read(
    tmp_path: Path, metadata: dict[str, Any], scaling: object
) -> None:
    given = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    path = write_gguf(tmp_path / "model.gguf", "llama", tensors_of("llama", "F32"), given)
    assert read_gguf_config(GGUFFile(path)).rope == Rope(500.0, scaling)  # type: ignore[arg-type]


def test_unknown_scaling_in_the_metadata_is_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        tensors_of("llama", "F32"),
        {"llama.rope.scaling.type": "longrope"},
    )
    with pytest.raises(ModelLoadError, match=r"scaling\.type is 'longrope'; umbel knows"):
        load(path)


def test_an_architecture_that_is_not_ours_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "gemma", {"token_embd.weight": ((4, 32), "F32")})
    with pytest.raises(
        ModelLoadError, match=r"general\.architecture is 'gemma'; umbel reads llama"
    ):
        load(path)


def test_a_quantisation_we_lack_is_named_with_its_tensor(tmp_path: Path) -> None:
    tensors = tensors_of("llama", "Q8_0")
    tensors["blk.1.ffn_up.weight"] = ((INTERMEDIATE, HIDDEN), "Q2_K")
    path = write_gguf(tmp_path / "model.gguf", "llama", tensors)
    with pytest.raises(ModelLoadError, match=r"'blk\.1\.ffn_up\.weight' .* has type Q2_K"):
        load(path)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    tensors = tensors_of("llama", "Q8_0")
    del tensors["blk.1.attn_k.weight"]
    tensors["blk.0.attn_sinks.weight"] = ((HEADS,), "F32")
    path = write_gguf(tmp_path / "model.gguf", "llama", tensors)
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert "missing: model.layers.1.self_attn.k_proj.weight;" in str(caught.value)
    assert str(caught.value).endswith("unexpected: blk.0.attn_sinks.weight")


def test_a_truncated_gguf_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", tensors_of("llama", "Q8_0"))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"truncated.*download it again"):
        load(path)
