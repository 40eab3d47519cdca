"""Dequantises ggml's block formats to float32, whole tensors at a time; knows no file.

The formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 20  # of blocks at a time, so that the steps of a format stay in the cache


def dequantize(type_name: str, raw: Tensor, out: Tensor) -> None:
    """Write the values of `raw` (uint8, whole blocks) to `out` (float32, contiguous, as many).

    `type_name` is a key of `BLOCK_FORMATS`.
    """
    block_bytes, values, unpack = BLOCK_FORMATS[type_name]
    blocks = raw.view(-1, block_bytes)
    rows = out.view(-1, values)
    step = max(1, _CHUNK_BYTES // block_bytes)
    for start in range(0, blocks.shape[0], step):
        unpack(blocks[start : start + step], rows[start : start + step])


def _half(blocks: Tensor, at: int) -> Tensor:
    # the float16 at byte `at` of every block, [num_blocks, 1]
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    # the low halves of n bytes, then the high halves: [..., n] -> [..., 2, n]
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    # 32 bits, one per value, worth 16 each: [num_blocks, 32]
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[:, at : at + 4, None] >> shifts & 1) << 4).flatten(1)


def _f32(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float32))


def _f16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.float16))


def _bf16(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks.contiguous().view(torch.bfloat16))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], torch.unflatten(out, 1, (2, 16)))
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], torch.unflatten(out, 1, (2, 16)))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], torch.unflatten(out, 1, (2, 16)))
    out.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], torch.unflatten(out, 1, (2, 16)))
    out.add_(_fifth_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    # 12 bytes hold eight 6-bit scales and eight 6-bit minima: [num_blocks, 12] -> 2 x [.., 8]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), 1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), 1)
    return scales, minima


def _scaled_k(blocks: Tensor, out: Tensor) -> None:
    # d * scale * q - dmin * minimum, for eight groups of 32
    scales, minima = _k_scales(blocks[:, 4:16])
    groups = torch.unflatten(out, 1, (8, 32))
    groups.mul_((_half(blocks, 0) * scales)[:, :, None])
    groups.sub_((_half(blocks, 2) * minima)[:, :, None])


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(torch.unflatten(blocks[:, 16:], 1, (4, 32)), torch.unflatten(out, 1, (4, 2, 32)))
    _scaled_k(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(torch.unflatten(blocks[:, 48:], 1, (4, 32)), torch.unflatten(out, 1, (4, 2, 32)))
    # bit g of byte i belongs to value i of group g
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    out.add_(((blocks[:, 16:48][:, None] >> shifts & 1) << 4).flatten(1))
    _scaled_k(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    # two halves of 128 values: 64 bytes of low nibbles and 32 bytes of upper pairs of bits each
    halves = torch.unflatten(out, 1, (2, 2, 64))
    _nibbles(torch.unflatten(blocks[:, :128], 1, (2, 64)), halves)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = (torch.unflatten(blocks[:, 128:192], 1, (2, 32))[:, :, None] >> shifts & 3) << 4
    out.add_(upper.flatten(1)).sub_(32)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)  # [num_blocks, 16]
    torch.unflatten(out, 1, (16, 16)).mul_(scales[:, :, None])


#: type -> bytes of a block, values of a block, what writes blocks [n, bytes] to [n, values]
BLOCK_FORMATS: dict[str, tuple[int, int, Callable[[Tensor, Tensor], None]]] = {
    "F32": (4, 1, _f32),
    "F16": (2, 1, _f16),
    "BF16": (2, 1, _bf16),
    "Q4_0": (18, 32, _q4_0),
    "Q4_1": (20, 32, _q4_1),
    "Q5_0": (22, 32, _q5_0),
    "Q5_1": (24, 32, _q5_1),
    "Q8_0": (34, 32, _q8_0),
    "Q4_K": (144, 256, _q4_k),
    "Q5_K": (176, 256, _q5_k),
    "Q6_K": (210, 256, _q6_k),
}
