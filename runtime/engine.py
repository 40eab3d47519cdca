"""The facade and the loop: schedule, forward, sample, deliver; knows no kernel and no HTTP."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from umbel.lang.errors import EngineError, EngineStoppedError, UmbelError
from umbel.lang.graph import RequestGraph
from umbel.lang.results import NodeResult, RunOptions, TokenLogprob

from .config import EngineConfig
from .gen_task import GenTask
from .grammar import GrammarCompiler, TokenBitmask
from .graph_executor import EventSink, GraphExecutor, NodeTask, ProgramRun
from .kv_cache import PageAllocator, RadixCache
from .model_runner.inputs import build_inputs
from .model_runner.runner import Runner
from .prefix_bound import PrefixBound
from .request import Request
from .sampling import Sampler, SamplingRow
from .scheduler import Batch, ScheduledRequest, Scheduler
from .select_task import TreeScoring
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EngineSession:
    """One run in the engine; may be used from any thread."""

    def __init__(self, engine: Engine, run: ProgramRun) -> None:
        self._engine = engine
        self._run = run

    def extend(self, piece: RequestGraph) -> None:
        """Hand over more of the graph; raises ProgramError, EngineStoppedError."""
        piece.check()
        self._engine.post(lambda: self._engine.executor.extend(self._run, piece))

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Cancel nodes (all, by default) that have not ended."""
        ids = None if nodes is None else list(nodes)
        self._engine.post_if_running(lambda: self._engine.executor.cancel(self._run, ids))

    def close(self) -> None:
        """Promise that no more pieces come. Idempotent."""
        self._engine.post_if_running(lambda: self._engine.executor.close(self._run))


class Engine:
    """Runs request graphs on one model.

    One thread owns everything below; others talk to it through `post`. With `start=False` there
    is no thread and the caller drives the engine by `step` (tests). A compiler given as `grammar`
    is shared: its owner closes it.
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
        start: bool = True,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_seq_len = max_seq_len
        self._runner = runner
        self._allocator = PageAllocator(runner.num_slots)
        self.cache = RadixCache()
        self.scheduler = Scheduler(
            self.cache,
            self._allocator,
            max_step_tokens=config.max_step_tokens,
            max_running=config.max_running,
            policy=config.policy,
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
        self._bitmask = TokenBitmask(config.max_running, runner.vocab_size)
        self._sampler = Sampler(runner.vocab_size)
        self._bound = PrefixBound() if config.track_bound else None
        self.executor = GraphExecutor(tokenizer, self._grammar, self, max_seq_len)
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

        config = EngineConfig(**options)
        parts = load_parts(ref, config)
        return cls(
            parts.runner,
            parts.tokenizer,
            config,
            max_seq_len=parts.max_seq_len,
            model_name=parts.name,
        )

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
        """Return counters since the start (or the last `reset_stats`); safe from any thread."""
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
            "kv_slots": self._runner.num_slots,
            "kv_slots_free": self.scheduler.num_free,
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
        }

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

    # --- the loop ----------------------------------------------------------------------------

    def step(self) -> bool:
        """Run commands and one forward pass; return whether there was a pass."""
        started = time.perf_counter()
        self._run_commands()
        self.executor.expire()
        batch = self.scheduler.schedule()
        for request, error in self.scheduler.take_rejected():
            self.executor.request_failed(request, error)
        if batch is not None:
            self._run_batch(batch)
        self.executor.flush()
        if self.config.check_accounting:
            self.scheduler.check()
        if batch is not None:
            self._num_steps += 1
            self._step_s += time.perf_counter() - started
        return batch is not None

    def _run_batch(self, batch: Batch) -> None:
        tasks = [self.executor.task_of(s.request) for s in batch.requests]
        rows: list[int] = []  # rows of the pass, in its own numbering
        wanted: list[list[int]] = []  # for each request, its rows that give logits
        offset = 0
        for scheduled, (_, part) in zip(batch.requests, tasks, strict=True):
            self.executor.scheduled(scheduled.request)
            if isinstance(part, TreeScoring):
                own = part.logits_rows(scheduled.start, scheduled.end)
            else:
                own = [scheduled.end - 1] if scheduled.reaches_end else []
            rows += [offset + row - scheduled.start for row in own]
            wanted.append(own)
            offset += scheduled.num_tokens
        inputs = build_inputs(batch, rows)
        forward_started = time.perf_counter()
        try:
            logits = self._runner.forward(inputs)
        except Exception as cause:  # the model's edge: the pass's requests fail, the engine lives
            logger.exception("a forward pass of %d tokens failed", batch.num_tokens)
            self.scheduler.fail(batch)
            error = EngineError(f"the forward pass failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            for scheduled in batch.requests:
                if self.executor.is_live(scheduled.request):
                    self.executor.request_failed(scheduled.request, error)
            return
        self._forward_s += time.perf_counter() - forward_started
        self.scheduler.complete(batch)
        self._deliver(batch, tasks, wanted, logits)

    def _deliver(
        self,
        batch: Batch,
        tasks: list[tuple[NodeTask, GenTask | TreeScoring]],
        wanted: list[list[int]],
        logits: torch.Tensor,
    ) -> None:
        """Sample, score, and hand what comes out to the graph executor."""
        offset = 0
        gens: list[tuple[Request, GenTask, int]] = []
        for scheduled, (_, part), own in zip(batch.requests, tasks, wanted, strict=True):
            request = scheduled.request
            if isinstance(part, TreeScoring):
                self._score(scheduled, part, own, logits[offset : offset + len(own)])
            elif own:
                gens.append((request, part, offset))
            offset += len(own)
        if not gens:
            return
        sampling_rows = []
        live: list[tuple[Request, GenTask, int]] = []
        for request, gen, row in gens:
            try:
                sampling_rows.append(self._sampling_row(gen, len(live)))
            except UmbelError as error:  # its grammar failed: it fails alone (rule 15)
                self.executor.request_failed(request, error)
                continue
            live.append((request, gen, row))
        if not live:
            return
        sampled = self._sampler.sample(logits[[row for _, _, row in live]], sampling_rows)
        for i, (request, gen, _) in enumerate(live):
            poisoned = sampled.errors[i]
            if not self.executor.is_live(request):
                continue  # a sibling's end in this very step cancelled it
            if poisoned is not None:
                self.executor.request_failed(request, poisoned)
                continue
            token_id = sampled.token_ids[i]
            logprob = sampled.logprobs[i]
            if logprob is not None:
                gen.logprobs.append(TokenLogprob(token_id, logprob, sampled.top[i]))
            try:
                self.executor.token(request, token_id)
            except UmbelError as error:  # a stop pattern took too long, say
                self.executor.request_failed(request, error)

    def _score(
        self,
        scheduled: ScheduledRequest,
        part: TreeScoring,
        rows: list[int],
        logits: torch.Tensor,
    ) -> None:
        request = scheduled.request
        if not self.executor.is_live(request):
            return  # a sibling's end in this very step cancelled it
        try:
            if rows:
                part.scorer.add(rows, logits)
        except EngineError as error:  # the model gave no distribution: this select fails alone
            self.executor.request_failed(request, error)
            return
        if scheduled.reaches_end:
            self.executor.tree_scored(request)

    def _sampling_row(self, gen: GenTask, slot: int) -> SamplingRow:
        bitmask = None
        if gen.matcher is not None:
            bitmask = self._bitmask.row(slot)
            gen.matcher.fill(bitmask)
        gen.row.bitmask = bitmask
        return gen.row

    def _run_commands(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

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
                        wait = None if deadline is None else deadline - time.monotonic()
                        if wait is None or wait > 0:
                            self._wake.wait(wait)
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
        try:
            self._run_commands()
        finally:
            error = self._stopped_error()
            for run in list(self.executor.runs.values()):
                self.executor.fail_unfinished(run, error)
            self.executor.flush()
            if self._owns_grammar:
                self._grammar.close()

    def _stopped_error(self) -> EngineStoppedError:
        error = EngineStoppedError("the engine is no longer running")
        error.__cause__ = self._cause
        return error
