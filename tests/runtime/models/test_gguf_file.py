from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.gguf_writer import gguf_bytes, head, string, value

from umbel.lang.errors import ModelLoadError
from umbel.runtime.models.gguf_file import GGML_BLOCKS, GGUFFile

METADATA = {
    "general.architecture": "llama",
    "a.int": -7,
    "a.float": 0.5,
    "a.flag": True,
    "a.words": ["x", "", "äöü"],
    "a.numbers": [1, 2, 3],
    "a.nested": [[1, 2], [3]],
}
TENSORS: dict[str, tuple[tuple[int, ...], int, bytes]] = {
    "w": ((64, 2), 8, bytes(range(136))),
    "norm": ((3,), 0, np.array([1, 2, 3], "<f4").tobytes()),
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.gguf"
    path.write_bytes(gguf_bytes(METADATA, TENSORS))
    return path


def load(tmp_path: Path, raw: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return GGUFFile(path)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_come_back_as_written(tmp_path: Path, version: int) -> None:
    file = load(tmp_path, gguf_bytes(METADATA, TENSORS, version))
    assert file.version == version
    assert file.metadata == METADATA
    assert list(file.tensors) == list(TENSORS)
    for name, (shape, kind, raw) in TENSORS.items():
        info = file.tensors[name]
        assert (info.shape, info.ggml_type, info.num_bytes) == (shape, kind, len(raw))
        assert file.tensor_bytes(name).tobytes() == raw
    assert file.tensors["w"].type_name == "Q8_0"


def test_another_alignment_moves_the_data(tmp_path: Path) -> None:
    raw = gguf_bytes({"general.alignment": 128}, TENSORS, alignment=128)
    file = load(tmp_path, raw)
    assert file.tensor_bytes("norm").view("<f4").tolist() == [1, 2, 3]
    assert file.tensors["norm"].offset % 128 == 0


def test_a_view_is_read_only_and_outlives_the_file_object(good: Path) -> None:
    view = GGUFFile(good).tensor_bytes("w")
    assert view.tobytes() == TENSORS["w"][2]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


@given(cut=st.integers(0, 10_000))
def test_every_truncation_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    raw = gguf_bytes(METADATA, TENSORS)
    with pytest.raises(ModelLoadError):
        load(tmp_path_factory.mktemp("cut"), raw[: cut % len(raw)])


@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_changed_byte_never_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    raw = bytearray(gguf_bytes(METADATA, TENSORS))
    raw[at % len(raw)] = byte
    try:
        file = load(tmp_path_factory.mktemp("flip"), bytes(raw))
    except ModelLoadError:
        return
    for name, info in file.tensors.items():
        assert len(file.tensor_bytes(name)) == info.num_bytes


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(60), r"starts with b'PK"),
        (b"GGUF", "the version at byte 4 takes 4 bytes"),
        (gguf_bytes({}, {}, version=1), "version 1; umbel reads 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"big-endian \(version 3\)"),
        (gguf_bytes(METADATA, TENSORS)[:-1], "tensor 'norm' should lie at"),
        (gguf_bytes({}, {"t": ((32,), 99, b"")}), "unknown ggml type 99"),
        (gguf_bytes({}, {"t": ((33,), 8, bytes(68))}), "blocks of 32"),
        (gguf_bytes({"general.alignment": 3}, {}), "power of two"),
        (gguf_bytes({}, {"t": ((1, 1, 1, 1, 1), 24, b"x")}), "5 dimensions"),
        (head(0, 1) + string("k") + struct.pack("<I", 77), "type 77"),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + string("k")
            + struct.pack("<IIQ", 9, 8, 1 << 60),
            "reading breaks at number 0",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + string("k")
            + struct.pack("<IIQ", 9, 4, 1 << 60),
            "metadata value 'k'",
        ),
        (
            head(0, 2) + 2 * (string("k") + value(1)),
            "'k' is there twice",
        ),
    ],
)
def test_a_bad_file_is_refused_by_what_is_wrong(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, raw)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="No such file"):
        GGUFFile(tmp_path / "none.gguf")


def test_an_unknown_tensor_is_named(good: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tensor 'nope'"):
        GGUFFile(good).tensor_bytes("nope")


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for kind, (name, block, num_bytes) in GGML_BLOCKS.items():
        theirs = gguf.GGMLQuantizationType(kind)
        assert (name, (block, num_bytes)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


def test_the_real_model_has_the_tensors_that_the_gguf_package_finds(smollm2_path: Path) -> None:
    file = GGUFFile(smollm2_path)
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49_152
    assert file.tensors["token_embd.weight"].shape == (576, 49_152)
    last = max(file.tensors.values(), key=lambda info: info.offset)
    assert last.offset + last.num_bytes == smollm2_path.stat().st_size
