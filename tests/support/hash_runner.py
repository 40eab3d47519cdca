"""A model runner whose logits are a hash of the token prefix, read back through the KV slots.

Its "KV pool" holds, for each slot, the token, the position, and a hash of the prefix that the row
saw when it was computed. A wrong slot, a stale slot or a wrong position is therefore a wrong token
or a loud `WrongSlotError`, and two runs that should agree agree bit for bit. Knows no scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from umbel.runtime.model_runner.inputs import StepInputs

UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]

_EMPTY = -1  # token and position of a slot that was never written


class WrongSlotError(AssertionError):
    """A row would have read or written the wrong KV."""


class HashLogits:
    """The logits of one pass; those of poisoned rows are NaN."""

    def __init__(
        self, runner: HashRunner, prefixes: UInt64Array, poisoned: npt.NDArray[np.bool_]
    ) -> None:
        self._runner = runner
        self._prefixes = prefixes
        self._poisoned = poisoned

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return float32 logits [end - start, vocab_size]."""
        logits = self._runner.made(self._prefixes[start:end])
        logits[self._poisoned[start:end]] = np.nan
        return torch.from_numpy(logits)

    def all(self) -> torch.Tensor:
        """Return float32 logits [num_logits, vocab_size]."""
        return self.rows(0, len(self._prefixes))


class HashRunner:
    """Fulfils the model runner's protocol with `logits_of(prefix)` as the model.

    `eos_boost` is added to the logit of `eos_id`, so that generations end now and then. `poison`
    is asked with the prefix of each wanted logits row: True makes the row NaN, and what it raises
    leaves `forward`. Logits are spread evenly over [-spread / 2, spread / 2).
    """

    def __init__(
        self,
        num_slots: int = 4096,
        vocab_size: int = 64,
        *,
        seed: int = 0,
        spread: float = 8.0,
        eos_id: int | None = None,
        eos_boost: float = 0.0,
        poison: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.num_passes = 0
        self.num_tokens = 0  # rows computed over the runner's life
        self.num_logits = 0  # rows whose logits were made over the runner's life
        self.most_logits = 0  # rows of the largest tensor of logits that was made
        self.poison = poison
        self._seed = int(_mix(np.asarray([seed], np.uint64))[0])
        self._spread = spread
        self._eos_id = eos_id
        self._eos_boost = eos_boost
        self._vocab_salt = _mix(np.arange(1, vocab_size + 1, dtype=np.uint64))
        self._token = np.full(num_slots, _EMPTY, np.int64)
        self._position = np.full(num_slots, _EMPTY, np.int64)
        self._term = np.zeros(num_slots, np.uint64)  # the row's part of its prefix's hash
        self._prefix = np.zeros(num_slots, np.uint64)  # hash of all a row saw, itself included
        self._kv_indices = np.zeros(0, np.int64)  # of the pass that runs

    def forward(self, inputs: StepInputs) -> HashLogits:
        """Write the pass's rows, check all they read, and return the wanted rows' logits."""
        inputs = dataclasses.replace(inputs, token_ids=inputs.known_token_ids())
        self._kv_indices = inputs.kv_indices
        self._check_shapes(inputs)
        slots = inputs.slot_mapping
        self._token[slots] = inputs.token_ids
        self._position[slots] = inputs.positions
        self._term[slots] = self._terms(inputs.token_ids, inputs.positions)
        self._prefix[slots] = self._prefix_hashes(inputs)
        self._check_reads(inputs)
        self.num_passes += 1
        self.num_tokens += len(inputs.token_ids)
        prefixes = self._prefix[slots[inputs.logits_rows]]
        poisoned = np.zeros(len(prefixes), np.bool_)
        if self.poison is not None:
            for i, row in enumerate(inputs.logits_rows.tolist()):
                poisoned[i] = self.poison(self._path(inputs, row))
        return HashLogits(self, prefixes, poisoned)

    def made(self, prefixes: UInt64Array) -> Float32Array:
        """Return the logits [num_prefixes, vocab_size] after prefixes with these hashes."""
        self.num_logits += len(prefixes)
        self.most_logits = max(self.most_logits, len(prefixes))
        return self._logits(prefixes)

    def logits_of(self, token_ids: Sequence[int]) -> Float32Array:
        """Return the logits after a prefix, as `forward` does but without any KV."""
        ids = np.asarray(token_ids, np.int64)
        hashes = np.cumsum(self._terms(ids, np.arange(len(ids))), dtype=np.uint64)
        logits: Float32Array = self._logits(hashes[-1:])[0]
        return logits

    def _terms(
        self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> UInt64Array:
        # a prefix's hash is the sum of its terms: prefixes of a whole row are one cumsum
        salted = _mix(positions.astype(np.uint64) + np.uint64(self._seed))
        return _mix(salted + tokens.astype(np.uint64))

    def _logits(self, prefixes: UInt64Array) -> Float32Array:
        words = _mix(_mix(prefixes)[:, None] + self._vocab_salt[None, :])
        unit = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        logits = (unit - np.float32(0.5)) * np.float32(self._spread)
        if self._eos_id is not None:
            logits[:, self._eos_id] += np.float32(self._eos_boost)
        return logits

    def _check_shapes(self, inputs: StepInputs) -> None:
        num_tokens = len(inputs.token_ids)
        _need(len(inputs.positions) == num_tokens, "positions and token_ids differ in length")
        _need(len(inputs.slot_mapping) == num_tokens, "slot_mapping and token_ids differ in length")
        _need(len(inputs.query_indptr) == len(inputs.kv_indptr), "indptrs differ in length")
        _need(inputs.query_indptr[0] == 0, "query_indptr does not start at 0")
        _need(inputs.query_indptr[-1] == num_tokens, "query_indptr does not end at num_tokens")
        _need(inputs.kv_indptr[0] == 0, "kv_indptr does not start at 0")
        _need(inputs.kv_indptr[-1] == len(self._kv_indices), "kv_indptr does not end at its array")
        _need(bool(np.all(np.diff(inputs.query_indptr) > 0)), "a sequence has no rows")
        _need(_within(inputs.token_ids, self.vocab_size), "a token id is outside the vocabulary")
        _need(_within(inputs.slot_mapping, self.num_slots), "a written slot is outside the pool")
        _need(_within(self._kv_indices, self.num_slots), "a read slot is outside the pool")
        _need(_within(inputs.logits_rows, num_tokens), "a logits row is outside the pass")
        written = np.unique(inputs.slot_mapping)
        _need(len(written) == num_tokens, "two rows of one pass write the same slot")
        for i, (query, kv) in enumerate(_sequences(inputs)):
            num_rows = query.stop - query.start
            _need(kv.stop - kv.start >= num_rows, f"sequence {i} has fewer KV slots than rows")
            own = self._kv_indices[kv.stop - num_rows : kv.stop]
            _need(
                bool(np.array_equal(own, inputs.slot_mapping[query])),
                f"sequence {i}: the new rows' slots are not the last of its kv_indices",
            )
            mask = inputs.tree_masks.get(i)
            if mask is not None:
                shape = (num_rows, kv.stop - kv.start)
                _need(mask.shape == shape, f"sequence {i}: tree mask {mask.shape}, not {shape}")

    def _prefix_hashes(self, inputs: StepInputs) -> UInt64Array:
        hashes = np.empty(len(inputs.token_ids), np.uint64)
        for i, (query, kv) in enumerate(_sequences(inputs)):
            terms = self._term[self._kv_indices[kv]]
            mask = inputs.tree_masks.get(i)
            if mask is None:
                num_rows = query.stop - query.start
                hashes[query] = np.cumsum(terms, dtype=np.uint64)[-num_rows:]
            else:
                hashes[query] = np.where(mask, terms, np.uint64(0)).sum(1, dtype=np.uint64)
        return hashes

    def _check_reads(self, inputs: StepInputs) -> None:
        for i, (query, kv) in enumerate(_sequences(inputs)):
            slots = self._kv_indices[kv]
            position, prefix = self._position[slots], self._prefix[slots]
            terms = self._term[slots]
            mask = inputs.tree_masks.get(i)
            if mask is None:  # the last row sees all that the others see
                depth = np.arange(len(slots))
                seen = np.ones(len(slots), np.bool_)
                hashes = np.cumsum(terms, dtype=np.uint64)
            else:
                num_rows = query.stop - query.start
                own = mask[np.arange(num_rows), np.arange(len(slots) - num_rows, len(slots))]
                _need(bool(own.all()), f"sequence {i}: a row does not see itself")
                later = np.triu(mask[:, len(slots) - num_rows :], 1)
                _need(not later.any(), f"sequence {i}: a row sees a later row")
                depth = np.cumsum(mask, axis=1) - 1
                seen = mask
                hashes = np.cumsum(np.where(mask, terms, np.uint64(0)), axis=1, dtype=np.uint64)
            self._fail_at(i, slots, seen & (position != depth), "is at position", position)
            self._fail_at(
                i, slots, seen & (prefix != hashes), "was computed after another prefix", prefix
            )

    def _fail_at(
        self,
        sequence: int,
        slots: npt.NDArray[np.int64],
        bad: npt.NDArray[np.bool_],
        what: str,
        found: npt.NDArray[np.int64] | UInt64Array,
    ) -> None:
        if bad.any():
            at = int(np.argwhere(bad)[0][-1])
            token = int(self._token[slots[at]])
            state = "was never written" if token == _EMPTY else f"{what} {int(found[at])}"
            raise WrongSlotError(
                f"sequence {sequence}, row {at}: slot {int(slots[at])} (token {token}) {state}"
            )

    def _path(self, inputs: StepInputs, row: int) -> list[int]:
        i = int(np.searchsorted(inputs.query_indptr, row, side="right")) - 1
        start, end = int(inputs.kv_indptr[i]), int(inputs.kv_indptr[i + 1])
        slots = self._kv_indices[start:end]
        mask = inputs.tree_masks.get(i)
        if mask is None:
            behind = int(inputs.query_indptr[i + 1]) - row - 1
            seen = slots[: len(slots) - behind]
        else:
            seen = slots[mask[row - int(inputs.query_indptr[i])]]
        path: list[int] = self._token[seen].tolist()
        return path


def _mix(x: UInt64Array) -> UInt64Array:
    # splitmix64's finaliser (Steele, Lea and Flood 2014); array arithmetic wraps silently
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _sequences(inputs: StepInputs) -> list[tuple[slice, slice]]:
    query, kv = inputs.query_indptr.tolist(), inputs.kv_indptr.tolist()
    return [(slice(query[i], query[i + 1]), slice(kv[i], kv[i + 1])) for i in range(len(query) - 1)]


def _within(values: npt.NDArray[np.int64], bound: int) -> bool:
    return len(values) == 0 or (int(values.min()) >= 0 and int(values.max()) < bound)


def _need(ok: bool | np.bool_, message: str) -> None:
    if not ok:
        raise WrongSlotError(message)
