"""Finds the log-probabilities of prompts: in a pass's logits, beside the KV, or by a recomputation.

A gen that wants them runs like any other: it shares the cache, and what it computes itself it
scores itself, in the passes that compute it. Rows that it found in the cache were computed by
others; their scores are kept beside their KV if anybody asked for them. Where nobody did, and for
the one row after which a prompt leaves what is cached (its KV is there, its logits are gone), the
rows are computed again by a request of their own, whose rows nobody shares. That changes nothing
for the gen, which waits for it only in order to end. Gens that miss the same rows share one
recomputation.

Knows passes, slots and requests; nothing of programs, texts or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umbel.lang.errors import EngineError, UmbelError

from .gen_task import GenTask
from .kv_cache import RadixCache
from .model_runner.runner import MAX_SCORED_ROWS, PassLogits
from .prompt_scores import PromptScores, ScoreTable
from .request import Request
from .row_pieces import RowPieces
from .sampling import score_rows
from .scheduler import Batch, ScheduledRequest, Scheduler
from .select_task import TreeScoring

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Rescoring:
    """Rows of a prompt that are computed once more, for their logits, and who waits for those."""

    request: Request
    first: int  # the first row whose logits are wanted
    waiting: list[tuple[PromptScores, int]]  # with the number of leading tokens in common

    def take_up(self, scores: PromptScores, rows: IntArray) -> IntArray:
        """Promise what of `rows` this recomputation still comes to; return the others."""
        request = self.request
        if scores.namespace != request.namespace:
            return rows
        common = _common_length(scores.token_ids, request.token_ids)
        start = max(self.first, request.num_computed)
        is_ours = (rows >= start) & (rows < common)
        if is_ours.any():
            self.waiting.append((scores, common))
            scores.awaited[rows[is_ours] + 1] = True
        return rows[~is_ours]


#: what a request of a pass is for; nothing but its KV, where it is None
Part = GenTask | TreeScoring | Rescoring | None


@dataclass(frozen=True, slots=True)
class PassScores:
    """The rows of one pass that score prompts. Entry i: row `rows[i]` scores `tokens[i]`."""

    owners: tuple[PromptScores, ...]
    owner: IntArray  # [num_scores] index into owners
    tokens: IntArray  # [num_scores] position in the owner's prompt
    rows: IntArray  # [num_scores] row of the pass, ascending

    @property
    def logits_rows(self) -> list[int]:
        """The rows of the pass whose logits are needed, ascending."""
        rows: list[int] = np.unique(self.rows).tolist()
        return rows


class PromptScorer:
    """All prompts of one engine that are to be scored. Lives on the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: RadixCache,
        num_slots: int,
        next_id: Callable[[], int],
        pieces: RowPieces,
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._num_slots = num_slots
        self._next_id = next_id
        self._pieces = pieces
        self._table: ScoreTable | None = None  # made for the first who asks
        self._row_of_slot: IntArray = np.zeros(0, np.int64)
        self._rescorings: dict[int, Rescoring] = {}  # by request id

    def begin(self, scores: PromptScores, request: Request) -> None:
        """Take what is known of a prompt that `request` will compute, and have more of it found.

        Everything that is wanted comes later by itself; what is begun here runs beside the request
        and not after it.
        """
        if self._table is None:
            self._table = ScoreTable(self._num_slots)
            self._row_of_slot = np.full(self._num_slots, -1, np.int64)
        scores.namespace = request.namespace
        num_cached = len(self._recall(scores))
        self._find(scores, request, num_cached)

    def part_of(self, request: Request) -> Rescoring | None:
        """Return the recomputation that a request of the pass belongs to, if to any."""
        return self._rescorings.get(request.request_id)

    def fail(self, request: Request, error: UmbelError) -> None:
        """Fail all that wait for a request of this scorer; nothing for any other request."""
        rescoring = self._rescorings.pop(request.request_id, None)
        if rescoring is None:
            return
        self._scheduler.abort(request)
        for scores, _ in rescoring.waiting:
            self._fail(scores, error)

    def drop_unwanted(self) -> None:
        """Stop what is computed for gens that have ended."""
        for request_id, rescoring in list(self._rescorings.items()):
            rescoring.waiting = [w for w in rescoring.waiting if w[0].is_wanted]
            if not rescoring.waiting:
                del self._rescorings[request_id]
                self._scheduler.abort(rescoring.request)

    def close(self) -> None:
        """Stop everything; the gens that wait are told by others."""
        rescorings, self._rescorings = self._rescorings, {}
        for rescoring in rescorings.values():
            self._scheduler.abort(rescoring.request)

    # --- one pass -----------------------------------------------------------------------------

    def plan(self, batch: Batch, parts: Sequence[Part]) -> PassScores | None:
        """Find the rows of a pass that score prompts; called before the pass."""
        if self._table is None:
            return None
        if not any(isinstance(part, Rescoring) or _lacks_scores(part) for part in parts):
            return None
        slots = np.concatenate([_slots(s.request, s.start, s.end) for s in batch.requests])
        self._row_of_slot[slots] = np.arange(len(slots))
        found: list[tuple[PromptScores, IntArray, IntArray]] = []  # with tokens, rows of the pass
        claimed: dict[int, npt.NDArray[np.bool_]] = {}  # samples of one gen have one prompt
        offset = 0
        for scheduled, part in zip(batch.requests, parts, strict=True):
            request, start, end = scheduled.request, scheduled.start, scheduled.end
            if isinstance(part, GenTask) and _lacks_scores(part):
                assert part.scores is not None
                scores = part.scores
                num_rows = min(end, len(scores.token_ids) - 1)
                if start < len(scores.token_ids):
                    # rows that others compute in this very pass are as good as its own
                    at = self._row_of_slot[_slots(request, 0, num_rows)]
                    missing = claimed.setdefault(id(scores), scores.missing.copy())
                    rows = np.flatnonzero((at >= 0) & missing[1 : num_rows + 1])
                    missing[rows + 1] = False
                    found.append((scores, rows + 1, at[rows]))
            elif isinstance(part, Rescoring):
                for scores, common in part.waiting:
                    last = min(end, common, len(scores.token_ids) - 1)
                    missing = claimed.setdefault(id(scores), scores.missing.copy())
                    rows = start + np.flatnonzero(missing[start + 1 : last + 1])
                    missing[rows + 1] = False
                    found.append((scores, rows + 1, rows - start + offset))
            offset += scheduled.num_tokens
        self._row_of_slot[slots] = -1
        return _joined([entry for entry in found if len(entry[1])])

    def written(self, slots: IntArray) -> None:
        """Note the slots that a pass is about to write."""
        if self._table is not None:
            self._table.forget(slots)

    def take(self, wanted: PassScores, logits: PassLogits, first: int) -> None:
        """Score prompts by the logits of a pass, `wanted.logits_rows` being those from `first` on.

        They are made and scored a few rows at a time.
        """
        needed = np.asarray(wanted.logits_rows, np.int64)
        ids = np.fromiter(
            (
                wanted.owners[owner].token_ids[token]
                for owner, token in zip(wanted.owner.tolist(), wanted.tokens.tolist(), strict=True)
            ),
            np.int64,
            len(wanted.rows),
        )
        num_top = max(scores.num_top for scores in wanted.owners)

        def take(start: int, end: int) -> None:
            rows = needed[start:end]
            low, high = np.searchsorted(wanted.rows, (rows[0], rows[-1] + 1))
            at = np.searchsorted(rows, wanted.rows[low:high])
            made = score_rows(logits.rows(first + start, first + end), at, ids[low:high], num_top)
            for i, row, logprob in zip(
                range(low, high), at.tolist(), made.logprobs.tolist(), strict=True
            ):
                scores, token = wanted.owners[wanted.owner[i]], int(wanted.tokens[i])
                if logprob != logprob:
                    self._fail(scores, _no_distribution(token))
                else:
                    scores.set(token, logprob, made.top[row] if scores.num_top else None)

        def fail(at: int, error: UmbelError) -> None:
            for i in np.flatnonzero(wanted.rows == needed[at]).tolist():
                self._fail(wanted.owners[wanted.owner[i]], error)

        self._pieces.run("scoring a prompt", len(needed), MAX_SCORED_ROWS, take, fail)
        for scores in wanted.owners:
            self._keep(scores)

    def passed(self, batch: Batch, parts: Sequence[Part]) -> None:
        """See to what is still missing after a pass, and end what is not."""
        if self._table is None:
            return
        for scheduled, part in zip(batch.requests, parts, strict=True):
            if isinstance(part, Rescoring):
                self._passed_again(scheduled, part)
            elif isinstance(part, GenTask) and part.scores is not None:
                scores, num_rows = part.scores, len(part.scores.token_ids)
                if scheduled.start < num_rows <= scheduled.end:
                    if scores.is_wanted:
                        self._recall(scores)
                        self._find(scores, scheduled.request, num_rows)
                    self._keep(scores)
                self._end(scores)

    def _passed_again(self, scheduled: ScheduledRequest, rescoring: Rescoring) -> None:
        request = rescoring.request
        if request.request_id in self._rescorings and scheduled.reaches_end:
            del self._rescorings[request.request_id]
            self._scheduler.finish(request, ())  # its rows are in the cache, or nobody needs them
        for scores, _ in list(rescoring.waiting):  # an end may bring more of them
            self._end(scores)

    def _end(self, scores: PromptScores) -> None:
        if scores.is_complete and scores.is_wanted:
            scores.is_wanted = False
            scores.done()

    def _fail(self, scores: PromptScores, error: UmbelError) -> None:
        if scores.is_wanted:
            scores.is_wanted = False
            scores.failed(error)

    # --- what is known, and what is not -------------------------------------------------------

    def _cached_slots(self, scores: PromptScores) -> IntArray:
        """Return the slots of the longest prefix of a prompt that is in the cache."""
        probe = self._cache.probe(scores.token_ids, scores.namespace)
        path = [] if probe.node is None else probe.node.path()
        slots = [slot for node in path for slot in node.slots]
        return np.asarray(slots[: probe.num_tokens], np.int64)

    def _recall(self, scores: PromptScores) -> IntArray:
        assert self._table is not None
        slots = self._cached_slots(scores)
        self._table.recall(slots, scores)
        return slots

    def _keep(self, scores: PromptScores) -> None:
        assert self._table is not None
        self._table.keep(self._cached_slots(scores), scores)

    def _find(self, scores: PromptScores, like: Request, num_rows: int) -> None:
        """Have those of the first rows computed again whose scores are missing and not awaited."""
        num_rows = min(num_rows, len(scores.token_ids) - 1)
        unknown = scores.missing & ~scores.awaited
        rows = np.flatnonzero(unknown[1 : num_rows + 1])
        for rescoring in self._rescorings.values():
            if not len(rows):
                return
            rows = rescoring.take_up(scores, rows)
        if not len(rows):
            return
        first, end = int(rows[0]), int(rows[-1]) + 1
        request = Request(
            request_id=self._next_id(),
            program_id=like.program_id,
            node_id=like.node_id,
            token_ids=list(scores.token_ids[:end]),
            limit=end,
            arrival=like.arrival,
            depth=like.depth,
            priority=like.priority,
            namespace=like.namespace,
            num_context=first + 1,
            recomputes=True,
        )
        self._scheduler.add(request)
        rescoring = Rescoring(request, first, [])
        left = rescoring.take_up(scores, rows)
        assert not len(left), "a recomputation leaves out what it was made for"
        self._rescorings[request.request_id] = rescoring


def _lacks_scores(part: Part) -> bool:
    return isinstance(part, GenTask) and part.scores is not None and not part.scores.is_complete


def _joined(found: Iterable[tuple[PromptScores, IntArray, IntArray]]) -> PassScores | None:
    owners: dict[int, PromptScores] = {}
    index: dict[int, int] = {}
    owner_of: list[IntArray] = []
    tokens_of: list[IntArray] = []
    rows_of: list[IntArray] = []
    for scores, tokens, rows in found:
        owners[id(scores)] = scores
        at = index.setdefault(id(scores), len(index))
        owner_of.append(np.full(len(tokens), at, np.int64))
        tokens_of.append(tokens)
        rows_of.append(rows)
    if not owners:
        return None
    rows = np.concatenate(rows_of)
    order = np.argsort(rows, kind="stable")
    return PassScores(
        owners=tuple(owners.values()),
        owner=np.concatenate(owner_of)[order],
        tokens=np.concatenate(tokens_of)[order],
        rows=rows[order],
    )


def _slots(request: Request, start: int, end: int) -> IntArray:
    """Return a copy of the slots of some rows: while a view lives, the slots can't grow."""
    return np.array(request.slots[start:end], np.int64)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    most = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:most]) != np.asarray(b[:most]))
    return int(differ[0]) if len(differ) else most


def _no_distribution(token: int) -> EngineError:
    return EngineError(
        f"the logits after token {token - 1} of the prompt are not a distribution, so its next "
        "token can't be scored: look at the weights and at the number type for overflow"
    )
