from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from umbel.runtime.models.gguf_file import GGML_BLOCKS
from umbel.runtime.models.gguf_quants import BLOCK_FORMATS, dequantize

# where a block keeps its float16 scales; random bytes there would be NaN or infinite at times
_SCALES_AT = {
    "F16": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(
    type_name: str, num_blocks: int
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    block_bytes = BLOCK_FORMATS[type_name][0]
    rng = np.random.default_rng(block_bytes)
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), np.uint8)
    for at in _SCALES_AT.get(type_name, []):
        blocks[:, at : at + 2] = rng.normal(size=(num_blocks, 1)).astype(np.float16).view(np.uint8)
    if type_name in ("F32", "BF16"):  # the exponent's top bits of a finite number
        blocks[:, -1] &= 0xBF
    return blocks


# 10,000 blocks are more than one chunk of most formats
@pytest.mark.parametrize("num_blocks", [1, 33, 10_000])
@pytest.mark.parametrize("type_name", BLOCK_FORMATS)
def test_every_format_gives_the_bits_that_the_gguf_package_gives(
    type_name: str, num_blocks: int
) -> None:
    blocks = random_blocks(type_name, num_blocks)
    kind = gguf.GGMLQuantizationType[type_name]
    expected = gguf.quants.dequantize(blocks, kind)
    found = torch.full((num_blocks * BLOCK_FORMATS[type_name][1],), torch.nan)
    dequantize(type_name, torch.from_numpy(blocks.reshape(-1)), found)
    assert np.array_equal(found.numpy(), expected.reshape(-1).astype(np.float32))


def test_block_sizes_are_those_of_the_reader() -> None:
    sizes = {name: (size, values) for name, values, size in GGML_BLOCKS.values()}
    for name, (block_bytes, values, _) in BLOCK_FORMATS.items():
        assert sizes[name] == (block_bytes, values)
