"""The work list of an extend pass: tiles of new tokens, and the slots that each reads.

A tile that reads more than its share of the pass is split over several items, so that a few new
tokens behind a long prefix still fill the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..paged_attention import AttentionLayout
from .work_buffer import place_partials

IntArray = npt.NDArray[np.int64]

# int32s per item: where the sequence's slots lie, the range it reads, the first token, their
# number, how many slots the first token sees, where the places of its partials are listed or -1,
# and of the mask: where the first token's row would begin, the length of a row (0: causal), the
# first column that it rules
ITEM = 12
_MIN_BLOCKS = 4  # a split reads at least these


@dataclass(frozen=True, slots=True)
class ExtendWork:
    """An extend pass, laid out for the device."""

    arrays: dict[str, npt.NDArray[np.integer]]  # what ExtendAttention's buffer holds
    has_mask: bool
    num_items: int
    num_merges: int


def extend_work(
    layout: AttentionLayout, members: IntArray, *, tile_tokens: int, block: int, lanes: int
) -> ExtendWork:
    """Lay out a pass for the sequences `members` of `layout`; `lanes` items per head fill a device.

    A tile takes `tile_tokens` tokens of one sequence.
    """
    q_start = layout.query_indptr[members]
    q_len = layout.query_indptr[members + 1] - q_start
    kv_start = layout.kv_indptr[members]
    kv_len = layout.kv_indptr[members + 1] - kv_start
    base = np.cumsum(kv_len) - kv_len
    slots = np.concatenate(
        [
            layout.kv_indices[a : a + n]
            for a, n in zip(kv_start.tolist(), kv_len.tolist(), strict=True)
        ]
    )
    mask, mask_base, mask_stride, mask_from = _pack_masks(layout, members)

    num_tiles = -(-q_len // tile_tokens)
    seq = np.repeat(np.arange(len(members)), num_tiles)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * (
        tile_tokens
    )
    num_tokens = np.minimum(q_len[seq] - first, tile_tokens)
    sees = (kv_len - q_len)[seq] + first + 1  # slots that the tile's first token sees
    reads = np.where(mask_stride[seq] > 0, kv_len[seq], sees + num_tokens - 1)

    blocks = -(-reads // block)
    share = max(_MIN_BLOCKS, -(-int(blocks.sum()) // lanes))
    parts = -(-blocks // share) if len(seq) < lanes else np.ones_like(blocks)
    tile = np.repeat(np.arange(len(seq)), parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = part * blocks[tile] // parts[tile] * block
    end = np.minimum((part + 1) * blocks[tile] // parts[tile] * block, reads[tile])

    tile_seq = seq[tile]
    token = q_start[tile_seq] + first[tile]
    is_split = parts[tile] > 1
    num_places = np.where(is_split, num_tokens[tile], 0)
    first_place = np.cumsum(num_places) - num_places
    # entries by packed token: those of the members, one after the other
    packed = (np.cumsum(q_len) - q_len)[tile_seq] + first[tile]
    places, starts, stops = place_partials(
        packed[is_split], num_tokens[tile][is_split], int(q_len.sum())
    )
    tokens = np.repeat(q_start - (np.cumsum(q_len) - q_len), q_len) + np.arange(int(q_len.sum()))
    split = np.flatnonzero(stops > starts)

    items = np.zeros((len(tile), ITEM), np.int64)
    items[:, 0] = base[tile_seq]
    items[:, 1] = begin
    items[:, 2] = end
    items[:, 3] = token
    items[:, 4] = num_tokens[tile]
    items[:, 5] = sees[tile]
    items[:, 6] = np.where(is_split, first_place, -1)
    items[:, 7] = mask_base[tile_seq] + first[tile] * mask_stride[tile_seq]
    items[:, 8] = mask_stride[tile_seq]
    items[:, 9] = mask_from[tile_seq]
    # the longest first: what is left at the end is short
    items = items[np.argsort(begin - end, kind="stable")]
    return ExtendWork(
        {
            "merge": np.stack([tokens[split], starts[split], stops[split]], 1).reshape(-1),
            "places": places,
            "items": items.reshape(-1),
            "mask": mask,
            "slots": slots,
        },
        has_mask=bool(mask_stride.any()),
        num_items=len(items),
        num_merges=len(split),
    )


def _pack_masks(
    layout: AttentionLayout, members: IntArray
) -> tuple[npt.NDArray[np.int32], IntArray, IntArray, IntArray]:
    """Return the masks' bytes four to a word, and each member's base, stride and first column.

    Columns that all rows see need no mask; a prefix is most of what a tree reads.
    """
    base = np.zeros(len(members), np.int64)
    stride = np.zeros(len(members), np.int64)
    begin = np.zeros(len(members), np.int64)
    pieces: list[npt.NDArray[np.uint8]] = []
    size = 0
    for i, seq in enumerate(members.tolist()):
        if seq not in layout.masks:
            continue
        mask = layout.masks[seq]
        seen_by_all = mask.all(0)
        from_column = mask.shape[1] if seen_by_all.all() else int(seen_by_all.argmin())
        ruled = mask[:, from_column:]
        stride[i] = max(1, ruled.shape[1])
        begin[i] = from_column
        base[i] = size - from_column
        pieces.append(ruled.astype(np.uint8).reshape(-1))
        size += ruled.size
    pieces.append(np.zeros(-size % 4, np.uint8))
    return np.concatenate(pieces).view(np.int32), base, stride, begin
