"""Picks tokens on the device that holds the logits, and lets the host ask for them later.

The rules are the host sampler's; what a row gets depends on that row alone. Sampled ids also stay
on the device, where the next pass reads them. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from umbel.kernels import (
    ArraySender,
    RowMasks,
    SamplingOps,
    SamplingTensors,
    Staging,
    new_event,
)
from umbel.lang.errors import EngineError

from ..grammar.device_arena import DeviceArena
from .sampler import SampledTokens, Sampler, SamplingRow, token_logprobs

IntArray = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

T = TypeVar("T")

_SECTIONS = 3  # of int64 per row: seed, temperature and top-p, min-p and top-k


class PendingTokens(Protocol):
    """Samples that may still be on their way."""

    @property
    def is_ready(self) -> bool:
        """Whether nobody would have to wait for them."""
        ...

    def wait(self) -> SampledTokens:
        """Return them, once they are there."""
        ...


class PendingLogprobs(Protocol):
    """Log-probabilities that may still be on their way."""

    @property
    def is_ready(self) -> bool:
        """Whether nobody would have to wait for them."""
        ...

    def wait(self) -> Float64Array:
        """Return them, [num_tokens], once they are there; NaN where a row is no distribution."""
        ...


class TokenSampler(Protocol):
    """What the engine asks of a sampler. `samples` [max_rows] holds the ids of the last call.

    `arena` holds the automata whose states rows may name; None: they name none.
    """

    samples: Tensor
    arena: DeviceArena | None

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        bitmask: Tensor,
        at: Sequence[int] | None = None,
    ) -> PendingTokens:
        """Queue the picking of a token for each of `rows`.

        `logits` [num_logits, vocab_size] has one row for each, or that of rows[i] at at[i]. Logits
        and masks are the sampler's from here on, unless it raises: then the same rows may be given
        again. Row i of `bitmask` [>= num_rows, words] is that of rows[i]; it says something only
        where `rows[i].bitmask` is set.
        """
        ...

    def logprobs(self, logits: Tensor, token_ids: IntArray, at: IntArray) -> PendingLogprobs:
        """Queue the log-probabilities of token_ids[i] in row at[i] of `logits`."""
        ...


@dataclass(frozen=True, slots=True)
class Ready(Generic[T]):
    """What nobody has to wait for."""

    value: T

    @property
    def is_ready(self) -> bool:
        """Always."""
        return True

    def wait(self) -> T:
        """Return it."""
        return self.value


class HostSampler:
    """The host's sampler behind the interface of one that runs beside the host."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self.samples = torch.zeros(max_rows, dtype=torch.int64)
        self.arena: DeviceArena | None = None
        self._sampler = Sampler(vocab_size)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        bitmask: Tensor,
        at: Sequence[int] | None = None,
    ) -> PendingTokens:
        """Pick at once."""
        tokens = self._sampler.sample(logits if at is None else logits[list(at)], rows)
        self.samples[: len(rows)] = torch.tensor(tokens.token_ids).clamp(min=0)
        return Ready(tokens)

    def logprobs(self, logits: Tensor, token_ids: IntArray, at: IntArray) -> PendingLogprobs:
        """Look them up at once."""
        return Ready(token_logprobs(logits, token_ids.tolist(), at.tolist()))


class DeviceSampler:
    """Samples with the kernels of one device, in up to `max_rows` rows at a time."""

    def __init__(
        self,
        ops: SamplingOps,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        arena: DeviceArena | None = None,
    ) -> None:
        self._ops, self.arena = ops, arena
        self._vocab_size, self._max_rows, self._device = vocab_size, max_rows, device
        self.samples = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # at fixed places, so that every call's pointers are aligned alike: kernels are compiled
        # for the alignment of their arguments
        packed = torch.zeros(_SECTIONS * max_rows, dtype=torch.int64, device=device)
        self._staging = Staging(packed)
        self._counters = Staging(torch.zeros(max_rows, dtype=torch.int64, device=device))
        seeds, second, third = packed.view(_SECTIONS, max_rows)
        temperature, top_p = second.view(torch.float32).view(2, max_rows)
        self._all_rows = SamplingTensors(
            temperature=temperature,
            top_k=third.view(torch.int32)[max_rows:],
            top_p=top_p,
            min_p=third.view(torch.float32)[:max_rows],
            seeds=seeds,
            counters=self._counters.target,
        )
        self._batch = _RowBatch.of([])  # of the last call
        self._sent: tuple[_RowBatch, SamplingTensors] | None = None  # what is on the device
        self._wanted = ArraySender(torch.int64, device)
        self._places = ArraySender(torch.int64, device)
        self._values = ArraySender(torch.float32, device)
        self._sources = Staging(torch.zeros(max_rows, dtype=torch.int32, device=device))
        # of the rows of the last call, and room for those of the next
        self._states = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._next_states = torch.zeros_like(self._states)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Sequence[SamplingRow],
        bitmask: Tensor,
        at: Sequence[int] | None = None,
    ) -> PendingTokens:
        """Queue the picking; see TokenSampler and Sampler.sample for the rules."""
        n = len(rows)
        if at is not None:
            logits = logits.index_select(0, self._places.send(np.asarray(at, np.int64)))
        assert logits.shape == (n, self._vocab_size), "one row of logits per sampling row"
        if rows != self._batch.rows:  # by identity; most calls bring the rows of the last one
            self._batch = _RowBatch.of(rows)
        batch = self._batch
        # of the model's own distribution, which is masked in place below
        raw = self._raw_rows(logits, batch.wanted) if batch.wanted else None
        logprobs = None
        try:
            picked = self._picked(self._adjusted(logits, batch), batch, bitmask)
            torch.clamp(picked, min=0, out=self.samples[:n])
            if raw is not None:
                ids = self.samples[:n].index_select(0, raw.places)
                logprobs = self._logprobs(raw.logits, ids, max(batch.num_top))
            return _Pending(_ToHost.of(picked), batch.num_top, batch.wanted, logprobs)
        except BaseException:
            if raw is not None:
                logits.index_copy_(0, raw.places, raw.logits)
            raise

    def _picked(self, logits: Tensor, batch: _RowBatch, bitmask: Tensor) -> Tensor:
        """Mask adjusted logits in place and pick the ids, [num_rows]; -1 where none can be."""
        rows = batch.rows
        free = [i for i, row in enumerate(rows) if row.bitmask is None]
        if len(free) < len(rows):
            bitmask.numpy()[free] = -1
            sent = bitmask[: len(rows)].to(self._device, non_blocking=True)
            self._ops.apply_token_bitmask_(logits, sent)
        automata = self._automata(rows)
        if batch.is_greedy:
            return self._ops.greedy(logits, automata)
        return self._ops.sample(logits, self._tensors(batch), automata)

    def _raw_rows(self, logits: Tensor, rows: Sequence[int]) -> _RawRows:
        places = self._wanted.send(np.asarray(rows, np.int64))
        return _RawRows(places, logits.index_select(0, places))

    @torch.inference_mode()
    def logprobs(self, logits: Tensor, token_ids: IntArray, at: IntArray) -> PendingLogprobs:
        """Queue the log-probabilities of token_ids[i] in row at[i] of `logits`."""
        rows, ids = self._places.send(at, token_ids).view(2, -1)
        # once a row, however many tokens follow it: less to read, and no row is copied
        best = logits.argmax(-1)
        highest = logits.gather(-1, best[:, None]).squeeze(-1).float()
        behind = logits[rows, ids].float() - highest[rows]
        return _PendingLogprobs(_ToHost.of(behind + self._ops.gather_logprobs(logits, best)[rows]))

    def _automata(self, rows: Sequence[SamplingRow]) -> RowMasks | None:
        """Bring the rows' states up to the token to come; return the masks, None if all are free.

        `samples` are those of the last call, still.
        """
        arena, n = self.arena, len(rows)
        sources = [row.state for row in rows]
        if not any(sources):
            return None
        assert arena is not None, "a row names a state, and there are no automata"
        self._sources.take(n)[:] = sources
        states = self._next_states[:n]
        self._ops.dfa_step(
            self._sources.send(n),
            self._states,
            self.samples,
            arena.transitions,
            arena.tokens,
            states,
        )
        self._states, self._next_states = self._next_states, self._states
        return arena.masks(states)

    def _tensors(self, batch: _RowBatch) -> SamplingTensors:
        """Send what rows are sampled with: all of it for other rows than before, else counters."""
        rows, n = batch.rows, len(batch.rows)
        if self._sent is None or self._sent[0] is not batch:
            self._sent = batch, self._send_params(batch)
        self._counters.take(n)[:] = [row.num_sampled for row in rows]
        self._counters.send(n)
        return self._sent[1]

    def _send_params(self, batch: _RowBatch) -> SamplingTensors:
        rows, n, most = batch.rows, len(batch.rows), self._max_rows
        params = [row.params for row in rows]
        seeds, second, third = self._staging.take(_SECTIONS * most).reshape(-1, most)
        seeds.view(np.uint64)[:n] = [row.seed % 2**64 for row in rows]
        temperature, top_p = second.view(np.float32).reshape(2, most)
        temperature[:n] = [each.temperature for each in params]
        top_p[:n] = [each.top_p for each in params]
        third.view(np.float32)[:n] = [each.min_p for each in params]
        third.view(np.int32)[most : most + n] = [max(0, each.top_k) for each in params]
        self._staging.send(_SECTIONS * most)
        return self._all_rows.first(n, is_filtered=any(row.is_filtered for row in rows))

    def _adjusted(self, logits: Tensor, batch: _RowBatch) -> Tensor:
        """Apply bias, penalties and min_tokens to a copy, if there are any.

        In float32: sums would be rounded away.
        """
        parts = [
            _Adjustment.of(i, batch.rows[i], self._vocab_size)
            for i in batch.adjusted
            if batch.rows[i].changes_logits
        ]
        if not parts:
            return logits
        logits = logits.to(torch.float32, copy=True)
        at = self._places.send(
            *(np.full(len(part.ids), part.row) for part in parts), *(part.ids for part in parts)
        )
        row, column = at.view(2, -1)
        values = np.concatenate([part.values for part in parts], axis=1)
        bias, penalty, minus = self._values.send(*values).view(3, -1)
        adjusted = logits[row, column] + bias
        adjusted = torch.where(adjusted > 0, adjusted / penalty, adjusted * penalty) - minus
        logits[row, column] = adjusted
        return logits

    def _logprobs(self, raw: Tensor, ids: Tensor, most: int) -> _Logprobs:
        logprobs = self._ops.gather_logprobs(raw, ids)
        if most == 0:
            return _Logprobs(_ToHost.of(logprobs), None, None)
        normalizers = raw.gather(1, ids[:, None]).float() - logprobs[:, None]
        # stable: of equal logits the lower id comes first
        values, order = torch.sort(raw, dim=1, descending=True, stable=True)
        values = values[:, :most].float() - normalizers
        return _Logprobs(_ToHost.of(logprobs), _ToHost.of(order[:, :most]), _ToHost.of(values))


@dataclass(frozen=True, slots=True, eq=False)
class _RowBatch:
    """What rows have in common from call to call, found once for each change of the batch."""

    rows: list[SamplingRow]
    num_top: list[int]  # of each row's log-probabilities
    wanted: list[int]  # rows whose log-probabilities are asked for
    adjusted: list[int]  # rows whose logits something but a mask may change, at some time
    is_greedy: bool  # all of them

    @staticmethod
    def of(rows: Sequence[SamplingRow]) -> _RowBatch:
        return _RowBatch(
            list(rows),
            [row.params.top_logprobs for row in rows],
            [i for i, row in enumerate(rows) if row.wants_logprobs],
            [i for i, row in enumerate(rows) if row.may_change_logits],
            all(row.params.temperature == 0.0 for row in rows),
        )


class _RawRows(NamedTuple):
    """A copy of some rows of the model's logits."""

    places: Tensor  # [num_rows] among all rows
    logits: Tensor  # [num_rows, vocab_size]


@dataclass(frozen=True, slots=True)
class _Adjustment:
    """What is done to some of one row's logits: x + bias, then the repetition penalty, then minus.

    `values` is float32 [3, len(ids)]: bias, repetition penalty, and what is taken off at the end.
    """

    row: int
    ids: IntArray
    values: Float32Array

    @staticmethod
    def of(index: int, row: SamplingRow, vocab_size: int) -> _Adjustment:
        params, counts = row.params, row.output_counts
        bias = dict(params.logit_bias)
        if row.holds_end_ids:
            bias.update({token_id: -np.inf for token_id in row.end_ids if token_id < vocab_size})
        repeats = params.repetition_penalty != 1.0
        repeated = set(counts).union(row.prompt_ids.tolist()) if repeats else set()
        taken = counts if params.frequency_penalty or params.presence_penalty else {}
        ids = sorted({*bias, *repeated, *taken})
        values = np.zeros((3, len(ids)), np.float32)
        values[0] = [bias.get(token_id, 0.0) for token_id in ids]
        values[1] = [params.repetition_penalty if i in repeated else 1.0 for i in ids]
        values[2] = [
            params.frequency_penalty * taken[i] + params.presence_penalty if i in taken else 0.0
            for i in ids
        ]
        return _Adjustment(index, np.asarray(ids, np.int64), values)


class _ToHost:
    """A copy of a device tensor that is on its way to the host."""

    def __init__(self, host: Tensor, event: torch.cuda.Event | None) -> None:
        self._host, self._event = host, event

    @staticmethod
    def of(tensor: Tensor) -> _ToHost:
        if tensor.device.type != "cuda":
            return _ToHost(tensor.clone(), None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = new_event()
        event.record()
        return _ToHost(host, event)

    @property
    def is_ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


class _Logprobs(NamedTuple):
    chosen: _ToHost  # [num_wanted]
    ids: _ToHost | None  # [num_wanted, most]
    values: _ToHost | None


@dataclass(frozen=True, slots=True)
class _PendingLogprobs:
    logprobs: _ToHost

    @property
    def is_ready(self) -> bool:
        return self.logprobs.is_ready

    def wait(self) -> Float64Array:
        return self.logprobs.wait().double().numpy()


@dataclass(frozen=True, slots=True)
class _Pending:
    picked: _ToHost
    num_top: list[int]
    wanted: list[int]  # rows whose log-probabilities are asked for
    logprobs: _Logprobs | None

    @property
    def is_ready(self) -> bool:
        last = self.picked if self.logprobs is None else self.logprobs.chosen
        return last.is_ready

    def wait(self) -> SampledTokens:
        token_ids: list[int] = self.picked.wait().tolist()
        result = SampledTokens(
            token_ids,
            [None] * len(token_ids),
            [()] * len(token_ids),
            [_no_token() if token_id < 0 else None for token_id in token_ids],
        )
        if self.logprobs is not None:
            chosen = self.logprobs.chosen.wait().tolist()
            for i, row in enumerate(self.wanted):
                if token_ids[row] >= 0:
                    result.logprobs[row] = chosen[i]
            self._add_top(result)
        return result

    def _add_top(self, result: SampledTokens) -> None:
        assert self.logprobs is not None
        if self.logprobs.ids is None or self.logprobs.values is None:
            return
        ids, values = self.logprobs.ids.wait().tolist(), self.logprobs.values.wait().tolist()
        for i, row in enumerate(self.wanted):
            if result.token_ids[row] >= 0:
                pairs = zip(ids[i], values[i], strict=True)
                result.top[row] = tuple(pairs)[: self.num_top[row]]


def _no_token() -> EngineError:
    return EngineError(
        "no token can be sampled: the model's highest logit is not finite (look at the weights "
        "and at the number type for overflow), or the constraint, min_tokens and logit_bias "
        "together leave no token; loosen one of them"
    )
