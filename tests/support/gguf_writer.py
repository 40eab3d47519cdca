"""Writes GGUF files byte by byte after the specification, with nothing of the reader."""

from __future__ import annotations

import struct
from typing import Any


def head(num_tensors: int, num_values: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Return the typed form of a str, int, float, bool, or a list of one of these."""
    if isinstance(item, list):
        bodies = [value(x) for x in item]
        kind = bodies[0][:4] if bodies else struct.pack("<I", 4)
        return (
            struct.pack("<I", 9)
            + kind
            + struct.pack("<Q", len(item))
            + b"".join(body[4:] for body in bodies)
        )
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<Iq", 11, item)
    return struct.pack("<Id", 12, item)


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]],
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    raw_head = head(len(tensors), len(metadata), version)
    for key, item in metadata.items():
        raw_head += string(key) + value(item)
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        raw_head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        raw_head += struct.pack("<IQ", kind, len(data))
        data += raw
    return raw_head + b"\0" * (-len(raw_head) % alignment) + data
