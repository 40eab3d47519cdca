"""One pass from a batch to its results: laid out, launched, sampled, scored, handed over.

What goes wrong for one request here fails its node alone; what goes wrong in a forward pass is
`PassRetry`'s to see to. Knows requests, logits and samples; nothing of queues, clients or threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from umbel.lang.errors import UmbelError
from umbel.lang.results import TokenLogprob

from .device_errors import ends_engine, error_of
from .gen_task import GenTask
from .grammar import TokenBitmask
from .grammar.device_arena import FREE
from .grammar.device_grammars import DeviceGrammars
from .model_runner.inputs import IntArray, build_inputs
from .model_runner.runner import MAX_SCORED_ROWS, PassLogits, Runner
from .node_tasks import NodeTasks
from .pass_retry import PassRetry
from .prompt_scorer import Part, PassScores, PromptScorer, Rescoring
from .request import UNKNOWN_TOKEN, Request
from .row_pieces import RowPieces
from .sampling import SampledTokens, SamplingRow, ScoredRows
from .sampling.device_sampler import PendingLogprobs, PendingTokens, TokenSampler
from .scheduler import Batch, ScheduledRequest
from .select_task import TreeScoring
from .tokenizer import Tokenizer
from .watchdog import StepWatch

logger = logging.getLogger(__name__)

_NO_LOGITS = torch.empty(0, 0)

Gens = list[tuple[Request, GenTask]]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What of one pass is wanted, and by whom."""

    parts: list[Part]  # one for each request of the batch
    gens: Gens  # that the pass gives logits for
    # of those of them under a constraint whose last id the device alone knows, by their number: its
    # place among the samples before
    last_places: dict[int, int]
    trees: list[tuple[ScheduledRequest, TreeScoring, list[int]]]  # with the rows that score
    prompts: PassScores | None
    logits_rows: IntArray  # those of the gens, of the trees, of the prompts

    def asks_for_scores(self, batch: Batch) -> list[Request]:
        """Return the requests that prompts are scored by."""
        return [
            scheduled.request
            for scheduled, part in zip(batch.requests, self.parts, strict=True)
            if isinstance(part, Rescoring)
            or (isinstance(part, GenTask) and part.scores is not None)
        ]

    def kind(self, batch: Batch) -> tuple[int, int, bool]:
        """Return what passes have in common that need the same kernels."""
        return batch.num_tokens.bit_length(), batch.num_decodes.bit_length(), bool(self.trees)


@dataclass(frozen=True, slots=True)
class LaunchedPass:
    """A pass that the runner has taken, with the logits that will come of it."""

    batch: Batch
    wanted: _Wanted
    sampled: torch.Tensor  # [num_gens, vocab_size] logits to sample from
    logits: PassLogits


@dataclass(slots=True)
class PassResults:
    """What a pass brings, some of it still on its way from the device."""

    tokens: list[tuple[Gens, PendingTokens]]  # gens that were sampled, in the order of the samples
    trees: list[tuple[ScheduledRequest, TreeScoring, list[tuple[ScoredRows, PendingLogprobs]]]]

    @property
    def is_ready(self) -> bool:
        """Whether everything is there: the device waits for the next pass."""
        return all(pending.is_ready for _, pending in self.tokens) and all(
            pending.is_ready for _, _, scores in self.trees for _, pending in scores
        )


@dataclass(frozen=True, slots=True)
class PassParts:
    """What passes are made with. Row i of `bitmask` is that of row i of what is sampled.

    With `overlap` a row runs on with a sample that the host does not know yet.
    """

    runner: Runner
    sampler: TokenSampler
    bitmask: TokenBitmask
    grammars: DeviceGrammars
    tokenizer: Tokenizer
    tasks: NodeTasks
    prompts: PromptScorer
    pieces: RowPieces
    overlap: bool


class ForwardPasses:
    """Runs the passes of one engine. Lives on its thread. `fail` ends the node of one request."""

    def __init__(
        self,
        parts: PassParts,
        retry: PassRetry,
        watch: StepWatch,
        fail: Callable[[Request, UmbelError], None],
    ) -> None:
        self._parts = parts
        self._retry = retry
        self._watch = watch
        self._fail = fail
        self.forward_s = 0.0  # in which the thread computed or launched passes
        self.wait_s = 0.0  # in which it waited for what they sample
        self.num_dropped = 0  # rows that ran on behind the end of their sample

    def close(self) -> None:
        """Let go of the model, its KV and all else that passes need: none can follow."""
        del self._parts

    def launch(self, batch: Batch) -> LaunchedPass | None:
        """Hand a pass to the runner; None if that failed. Raises what no pass can follow."""
        wanted = self._plan(batch)
        parts = self._parts
        inputs = build_inputs(batch, wanted.logits_rows, parts.sampler.samples)
        parts.prompts.written(inputs.slot_mapping)
        failure: BaseException
        started = time.perf_counter()
        try:
            with self._watch.phase("a forward pass", wanted.kind(batch)):
                logits = parts.runner.forward(inputs)
                sampled = logits.rows(0, len(wanted.gens)) if wanted.gens else _NO_LOGITS
        except BaseException as cause:  # panics of native libraries are no Exception
            if ends_engine(cause):
                raise
            failure = cause
        else:
            self.forward_s += time.perf_counter() - started
            self._retry.passed(batch)
            return LaunchedPass(batch, wanted, sampled, logits)
        self._retry.failed(batch, failure)  # out here, where the pass's tensors can be freed
        return None

    def _plan(self, batch: Batch) -> _Wanted:
        """Say what of a pass is wanted, and by whom."""
        tasks, prompts = self._parts.tasks, self._parts.prompts
        trees: list[tuple[ScheduledRequest, TreeScoring, list[int]]] = []
        # a decode is of a gen that has run before, and gives one row of logits
        offset = batch.num_decodes
        decodes = [scheduled.request for scheduled in batch.requests[:offset]]
        decoding = tasks.gens_of(decodes)
        parts: list[Part] = [*decoding]
        gens = list(zip(decodes, decoding, strict=True))
        sampled: list[int] = []  # rows of the pass that the others sample from, in its numbering
        scored: list[int] = []
        for scheduled in batch.requests[offset:]:
            request = scheduled.request
            part: Part = None
            if not request.is_prefetch:
                part = prompts.part_of(request) or tasks.task_of(request)[1]
            parts.append(part)
            if part is not None and not isinstance(part, Rescoring):
                tasks.scheduled(request)
            if isinstance(part, TreeScoring):
                own = part.logits_rows(scheduled.start, scheduled.end)
                trees.append((scheduled, part, own))
                scored += [offset + row - scheduled.start for row in own]
            elif isinstance(part, GenTask) and scheduled.reaches_end:
                gens.append((request, part))
                sampled.append(offset + scheduled.num_tokens - 1)
            offset += scheduled.num_tokens
        last_places = {
            at: request.sampled_at
            for at, (request, gen) in enumerate(gens)
            if gen.matcher is not None and request.token_ids[-1] == UNKNOWN_TOKEN
        }
        scores = prompts.plan(batch, parts)
        rest = [*sampled, *scored, *(scores.logits_rows if scores is not None else ())]
        rows = np.concatenate([np.arange(len(decodes)), np.asarray(rest, np.int64)])
        return _Wanted(parts, gens, last_places, trees, scores, rows)

    @contextmanager
    def _fails_alone(self, requests: Sequence[Request], what: str) -> Iterator[None]:
        """Let what is raised inside fail the nodes of these requests, and nothing else."""
        try:
            yield
        except BaseException as cause:  # panics of native libraries are no Exception
            self._fail_all(requests, what, cause)

    def _fail_all(self, requests: Sequence[Request], what: str, cause: BaseException) -> None:
        """Fail the nodes of requests that met `cause`, or raise it: called where it is handled."""
        if ends_engine(cause):
            raise cause
        if not isinstance(cause, UmbelError):
            logger.exception("%s failed", what)
        error = error_of(what, cause)
        for request in requests:
            self._fail(request, error)

    # --- sampling and scoring -----------------------------------------------------------------

    def sample(self, launched: LaunchedPass) -> PassResults:
        """Have a pass's rows sampled and scored; called before the next pass is launched."""
        wanted, logits, parts = launched.wanted, launched.logits, self._parts
        at = len(wanted.gens)
        trees = []
        for scheduled, tree, own in wanted.trees:
            if parts.tasks.is_live(scheduled.request):
                with self._fails_alone([scheduled.request], "scoring the choices of a select"):
                    trees.append((scheduled, tree, self._tree_scores(tree, own, logits, at)))
            at += len(own)
        if wanted.prompts is not None:
            asking = wanted.asks_for_scores(launched.batch)
            with self._fails_alone(asking, "scoring a prompt"):
                parts.prompts.take(wanted.prompts, logits, at)
        parts.prompts.passed(launched.batch, wanted.parts)
        return PassResults(self._sample_gens(launched), trees)

    def _sample_gens(self, launched: LaunchedPass) -> list[tuple[Gens, PendingTokens]]:
        parts = self._parts
        rows: list[SamplingRow] = []
        live: Gens = []
        places: list[int] = []
        wanted, live_ids = launched.wanted, parts.tasks.live_ids
        for at, request_and_gen in enumerate(wanted.gens):
            request, gen = request_and_gen
            if request.request_id not in live_ids or request.num_pending:
                self.num_dropped += 1
                continue  # the sample before, known since, ended it or brought forced tokens
            if gen.matcher is None and gen.opening is None:  # as most are: nothing can go wrong
                row = gen.row
                row.bitmask = None
            else:
                try:
                    row = self._sampling_row(gen, len(live), wanted.last_places.get(at, -1))
                except BaseException as cause:  # panics of native libraries are no Exception
                    self._fail_all([request], "filling a grammar's mask", cause)
                    continue
            rows.append(row)
            live.append(request_and_gen)
            places.append(at)
        if not live:
            return []
        found: list[tuple[Gens, PendingTokens]] = []

        def sample(start: int, end: int) -> None:
            masks = parts.bitmask.tensor[start:]
            at = places[start:end] if end - start < len(wanted.gens) else None
            if end - start < len(live):  # where the last samples were, another piece's are
                self._send_states(live[start:end])
            tokens = parts.sampler.sample(launched.sampled, rows[start:end], masks, at)
            found.append((live[start:end], tokens))

        def fail(at: int, error: UmbelError) -> None:
            self._fail(live[at][0], error)

        parts.pieces.run("sampling", len(live), len(live), sample, fail)
        # in pieces they wait for their ids: each piece's samples took the place of the last one's
        if parts.overlap and len(found) == 1 and len(found[0][0]) == len(live):
            self._run_on(live)
        return found

    def _run_on(self, live: Gens) -> None:
        """Append what was sampled, whose ids the device alone knows yet, to the rows."""
        for at, (request, gen) in enumerate(live):
            if len(gen.token_ids) + 1 < gen.most_tokens:
                request.sampled_at = at
                request.token_ids.append(UNKNOWN_TOKEN)

    def _tree_scores(
        self, tree: TreeScoring, rows: list[int], logits: PassLogits, first: int
    ) -> list[tuple[ScoredRows, PendingLogprobs]]:
        scores: list[tuple[ScoredRows, PendingLogprobs]] = []

        def score(start: int, end: int) -> None:
            scored = tree.scorer.scored_by(rows[start:end])
            made = logits.rows(first + start, first + end)
            logprobs = self._parts.sampler.logprobs(made, scored.token_ids, scored.at)
            scores.append((scored, logprobs))

        def fail(at: int, error: UmbelError) -> None:
            raise error  # a choice without its score is no choice: the select fails

        what = "scoring the choices of a select"
        self._parts.pieces.run(what, len(rows), MAX_SCORED_ROWS, score, fail)
        return scores

    def _send_states(self, gens: Gens) -> None:
        """Have rows that would go on from the last samples go on from what the host knows."""
        for request, gen in gens:
            if gen.row.state < 0 and gen.matcher is not None:
                state = self._parts.grammars.state(request.request_id, gen.matcher, -1)
                gen.row.state = FREE if state is None else state

    def _sampling_row(self, gen: GenTask, slot: int, last_place: int) -> SamplingRow:
        """Have a gen's next token masked: by its automaton on the device, or in the mask's `slot`.

        `last_place`: see `_Wanted.last_places`; -1 where the host knows the id.
        """
        row, masks = gen.row, self._parts.bitmask
        row.bitmask, row.state = None, FREE
        if gen.opening is not None:
            row.bitmask = masks.row(slot)
            gen.opening.fill(row.bitmask)
        elif gen.matcher is not None:
            holds_eos = gen.gen.sampling.ignore_eos  # which no automaton's rows know of
            state = None
            if not holds_eos:
                state = self._parts.grammars.state(gen.request.request_id, gen.matcher, last_place)
            if state is not None:
                row.state = state
                return row
            row.bitmask = masks.row(slot)
            gen.matcher.fill(row.bitmask)
            if holds_eos and not gen.matcher.is_finished:
                # it ends where nothing can follow, and not before
                masks.forbid(slot, self._parts.tokenizer.eos_ids)
        return row

    # --- what comes of it -----------------------------------------------------------------------

    def deliver(self, results: PassResults) -> None:
        """Hand what a pass brought to the tasks, once it is there."""
        tasks = self._parts.tasks
        for scheduled, tree, scores in results.trees:
            if not tasks.is_live(scheduled.request):
                continue  # a sibling's end in this very step cancelled it
            with self._fails_alone([scheduled.request], "scoring the choices of a select"):
                for scored, logprobs in scores:
                    with self._watch.phase("waiting for a select's scores"):
                        values = logprobs.wait()
                    tree.scorer.take(scored, values)
                if scheduled.reaches_end:
                    tasks.tree_scored(scheduled.request)
        for gens, tokens in results.tokens:
            sampled: SampledTokens | None = None
            started = time.perf_counter()
            requests = [request for request, _ in gens]
            waiting = self._watch.phase("waiting for sampled tokens")
            with self._fails_alone(requests, "sampling"), waiting:
                sampled = tokens.wait()
            self.wait_s += time.perf_counter() - started
            if sampled is not None:
                self._take_tokens(gens, sampled)

    def _take_tokens(self, gens: Gens, sampled: SampledTokens) -> None:
        tasks, live_ids = self._parts.tasks, self._parts.tasks.live_ids
        results = zip(
            gens, sampled.token_ids, sampled.logprobs, sampled.top, sampled.errors, strict=True
        )
        for (request, gen), token_id, logprob, top, poisoned in results:
            if request.request_id not in live_ids:
                continue  # a sibling's end in this very step cancelled it
            try:  # and no context, which for each token would cost as much as the rest
                if poisoned is not None:
                    raise poisoned
                if logprob is not None:
                    gen.logprobs.append(self._token_logprob(token_id, logprob, top))
                tasks.token(request, token_id)
            except BaseException as cause:  # panics of native libraries are no Exception
                self._fail_all([request], "taking a sampled token", cause)

    def _token_logprob(
        self, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]
    ) -> TokenLogprob:
        text_of = self._parts.tokenizer.decode
        texts = tuple(text_of((other,)) for other, _ in top)
        return TokenLogprob(token_id, logprob, top, text_of((token_id,)), texts)
