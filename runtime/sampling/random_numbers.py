"""Counter-based random numbers: a pure function of a seed and an index, in any order or batch.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox4x32(counter: Sequence[UInt64Array], key: Sequence[UInt64Array]) -> list[UInt64Array]:
    """Return the four words for a counter of four words and a key of two.

    Every word is a 32-bit value held in a uint64 array; the arrays broadcast.
    """
    mask, shift = np.uint64(_MASK), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        left, right = c0 * np.uint64(_MULTIPLIER[0]), c2 * np.uint64(_MULTIPLIER[1])
        c0, c1, c2, c3 = (
            (right >> shift) ^ c1 ^ k0,
            right & mask,
            (left >> shift) ^ c3 ^ k1,
            left & mask,
        )
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & mask, (k1 + np.uint64(_WEYL[1])) & mask
    return [c0, c1, c2, c3]


def uniform(
    seeds: Sequence[int] | UInt64Array, counters: Sequence[int] | UInt64Array
) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, counter), both below 2**64.

    It is w * 2**-32, exactly, where w is the first word of Philox4x32-10 with the key
    (seed mod 2**32, seed div 2**32) and the counter (counter mod 2**32, counter div 2**32, 0, 0).
    Triton's `tl.philox(seed, counter, 0, 0, 0)` gives the same w for counters below 2**32.
    """
    seed = np.asarray(seeds, np.uint64)
    index = np.asarray(counters, np.uint64)
    mask, shift = np.uint64(_MASK), np.uint64(32)
    zero = np.zeros_like(index)
    words = philox4x32([index & mask, index >> shift, zero, zero], [seed & mask, seed >> shift])
    return words[0].astype(np.float64) * 2.0**-32
