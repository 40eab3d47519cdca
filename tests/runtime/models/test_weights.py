from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.models.tiny_models import (
    CPU,
    MAX_CONTEXT,
    NUM_SLOTS,
    VARIANTS,
    VOCAB_SIZE,
    load,
    make_oracle,
    make_pool,
    run_pass,
)

from umbel.lang.errors import ModelLoadError
from umbel.runtime.models import ModelConfig, load_dummy_model, read_config_json
from umbel.runtime.models.layers import Placement, Weights
from umbel.runtime.models.loader import MODELS
from umbel.runtime.models.weights import RandomWeights, SafetensorsSource, StoredWeights
from umbel.runtime.request import Request


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_oracle("llama").save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of the folder's file."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    return str(caught.value)


class Recorder:
    """Passes on what `weights` fills, and keeps it by name."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.filled: dict[str, torch.Tensor] = {}

    @property
    def placement(self) -> Placement:
        return self.weights.placement

    def fill(self, name: str, out: torch.Tensor) -> None:
        assert name not in self.filled
        self.weights.fill(name, out)
        self.filled[name] = out


def filled_by(config: ModelConfig, weights: Weights) -> dict[str, torch.Tensor]:
    """Build the model and return every weight it took."""
    recorder = Recorder(weights)
    MODELS[config.architecture](config, recorder)
    return recorder.filled


def stored(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    weights = StoredWeights(SafetensorsSource(folder), Placement(dtype, CPU))
    return filled_by(read_config_json(folder / "config.json"), weights)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_takes_every_weight_of_its_file_once(tmp_path: Path, variant: str) -> None:
    make_oracle(variant).save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    taken = stored(tmp_path)
    assert taken.keys() == written.keys()
    for name, weight in written.items():
        assert torch.equal(taken[name], weight), name


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    oracle = make_oracle("llama")
    oracle.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = oracle.state_dict()
    for name, weight in stored(tmp_path).items():
        assert torch.equal(weight, expected[name])


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    make_oracle("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    absent = sorted(tmp_path.glob("*.safetensors"))[1]
    absent.unlink()
    assert f"lacks {absent.name}, named by model.safetensors.index.json" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json is not an index of safetensors" in refusal(folder)


def test_weights_take_the_dtype_that_is_asked_for(folder: Path) -> None:
    written = load_file(folder / "model.safetensors")
    for name, weight in stored(folder, torch.bfloat16).items():
        assert torch.equal(weight, written[name].bfloat16())


def test_all_misses_are_named_at_once(folder: Path) -> None:
    edit(
        folder,
        {
            "model.layers.1.mlp.up_proj.weight": None,
            "model.norm.weight": torch.zeros(32),
            "model.layers.2.input_layernorm.weight": torch.zeros(64),
        },
    )
    message = refusal(folder)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in message
    assert "unexpected: model.layers.2.input_layernorm.weight;" in message
    assert "of the wrong shape: model.norm.weight ([32] instead of [64])" in message


def test_a_long_list_of_misses_is_cut(folder: Path) -> None:
    edit(folder, {f"extra.{i}": torch.zeros(1) for i in range(30)})
    assert "and 10 more" in refusal(folder)


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    edit(folder, {"lm_head.weight": None})
    assert "missing: lm_head.weight" in refusal(folder)


def test_what_repeats_the_model_is_ignored(tmp_path: Path) -> None:
    make_oracle("llama-tied").save_pretrained(tmp_path)
    extra = {
        "lm_head.weight": torch.zeros(VOCAB_SIZE, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    edit(tmp_path, dict(extra))
    assert load(tmp_path).config.tied_embeddings
    assert not extra.keys() & stored(tmp_path).keys()


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert f"can't read {path}" in refusal(folder)


def test_a_folder_without_safetensors_says_what_is_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "holds no .safetensors file; umbel reads safetensors and GGUF" in refusal(folder)


def test_a_path_without_a_model_is_named(tmp_path: Path) -> None:
    assert f"there is no model at {tmp_path / 'none'}" in refusal(tmp_path / "none")


def test_a_file_that_is_no_gguf_is_named(folder: Path) -> None:
    assert "expected b'GGUF'" in refusal(folder / "config.json")


def test_dummy_weights_follow_from_the_seed(folder: Path) -> None:
    config = read_config_json(folder / "config.json")
    placement = Placement(torch.float32, CPU)
    first, again, other = (filled_by(config, RandomWeights(placement, seed)) for seed in (1, 1, 2))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, other[name]) == (weight.ndim == 1)
    matrices = [weight for weight in first.values() if weight.ndim == 2]
    assert len({float(weight[0, 0]) for weight in matrices}) == len(matrices)


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_dummy_logits_have_a_sane_scale(tmp_path: Path, variant: str) -> None:
    make_oracle(variant).save_pretrained(tmp_path)
    model = load_dummy_model(load(tmp_path).config, dtype=torch.float32, device=CPU)
    row = Request(
        0, 0, 0, list(range(MAX_CONTEXT)), limit=MAX_CONTEXT, slots=array("q", range(NUM_SLOTS))
    )
    logits = run_pass(model, make_pool(model), [(row, 0, MAX_CONTEXT)])
    assert 0.5 < float(logits.std()) < 2
