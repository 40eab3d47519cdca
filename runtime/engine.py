"""The facade and the loop: schedule, forward, sample, deliver; knows no kernel and no HTTP."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self

import torch

from umbel.lang.errors import (
    EngineConfigError,
    EngineError,
    EngineStoppedError,
    ProgramError,
    UmbelError,
)
from umbel.lang.graph import RequestGraph
from umbel.lang.results import NodeResult, RunOptions, TokenLogprob

from .config import EngineConfig
from .gen_task import GenTask
from .grammar import GrammarCompiler, TokenBitmask
from .graph_executor import GraphExecutor
from .kv_cache import Holds, PageAllocator, RadixCache
from .model_runner.inputs import build_inputs
from .model_runner.runner import MAX_SCORED_ROWS, PassLogits, Runner
from .prefix_bound import PrefixBound
from .program_run import EventSink, ProgramRun
from .prompt_scorer import PassScores, PromptScorer, Rescoring
from .prompt_scores import PromptScores
from .request import UNKNOWN_TOKEN, Request
from .sampling import SampledTokens, SamplingRow, ScoredRows
from .sampling.device_sampler import HostSampler, PendingLogprobs, PendingTokens, TokenSampler
from .scheduler import Batch, ScheduledRequest, Scheduler
from .select_task import TreeScoring
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NONE: Mapping[int, UmbelError] = MappingProxyType({})
_NO_LOGITS = torch.empty(0, 0)
# commands encode prompts, of which a thousand may come at once: a step is launched between them
_COMMANDS_S = 0.005

_MAX_WAIT_S = 3600.0  # a lock takes no time limit of centuries


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """What of one pass is wanted, and by whom."""

    parts: list[GenTask | TreeScoring | Rescoring]  # one for each request of the batch
    gens: list[tuple[ScheduledRequest, GenTask]]  # that sample
    trees: list[tuple[ScheduledRequest, TreeScoring, list[int]]]  # with the rows that score
    prompts: PassScores | None
    logits_rows: list[int]  # those of the gens, of the trees, of the prompts

    def asks_for_scores(self, batch: Batch) -> list[Request]:
        """Return the requests that prompts are scored by."""
        return [
            scheduled.request
            for scheduled, part in zip(batch.requests, self.parts, strict=True)
            if isinstance(part, Rescoring)
            or (isinstance(part, GenTask) and part.scores is not None)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Launched:
    """A pass that the runner has taken, with the logits that will come of it."""

    batch: Batch
    wanted: _Pass
    sampled: torch.Tensor  # [num_gens, vocab_size] logits to sample from
    logits: PassLogits


@dataclasses.dataclass(slots=True)
class _Results:
    """What a pass brings, some of it still on its way from the device."""

    gens: list[tuple[Request, GenTask]]  # that were sampled, in the order of the samples
    tokens: PendingTokens | None
    trees: list[tuple[ScheduledRequest, TreeScoring, list[tuple[ScoredRows, PendingLogprobs]]]]


class EngineSession:
    """One run in the engine; may be used from any thread."""

    def __init__(self, engine: Engine, run: ProgramRun) -> None:
        self._engine = engine
        self._run = run
        self._lock = threading.Lock()  # pieces reach the engine in the order of their nodes
        self._num_nodes = 0
        self._is_closed = False

    def extend(self, piece: RequestGraph, failed: Mapping[int, UmbelError] = _NONE) -> None:
        """Hand over more of the graph; raises ProgramError, EngineStoppedError.

        Nodes of the piece in `failed` have ended elsewhere: they fail without an event.
        """
        piece.check()
        with self._lock:
            if self._is_closed:
                raise ProgramError("the session is closed: a run takes no pieces after that")
            if piece.base != self._num_nodes:
                raise ProgramError(
                    f"the piece starts at node {piece.base}; the run has {self._num_nodes} nodes"
                )
            self._engine.post(lambda: self._engine.executor.extend(self._run, piece, failed))
            self._num_nodes += len(piece.nodes)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Cancel nodes (all, by default) that have not ended."""
        ids = None if nodes is None else list(nodes)
        self._engine.post_if_running(lambda: self._engine.executor.cancel(self._run, ids))

    def close(self) -> None:
        """Promise that no more pieces come. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._engine.post_if_running(lambda: self._engine.executor.close(self._run))


class Engine:
    """Runs request graphs on one model.

    One thread owns everything below; others talk to it through `post`. With `start=False` there
    is no thread and the caller drives the engine by `step` (tests). A compiler given as `grammar`
    is shared: its owner closes it. `sampler` draws tokens where the logits are; the host's by
    default.

    What goes wrong for one request fails its node, what goes wrong in a pass fails the nodes in it,
    and a defect in a run's graph ends that run; see GraphExecutor. The scheduler's and the cache's
    state is everybody's: where that breaks, no result could be trusted, so the engine stops, and
    all that has not ended fails with EngineStoppedError, whose cause is the defect.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        max_seq_len: int,
        model_name: str = "",
        grammar: GrammarCompiler | None = None,
        sampler: TokenSampler | None = None,
        start: bool = True,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_seq_len = max_seq_len
        self._runner = runner
        limits = config.limits("cpu" if sampler is None else sampler.samples.device.type)
        self._allocator = PageAllocator(runner.num_slots, config.page_size)
        self.cache = RadixCache(config.page_size)
        self.scheduler = Scheduler(
            self.cache,
            self._allocator,
            max_step_tokens=limits.max_step_tokens,
            max_running=limits.max_running,
            policy=config.policy,
            eviction=config.eviction,
            cache_enabled=config.prefix_cache,
        )
        self._owns_grammar = grammar is None
        if grammar is None:
            grammar = GrammarCompiler(
                tokenizer.vocabulary(),
                cache_bytes=config.grammar_cache_bytes,
                timeout_s=config.grammar_timeout_s,
            )
        self._grammar = grammar
        most_rows = min(limits.max_running, limits.max_step_tokens)  # that sample in one pass
        self._sampler = sampler or HostSampler(runner.vocab_size, most_rows)
        self._overlap = sampler is not None if config.overlap is None else config.overlap
        self._results: _Results | None = None  # of the last pass, not looked at yet
        on_gpu = self._sampler.samples.device.type == "cuda"
        self._bitmask = TokenBitmask(most_rows, runner.vocab_size, pin_memory=on_gpu)
        self._bound = PrefixBound() if config.track_bound else None
        self.executor = GraphExecutor(
            tokenizer, self._grammar, self, max_seq_len, config.jump_forward
        )
        self._prompts = PromptScorer(
            self.scheduler, self.cache, runner.num_slots, self.executor.next_request_id
        )
        self._num_steps = 0
        self._step_s = 0.0
        self._forward_s = 0.0
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._stopped = False
        self._cause: BaseException | None = None
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._loop, name="umbel-engine", daemon=True)
            self._thread.start()

    @classmethod
    def from_model(cls, ref: str, **options: Any) -> Self:
        """Load a model by reference and start an engine; options are EngineConfig's fields.

        Raises ModelLoadError, EngineConfigError.
        """
        from .model_loading import load_parts  # imports the models, which no test runner needs

        known = {field.name for field in dataclasses.fields(EngineConfig)}
        if unknown := sorted(set(options) - known):
            raise EngineConfigError(
                f"there is no setting {', '.join(unknown)}; the engine's settings: "
                f"{', '.join(sorted(known))}"
            )
        config = EngineConfig(**options)
        parts = load_parts(ref, config)
        engine = cls(
            parts.runner,
            parts.tokenizer,
            config,
            max_seq_len=parts.max_seq_len,
            model_name=parts.name,
            sampler=parts.sampler,
        )
        engine._grammar.warm_up()  # in the background: whoever constrains first waits less
        return engine

    # --- used by clients, from any thread ---------------------------------------------------

    def open(
        self,
        options: RunOptions,
        sink: EventSink,
        resolved: dict[int, NodeResult] | None = None,
        failed: dict[int, UmbelError] | None = None,
    ) -> EngineSession:
        """Start a run whose events go to `sink`, on the engine's thread, after each step.

        Nodes in `resolved` or `failed` have ended in an earlier run of the same program: when a
        piece brings them, they are taken as done, without an event. Raises EngineStoppedError.
        """
        run = self.executor.open(options, sink, resolved or {}, failed or {})
        self.post(lambda: self.executor.register(run))
        return EngineSession(self, run)

    def close(self) -> None:
        """Stop at once: what has not ended fails with EngineStoppedError. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is None:
            self._shut_down()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def stats(self) -> dict[str, float]:
        """Return counters since the start; safe from any thread."""
        stats = self.scheduler.stats
        least = self._bound.least_prefill if self._bound is not None else 0
        prompt = self._bound.prompt_tokens if self._bound is not None else 0
        return {
            "steps": self._num_steps,
            "step_s": self._step_s,
            "forward_s": self._forward_s,
            "tokens_prefilled": stats.tokens_prefilled,
            "tokens_decoded": stats.tokens_decoded,
            "tree_tokens": stats.tree_tokens,
            "cached_tokens": stats.cached_tokens,
            "retractions": stats.retractions,
            "least_prefill": least,
            "prompt_tokens": prompt,
            "kv_slots": self._allocator.num_slots,
            "kv_slots_free": self.scheduler.num_free,
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
        }

    def reset_cache(self) -> int:
        """Forget every cached prefix and return how many slots came free; from any thread.

        Raises EngineError while requests are running, EngineStoppedError.
        """
        done: Future[int] = Future()

        def reset() -> None:
            try:
                done.set_result(self.scheduler.reset_cache())
            except EngineError as error:  # its caller's alone
                done.set_exception(error)
            except BaseException as error:  # the engine's end; the caller must not wait for it
                done.set_exception(error)
                raise

        if self._thread is threading.current_thread():
            reset()
        else:
            self.post(reset)
            if self._thread is None:
                self._run_commands()
        return done.result()

    def post(self, command: Callable[[], None]) -> None:
        """Run a command on the engine's thread before its next step; raises EngineStoppedError."""
        with self._wake:
            if self._stopping:
                raise self._stopped_error()
            self._inbox.append(command)
            self._wake.notify_all()

    def post_if_running(self, command: Callable[[], None]) -> None:
        """Post a command that has nothing left to do once the engine has stopped."""
        with self._wake:
            if not self._stopping:
                self._inbox.append(command)
                self._wake.notify_all()

    # --- the queue that the graph executor uses, on the engine's thread ----------------------

    @property
    def holds(self) -> Holds:
        """What live programs hold of the cache."""
        return self.scheduler.holds

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestRejectedError."""
        self.scheduler.add(request)
        if self._bound is not None:
            context = request.num_context if request.tree_parents else len(request.token_ids)
            self._bound.add_prompt(request.namespace, request.token_ids[:context])

    def finish(self, request: Request, keep: list[int]) -> None:
        """Release a request's KV but for the rows in `keep`."""
        if self._bound is not None:
            rows = [*range(request.num_shared), *keep]
            self._bound.add_computed(request.namespace, [request.token_ids[row] for row in rows])
        self.scheduler.finish(request, keep)

    def abort(self, request: Request) -> None:
        """Release a request in whatever state it is."""
        self.scheduler.abort(request)

    def score_prompt(self, scores: PromptScores, request: Request) -> None:
        """Begin to find the log-probabilities of the prompt that a request will compute."""
        self._prompts.begin(scores, request)

    # --- the loop ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Run commands and one forward pass; return whether there may be more to do at once.

        With overlap the pass of this step is launched before what the last one brings is looked at:
        the host works on that while the device computes. A row whose sample is not known yet runs
        on with it all the same; where it turns out to have ended, what was computed is dropped.
        """
        started = time.perf_counter()
        self._run_commands()
        self.executor.expire()
        self._prompts.drop_unwanted()
        batch = self.scheduler.schedule()
        launched = None if batch is None else self._launch(batch)
        landed, self._results = self._results, None
        if landed is not None:
            self._deliver(landed)
        if launched is not None:
            results = self._sample(launched)
            if self._overlap:
                self._results = results
            else:
                self._deliver(results)
        rejected = self.scheduler.take_rejected()
        for request, error in rejected:  # after the pass, which a sibling may have been in
            self._fail(request, error)
        self.executor.flush()
        if self.config.check_accounting:
            self.scheduler.check()
        if batch is not None:
            self._num_steps += 1
            self._step_s += time.perf_counter() - started
        # the ends of what was rejected or delivered may have made others ready
        return batch is not None or landed is not None or bool(rejected) or bool(self._inbox)

    def _launch(self, batch: Batch) -> _Launched | None:
        """Hand a pass to the runner; None if that failed, and the nodes in it with it."""
        this = self._plan_pass(batch)
        inputs = build_inputs(batch, this.logits_rows, self._sampler.samples)
        self._prompts.written(inputs.slot_mapping)
        forward_started = time.perf_counter()
        logits: PassLogits | None = None
        sampled = _NO_LOGITS
        requests = [scheduled.request for scheduled in batch.requests]
        with self._fails_alone(requests, f"a forward pass of {batch.num_tokens} tokens"):
            try:
                made = self._runner.forward(inputs)
                if this.gens:
                    sampled = made.rows(0, len(this.gens))
                logits = made
            except BaseException:
                self.scheduler.fail(batch)  # first: nothing of the pass may outlive it
                raise
        if logits is None:
            return None
        self._forward_s += time.perf_counter() - forward_started
        self.scheduler.complete(batch)
        return _Launched(batch, this, sampled, logits)

    def _plan_pass(self, batch: Batch) -> _Pass:
        """Say what of a pass is wanted, and by whom."""
        parts: list[GenTask | TreeScoring | Rescoring] = []
        gens: list[tuple[ScheduledRequest, GenTask]] = []
        trees: list[tuple[ScheduledRequest, TreeScoring, list[int]]] = []
        sampled: list[int] = []  # rows of the pass, in its own numbering
        scored: list[int] = []
        offset = 0
        for scheduled in batch.requests:
            request = scheduled.request
            part = self._prompts.part_of(request) or self.executor.task_of(request)[1]
            parts.append(part)
            if not isinstance(part, Rescoring):
                self.executor.scheduled(request)
            if isinstance(part, TreeScoring):
                own = part.logits_rows(scheduled.start, scheduled.end)
                trees.append((scheduled, part, own))
                scored += [offset + row - scheduled.start for row in own]
            elif isinstance(part, GenTask) and scheduled.reaches_end:
                gens.append((scheduled, part))
                sampled.append(offset + scheduled.num_tokens - 1)
            offset += scheduled.num_tokens
        prompts = self._prompts.plan(batch, parts)
        rows = [*sampled, *scored, *(prompts.logits_rows if prompts is not None else ())]
        return _Pass(parts, gens, trees, prompts, rows)

    @contextmanager
    def _fails_alone(self, requests: Sequence[Request], what: str) -> Iterator[None]:
        """Let what is raised inside fail the nodes of these requests, and nothing else."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as cause:  # panics of native libraries are no Exception
            error: UmbelError
            if isinstance(cause, UmbelError):
                error = cause
            else:
                logger.exception("%s failed", what)
                error = EngineError(f"{what} failed: {type(cause).__name__}: {cause}")
                error.__cause__ = cause
            for request in requests:
                self._fail(request, error)

    def _fail(self, request: Request, error: UmbelError) -> None:
        """Fail what a request was for, if that has not ended."""
        if self.executor.is_live(request):
            self.executor.request_failed(request, error)
        else:
            self._prompts.fail(request, error)

    def _sample(self, launched: _Launched) -> _Results:
        """Have a pass's rows sampled and scored; called before the next pass is launched."""
        this, logits = launched.wanted, launched.logits
        at = len(this.gens)
        trees = []
        for scheduled, tree, own in this.trees:
            if self.executor.is_live(scheduled.request):
                with self._fails_alone([scheduled.request], "scoring the choices of a select"):
                    trees.append((scheduled, tree, self._tree_scores(tree, own, logits, at)))
            at += len(own)
        if this.prompts is not None:
            with self._fails_alone(this.asks_for_scores(launched.batch), "scoring a prompt"):
                self._prompts.take(this.prompts, logits, at)
        self._prompts.passed(launched.batch, this.parts)
        gens, tokens = self._sample_gens(this.gens, launched.sampled)
        return _Results(gens, tokens, trees)

    def _sample_gens(
        self, gens: list[tuple[ScheduledRequest, GenTask]], logits: torch.Tensor
    ) -> tuple[list[tuple[Request, GenTask]], PendingTokens | None]:
        rows: list[SamplingRow] = []
        live: list[tuple[Request, GenTask]] = []
        places: list[int] = []
        for at, (scheduled, gen) in enumerate(gens):
            request = scheduled.request
            if not self.executor.is_live(request) or not scheduled.reaches_end:
                continue  # the sample before, known since, ended it or brought forced tokens
            with self._fails_alone([request], "filling a grammar's mask"):
                rows.append(self._sampling_row(gen, len(live)))
                live.append((request, gen))
                places.append(at)
        tokens: PendingTokens | None = None
        if live:
            with self._fails_alone([request for request, _ in live], "sampling"):
                if len(places) < len(gens):
                    logits = logits[places]
                tokens = self._sampler.sample(logits, rows, self._bitmask.tensor)
        if tokens is None:
            return [], None
        if self._overlap:
            for at, (request, gen) in enumerate(live):
                if not gen.ends_by_length(len(gen.token_ids) + 1):
                    request.sampled_at = at
                    request.token_ids.append(UNKNOWN_TOKEN)
        return live, tokens

    def _tree_scores(
        self, tree: TreeScoring, rows: list[int], logits: PassLogits, first: int
    ) -> list[tuple[ScoredRows, PendingLogprobs]]:
        scores = []
        for start in range(0, len(rows), MAX_SCORED_ROWS):
            scored = tree.scorer.scored_by(rows[start : start + MAX_SCORED_ROWS])
            made = logits.rows(first + start, first + start + len(scored.rows))
            scores.append((scored, self._sampler.logprobs(made, scored.token_ids, scored.at)))
        return scores

    def _deliver(self, results: _Results) -> None:
        """Hand what a pass brought to the graph executor, once it is there."""
        for scheduled, tree, scores in results.trees:
            if not self.executor.is_live(scheduled.request):
                continue  # a sibling's end in this very step cancelled it
            with self._fails_alone([scheduled.request], "scoring the choices of a select"):
                for scored, logprobs in scores:
                    tree.scorer.take(scored, logprobs.wait())
                if scheduled.reaches_end:
                    self.executor.tree_scored(scheduled.request)
        if results.tokens is None:
            return
        sampled: SampledTokens | None = None
        with self._fails_alone([request for request, _ in results.gens], "sampling"):
            sampled = results.tokens.wait()
        if sampled is None:
            return
        for i, (request, gen) in enumerate(results.gens):
            if not self.executor.is_live(request):
                continue  # a sibling's end in this very step cancelled it
            with self._fails_alone([request], "taking a sampled token"):
                if (poisoned := sampled.errors[i]) is not None:
                    raise poisoned
                logprob = sampled.logprobs[i]
                if logprob is not None:
                    gen.logprobs.append(
                        self._token_logprob(sampled.token_ids[i], logprob, sampled.top[i])
                    )
                self.executor.token(request, sampled.token_ids[i])

    def _token_logprob(
        self, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]
    ) -> TokenLogprob:
        text_of = self.tokenizer.decode
        texts = tuple(text_of((other,)) for other, _ in top)
        return TokenLogprob(token_id, logprob, top, text_of((token_id,)), texts)

    def _sampling_row(self, gen: GenTask, slot: int) -> SamplingRow:
        bitmask = None
        if gen.opening is not None:
            bitmask = self._bitmask.row(slot)
            gen.opening.fill(bitmask)
        elif gen.matcher is not None:
            bitmask = self._bitmask.row(slot)
            gen.matcher.fill(bitmask)
            if gen.gen.sampling.ignore_eos and not gen.matcher.is_finished:
                # it ends where nothing can follow, and not before
                self._bitmask.forbid(slot, self.tokenizer.eos_ids)
        gen.row.bitmask = bitmask
        return gen.row

    def _run_commands(self) -> None:
        """Run what was posted; with overlap, no longer than the device has work meanwhile."""
        until = time.perf_counter() + _COMMANDS_S if self._overlap else math.inf
        while self._inbox:
            self._inbox.popleft()()
            if time.perf_counter() > until:
                break

    def _loop(self) -> None:
        try:
            while True:
                with self._wake:
                    if self._stopping:
                        break
                if self.step():
                    continue
                with self._wake:
                    if not self._inbox and not self._stopping:
                        deadline = self.executor.next_deadline()
                        wait = _MAX_WAIT_S if deadline is None else deadline - time.monotonic()
                        if wait > 0:
                            self._wake.wait(min(wait, _MAX_WAIT_S))
        except BaseException as cause:
            logger.exception("the engine stopped")
            self._cause = cause
        finally:
            with self._wake:
                self._stopping = True
            self._shut_down()

    def _shut_down(self) -> None:
        """Fail what has not ended, and release everything. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        while self._inbox:
            command = self._inbox.popleft()
            try:
                command()
            except Exception:  # the thread's edge: the other commands have clients that wait
                logger.exception("a command failed while the engine stopped")
        requests = self.executor.stop(self._stopped_error())
        try:
            for request in requests:
                self.scheduler.abort(request)
            self._prompts.close()
        except Exception:  # what broke the engine may have broken this too; nobody needs it now
            logger.exception("the requests that were left could not be released")
        if self._owns_grammar:
            self._grammar.close()

    def _stopped_error(self) -> EngineStoppedError:
        error = EngineStoppedError("the engine is no longer running")
        error.__cause__ = self._cause
        return error
