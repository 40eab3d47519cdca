"""The least prefill that any cache could reach: distinct token prefixes, counted online."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1


class PrefixBound:
    """Counts trie nodes over all rows by a 64-bit hash of each prefix.

    A prompt position is necessary work unless its prefix was computed before, by another prompt
    or by decoding. Two prefixes collide with probability about n^2 / 2^65.
    """

    def __init__(self) -> None:
        self.least_prefill = 0
        self.prompt_tokens = 0
        self._seen: set[int] = set()  # with a prefix, all of its own

    def add_prompt(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Count a row that is about to be run."""
        self.least_prefill += self._add(namespace, token_ids)
        self.prompt_tokens += len(token_ids)

    def add_computed(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Note a row whose KV was computed by decoding (its prompt was counted before)."""
        self._add(namespace, token_ids)

    def _add(self, namespace: str, token_ids: Sequence[int]) -> int:
        """Take in a row's prefixes; return how many are new, which are the longest ones."""
        hashes = _prefix_hashes(namespace, token_ids)
        num_known = bisect_left(hashes, True, key=lambda value: value not in self._seen)
        self._seen.update(hashes[num_known:])
        return len(hashes) - num_known


def _prefix_hashes(namespace: str, token_ids: Sequence[int]) -> list[int]:
    """Return a sum over each prefix of a random number for (token, position), modulo 2^64.

    The numbers are splitmix64's (Steele, Lea and Flood, OOPSLA 2014).
    """
    x = np.asarray(token_ids, np.uint64) << np.uint64(32)
    x += np.arange(len(token_ids), dtype=np.uint64)
    x += np.uint64(hash(namespace) & _MASK)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    sums: list[int] = np.cumsum(x, dtype=np.uint64).tolist()
    return sums
