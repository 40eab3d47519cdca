"""The least prefill that any cache could reach: distinct token prefixes, counted online."""

from __future__ import annotations

from collections.abc import Sequence

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


class PrefixBound:
    """Counts trie nodes over all rows by a rolling 64-bit hash of each prefix.

    A prompt position is necessary work unless its prefix was computed before, by another prompt
    or by decoding. Two prefixes collide with probability about n^2 / 2^65.
    """

    def __init__(self) -> None:
        self.least_prefill = 0
        self.prompt_tokens = 0
        self._seen: set[int] = set()

    def add_prompt(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Count a row that is about to be run."""
        before = len(self._seen)
        self._seen.update(self._hashes(namespace, token_ids))
        self.least_prefill += len(self._seen) - before
        self.prompt_tokens += len(token_ids)

    def add_computed(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Note a row whose KV was computed by decoding (its prompt was counted before)."""
        self._seen.update(self._hashes(namespace, token_ids))

    def _hashes(self, namespace: str, token_ids: Sequence[int]) -> list[int]:
        value = hash(namespace) & _MASK
        hashes = []
        for token_id in token_ids:
            value = ((value ^ (token_id + 1)) * _MULTIPLIER) & _MASK
            value ^= value >> 29
            hashes.append(value)
        return hashes
