"""Gives a model its weights by name, from safetensors or at random, and reports every miss.

Knows names and shapes, not what the weights are for.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from umbel.lang.errors import ModelLoadError

from .layers import Placement
from .model_config import ModelConfig

_NAMED_AT_MOST = 20  # weights spelled out in one error, of each kind


class WeightSource(Protocol):
    """Tensors by their Hugging Face name."""

    @property
    def place(self) -> str:
        """Where they come from, for errors."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor there."""
        ...

    def copy_into(self, name: str, out: Tensor) -> None:
        """Write the tensor to `out`, which has its shape, in the dtype and on the device of out."""
        ...


class StoredWeights:
    """Weights out of a source. A miss is remembered, and `finish` names all of them.

    After the first miss nothing more is read, since the model will not be used.
    """

    def __init__(self, source: WeightSource, placement: Placement) -> None:
        self.placement = placement
        self._source = source
        self._found = source.shapes()
        self._asked: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []

    def fill(self, name: str, out: Tensor) -> None:
        """Write the weight of that name to `out`, which has its shape."""
        self._asked.add(name)
        shape = self._found.get(name)
        if shape is None:
            self._missing.append(name)
        elif shape != tuple(out.shape):
            self._misshapen.append(f"{name} ({list(shape)} instead of {list(out.shape)})")
        elif not self._missing and not self._misshapen:
            self._source.copy_into(name, out)

    def finish(self, config: ModelConfig) -> None:
        """Raise ModelLoadError if weights are missing, left over or of another shape.

        A head beside tied embeddings and saved rotary frequencies may be left over: they repeat
        what the model has.
        """
        unexpected = [
            name
            for name in self._found
            if name not in self._asked
            and not (name == "lm_head.weight" and config.tied_embeddings)
            and not name.endswith("rotary_emb.inv_freq")
        ]
        problems = [
            f"{label}: {_listed(names)}"
            for label, names in (
                ("missing", self._missing),
                ("unexpected", unexpected),
                ("of the wrong shape", self._misshapen),
            )
            if names
        ]
        if problems:
            raise ModelLoadError(
                f"the weights in {self._source.place} don't fit the model's configuration "
                f"({config.architecture}, {config.num_layers} layers); {'; '.join(problems)}"
            )


class RandomWeights:
    """Random weights for any model, the same for a seed and a name.

    Matrices have a standard deviation of 1 / sqrt(columns), so that activations and logits keep a
    scale near 1; norms are 1 and biases 0.
    """

    def __init__(self, placement: Placement, seed: int = 0) -> None:
        self.placement = placement
        self._seed = seed

    def fill(self, name: str, out: Tensor) -> None:
        """Write the weight of that name to `out`, which has its shape."""
        if out.ndim == 1:
            out.fill_(0.0 if name.endswith(".bias") else 1.0)
            return
        generator = torch.Generator(out.device)
        # hashed to 32 bits: the CPU's generator drops the others
        generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        out.normal_(0.0, 1 / math.sqrt(out.shape[1]), generator=generator)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    rest = len(names) - _NAMED_AT_MOST
    return shown + (f" and {rest} more" if rest > 0 else "")


class SafetensorsSource:
    """The safetensors of a model folder: one file, or the shards that an index names."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        files = _safetensors_files(folder)
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118  not a mapping
                        self._file_of[name] = file
                        self._shapes[name] = tuple(tensors.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(
                    f"can't read {file}: {error}; it is no safetensors file or it is truncated: "
                    "download it again"
                ) from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor there."""
        return self._shapes

    def copy_into(self, name: str, out: Tensor) -> None:
        """Write the tensor to `out`."""
        file = self._file_of[name]
        with safe_open(file, framework="pt") as tensors:
            out.copy_(tensors.get_tensor(name))


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not an index of safetensors: {error!r}") from error
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent:
            raise ModelLoadError(f"{folder} lacks {_listed(absent)}, named by {index.name}")
        return [folder / shard for shard in shards]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"{folder} holds no .safetensors file; umbel reads safetensors and GGUF: "
            "convert other weights first"
        )
    return files
