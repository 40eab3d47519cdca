"""Reads GGUF files (versions 2 and 3, little-endian) through a memory map.

It knows where each tensor's bytes are; it does not dequantise, and knows no model.
The form: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from umbel.lang.errors import ModelLoadError

# ggml type id -> (name, elements in a block, bytes of a block)
GGML_BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# metadata value type id -> numpy dtype
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("bool"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4  # ggml's own limit
_MAX_ARRAY_DEPTH = 4  # nested arrays are legal and unused; a corrupt file must not recurse for ever
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """Where a tensor lies and what its bytes mean."""

    name: str
    shape: tuple[int, ...]  # ggml's order: the dimension that is contiguous in memory comes first
    ggml_type: int
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def type_name(self) -> str:
        """The ggml name of the type, such as "Q4_1"."""
        return GGML_BLOCKS[self.ggml_type][0]


class GGUFFile:
    """An open GGUF file: `metadata` as Python values, `tensors` by name.

    Opening reads the head only. Tensor data stay in the map and are paged in when they are read.
    Raises ModelLoadError, with what was expected and what was found, for a file that is foreign,
    truncated or corrupt, or whose tensors would end past its end.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size == 0:
                    raise ModelLoadError(f"{self.path} is empty: expected a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(
                f"can't open {self.path}: {error.strerror or error}: expected a GGUF file"
            ) from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        head = _Head(self.path, self._map)
        self.version, num_tensors, num_values = head.prelude()
        self.metadata: dict[str, Any] = head.metadata(num_values)
        self.tensors: dict[str, GGUFTensorInfo] = head.tensors(
            num_tensors, self.metadata.get("general.alignment", 32)
        )

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a read-only view of the tensor's raw bytes; it keeps the map open."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelLoadError(f"{self.path} has no tensor {name!r}")
        return self._bytes[info.offset : info.offset + info.num_bytes]


class _Head:
    """Reads the head front to back; every step is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self.path} is not a GGUF file that can be read: {what}")

    def need(self, num_bytes: int, what: str) -> int:
        """Step over num_bytes and return where they start."""
        start = self.at
        if num_bytes > self.size - start:
            self.fail(
                f"truncated or corrupt: {what} at byte {start} takes {num_bytes:,} bytes, "
                f"and the file ends at byte {self.size:,}: download it again"
            )
        self.at = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.need(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.need(8, what))[0]
        return value

    def string(self, what: str) -> str:
        num_bytes = self.u64(what)
        start = self.need(num_bytes, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError as error:
            self.fail(f"corrupt: {what} at byte {start} is not UTF-8 ({error.reason})")

    def strings(self, count: int, what: str) -> list[str]:
        # Arrays have 100,000s of entries, so this loop does without `need` and its names; a length
        # that leads past the end is seen by the unpack or by the last comparison.
        data, at, unpack = self.data, self.at, _U64.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                found.append(data[start:at].decode())
        except (struct.error, UnicodeDecodeError, OverflowError, IndexError):
            at = self.size + 1
        if at > self.size:
            self.fail(
                f"truncated or corrupt: {what} should hold {count:,} strings, and reading breaks "
                f"at number {len(found):,}: download it again"
            )
        self.at = at
        return found

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind in _NUMBERS:
            return self.numbers(kind, 1, what)[0]
        if kind != _ARRAY:
            self.fail(f"corrupt: {what} has the unknown value type {kind}")
        element, count = self.u32(what), self.u64(what)
        if element == _STRING:
            return self.strings(count, what)
        if element in _NUMBERS:
            return self.numbers(element, count, what)
        if element != _ARRAY or depth == _MAX_ARRAY_DEPTH:
            self.fail(f"corrupt: {what} is an array of the unknown type {element}")
        return [self.value(_ARRAY, what, depth + 1) for _ in range(count)]

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = _NUMBERS[kind]
        start = self.need(count * dtype.itemsize, what)
        values: list[Any] = np.frombuffer(self.data, dtype, count, start).tolist()
        return values

    def prelude(self) -> tuple[int, int, int]:
        magic = self.data[:4]
        if magic != b"GGUF":
            self.fail(f"it starts with {magic!r}, expected b'GGUF'")
        self.at = 4
        version = self.u32("the version")
        if version & 0xFFFF == 0:
            self.fail(
                f"it is big-endian (version {int.from_bytes(version.to_bytes(4, 'little'))}): "
                "umbel reads little-endian files; convert it with gguf-convert-endian"
            )
        if version not in (2, 3):
            self.fail(f"it has version {version}; umbel reads 2 and 3: convert the model again")
        return version, self.u64("the number of tensors"), self.u64("the number of metadata values")

    def metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for i in range(count):
            key = self.string(f"the name of metadata value {i}")
            what = f"metadata value {key!r}"
            if key in metadata:
                self.fail(f"corrupt: {what} is there twice")
            metadata[key] = self.value(self.u32(what), what)
        return metadata

    def tensors(self, count: int, alignment: Any) -> dict[str, GGUFTensorInfo]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"corrupt: general.alignment is {alignment!r}, expected a power of two")
        relative: list[GGUFTensorInfo] = []
        for i in range(count):
            relative.append(self.tensor_info(i, alignment))
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for info in relative:
            if info.name in tensors:
                self.fail(f"corrupt: tensor {info.name!r} is there twice")
            start = base + info.offset
            if start + info.num_bytes > self.size:
                self.fail(
                    f"truncated: tensor {info.name!r} should lie at bytes {start:,} to "
                    f"{start + info.num_bytes:,}, and the file ends at {self.size:,}: "
                    "download it again"
                )
            tensors[info.name] = GGUFTensorInfo(
                info.name, info.shape, info.ggml_type, start, info.num_bytes
            )
        return tensors

    def tensor_info(self, i: int, alignment: int) -> GGUFTensorInfo:
        name = self.string(f"the name of tensor {i}")
        what = f"the entry of tensor {name!r}"
        num_dims = self.u32(what)
        if num_dims > _MAX_DIMS:
            self.fail(f"corrupt: tensor {name!r} has {num_dims} dimensions, at most {_MAX_DIMS}")
        shape = tuple(self.u64(what) for _ in range(num_dims))
        ggml_type, offset = self.u32(what), self.u64(what)
        if ggml_type not in GGML_BLOCKS:
            self.fail(f"tensor {name!r} has the unknown ggml type {ggml_type}")
        type_name, block, block_bytes = GGML_BLOCKS[ggml_type]
        if shape and shape[0] % block:
            self.fail(
                f"corrupt: tensor {name!r} of shape {shape} has rows of {shape[0]} elements, and "
                f"{type_name} comes in blocks of {block}"
            )
        if offset % alignment:
            self.fail(f"corrupt: tensor {name!r} lies at {offset}, not a multiple of {alignment}")
        return GGUFTensorInfo(
            name, shape, ggml_type, offset, math.prod(shape) // block * block_bytes
        )
