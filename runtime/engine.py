"""The facade and the loop: schedule, launch, sample, deliver; knows no kernel and no HTTP."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from umbel.lang.errors import (
    EngineError,
    EngineStoppedError,
    UmbelError,
)
from umbel.lang.graph import RequestGraph
from umbel.lang.results import NodeResult, RunOptions

from .config import EngineConfig, config_of
from .encode_ahead import encode_ahead
from .engine_session import EngineSession
from .engine_stats import StepCounters, share
from .forward_pass import ForwardPasses, LaunchedPass, PassParts, PassResults
from .grammar import GrammarCompiler, TokenBitmask
from .grammar.device_grammars import DeviceGrammars
from .graph_executor import GraphExecutor
from .kv_cache import Holds, PageAllocator, RadixCache
from .model_runner.runner import Runner
from .pass_retry import PassRetry
from .prefix_bound import PrefixBound
from .program_run import EventSink, ProgramRun
from .prompt_scorer import PromptScorer
from .prompt_scores import PromptScores
from .request import Request
from .request_queue import PrefixRoom
from .row_pieces import RowPieces
from .sampling.device_sampler import HostSampler, TokenSampler
from .scheduler import Scheduler
from .tokenizer import Tokenizer
from .watchdog import StepAbandonedError, StepWatch

logger = logging.getLogger(__name__)

# commands encode prompts, of which a thousand may come at once: a step is launched between them
_COMMANDS_S = 0.005

_MAX_WAIT_S = 3600.0  # a lock takes no time limit of centuries


class Engine:
    """Runs request graphs on one model.

    One thread owns everything below; others talk to it through `post`. With `start=False` there
    is no thread and the caller drives the engine by `step` (tests). A compiler given as `grammar`
    is shared: its owner closes it. `sampler` draws tokens where the logits are; the host's by
    default.

    What goes wrong for one request fails its node. A pass that raises is taken back and its
    requests run again, until those that can't are found (see PassRetry), and a defect in a run's
    graph ends that run (see GraphExecutor). The scheduler's and the cache's state is everybody's:
    where that breaks, or the device does, no result could be trusted, so the engine stops, and all
    that has not ended fails with EngineStoppedError, whose cause is the defect. So it does when a
    step takes longer than `step_timeout_s`.
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
        self._budget = limits.max_step_tokens
        most_rows = min(limits.max_running, limits.max_step_tokens)  # that sample in one pass
        owns_device = sampler is not None
        sampler = sampler or HostSampler(runner.vocab_size, most_rows)
        on_gpu = sampler.samples.device.type == "cuda"
        self._overlap = owns_device if config.overlap is None else config.overlap
        self._results: PassResults | None = None  # of the last pass, not looked at yet
        self._bound = PrefixBound() if config.track_bound else None
        self._watch = StepWatch(config.step_timeout_s or None, self._give_up)
        self.executor = GraphExecutor(
            tokenizer, self._grammar, self, max_seq_len, config.jump_forward
        )
        self._pieces = RowPieces(self._watch)
        self._prompts = PromptScorer(
            self.scheduler,
            self.cache,
            runner.num_slots,
            self.executor.next_request_id,
            self._pieces,
        )
        self._grammars = DeviceGrammars(sampler.arena)
        self._retry = PassRetry(self.scheduler, self._fail, limits.max_step_tokens)
        self._passes = ForwardPasses(
            PassParts(
                runner,
                sampler,
                TokenBitmask(most_rows, runner.vocab_size, pin_memory=on_gpu),
                self._grammars,
                tokenizer,
                self.executor,
                self._prompts,
                self._pieces,
                self._overlap,
            ),
            self._retry,
            self._watch,
            self._fail,
        )
        self._counters = StepCounters()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._drain_until: float | None = None  # new runs are refused from when this is set
        self._stopping = False
        self._stopped = False
        self.stopped = threading.Event()  # set when everything has been told and released
        self._cause: BaseException | None = None
        self._thread: threading.Thread | None = None
        if start:
            self._thread = threading.Thread(target=self._loop, name="umbel-engine", daemon=True)
        self._owner = self._thread  # the thread that all but what clients call belongs to
        if self._thread is not None:
            self._thread.start()
            self._watch.start()

    @classmethod
    def from_model(cls, ref: str, **options: Any) -> Self:
        """Load a model by reference and start an engine; options are EngineConfig's fields.

        Raises ModelLoadError, EngineConfigError.
        """
        from .model_loading import load_parts  # imports the models, which no test runner needs

        config = config_of(options)
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
        with self._wake:
            if self._drain_until is not None and not self._stopping:
                raise EngineStoppedError("the engine is closing: it takes no new runs")
            self.post(lambda: self.executor.register(run))
        return EngineSession(_Link(self, run))

    def close(self, drain: float = 0.0) -> None:
        """Take no new runs, let those that are here end within `drain` seconds, and stop.

        What has not ended then (with 0, at once) fails with EngineStoppedError. Idempotent: the
        shortest time of several calls counts. Called on the engine's own thread, by a sink, it
        returns at once, and the rest follows.
        """
        with self._wake:
            until = time.monotonic() + drain
            if self._drain_until is None or until < self._drain_until:
                self._drain_until = until
            self._stopping = self._stopping or drain <= 0
            self._wake.notify_all()
        if self._thread is None:
            while not self._is_drained() and not self._stopped:
                if not self.step():
                    time.sleep(0.001)  # something is being compiled on another thread
            self._shut_down()
        elif self._owner is not threading.current_thread():
            self.stopped.wait()
            if not self._watch.is_abandoned:  # else it may hang for good
                self._thread.join()

    def _is_drained(self) -> bool:
        """Whether the engine is closing and has nothing left to wait for."""
        until = self._drain_until
        if until is None:
            return False
        return time.monotonic() >= until or not (self.executor.runs or self._inbox)

    def stats(self) -> dict[str, float]:
        """Return counters since the start, and where things stand; safe from any thread.

        `engine_stats.COUNTERS` and `GAUGES` say what each means.
        """
        stats, counters, passes = self.scheduler.stats, self._counters, self._passes
        least = self._bound.least_prefill if self._bound is not None else 0
        prompt = self._bound.prompt_tokens if self._bound is not None else 0
        programs = self.executor.reports.sums
        useful = stats.tokens_prefilled + stats.tokens_decoded + stats.tree_tokens
        return {
            "steps": counters.steps,
            "failed_steps": stats.failed_steps,
            "step_s": counters.step_s,
            "forward_s": passes.forward_s,
            "wait_s": passes.wait_s,
            "host_s": counters.host_s,
            "budget_tokens": counters.budget_tokens,
            "step_tokens": counters.step_tokens,
            "useful_tokens": useful - passes.num_dropped,
            "tokens_prefilled": stats.tokens_prefilled,
            "tokens_decoded": stats.tokens_decoded,
            "tree_tokens": stats.tree_tokens,
            "cached_tokens": stats.cached_tokens,
            "retractions": stats.retractions,
            "program_retractions": stats.program_retractions,
            "memory_shortages": self._retry.num_memory_shortages
            + self._pieces.num_memory_shortages,
            "retried": self._retry.num_retried,
            "grammars_refused": self._grammars.num_refused,
            "prompt_tokens": self._counters.prompt_tokens,
            "least_prefill": least,
            "hit_rate": share(stats.cached_tokens, self._counters.prompt_tokens),
            "hit_rate_bound": share(prompt - least, prompt),
            "programs": self.executor.reports.num_programs,
            "queue_s": programs.queue_s,
            "grammar_s": programs.grammar_s,
            "prefill_s": programs.prefill_s,
            "decode_s": programs.decode_s,
            "tool_s": programs.tool_s,
            "saved_tokens": programs.saved_tokens,
            "kv_slots": self._allocator.num_slots,
            "kv_slots_free": self.scheduler.num_free,
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
            "active_programs": len(self.executor.runs),
            "device_grammars": self._grammars.num_held,
            "step_limit": self._retry.limit or self._budget,
        }

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """What each token id spells."""
        return self.tokenizer.token_bytes

    @property
    def stop_cause(self) -> BaseException | None:
        """Why the engine stopped, where that was nobody's wish."""
        return self._cause

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a literal text has by itself."""
        return len(self.tokenizer.encode_text(text))

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

        if self._owner is threading.current_thread():
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

    @property
    def prefix_room(self) -> PrefixRoom:
        """The room that shared prefixes have."""
        num_tokens = self._allocator.num_slots if self.config.prefix_cache else 0
        return PrefixRoom(self.config.page_size, num_tokens)

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestRejectedError."""
        self.scheduler.add(request)
        context = request.num_context if request.tree_parents else len(request.token_ids)
        if not request.is_prefetch:
            self._counters.prompt_tokens += context
        if self._bound is not None and not request.is_prefetch:
            self._bound.add_prompt(request.namespace, request.token_ids[:context])

    def finish(self, request: Request, keep: Sequence[int]) -> None:
        """Release a request's KV but for the rows in `keep`."""
        if self._bound is not None:
            rows = [*range(request.num_shared), *keep]
            self._bound.add_computed(request.namespace, [request.token_ids[row] for row in rows])
        self._grammars.release(request.request_id)
        self.scheduler.finish(request, keep)

    def abort(self, request: Request) -> None:
        """Release a request in whatever state it is."""
        self._grammars.release(request.request_id)
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
        batch = self._retry.schedule()
        launched: LaunchedPass | None = None
        budget = self._retry.limit or self._budget
        if batch is not None:
            launched = self._passes.launch(batch)
        landed, self._results = self._results, None
        if landed is not None:
            self._passes.deliver(landed)
        if launched is not None:
            results = self._passes.sample(launched)
            if self._overlap:
                self._results = results
            else:
                self._passes.deliver(results)
        rejected = self.scheduler.take_rejected()
        for request, error in rejected:  # after the pass, which a sibling may have been in
            self._fail(request, error)
        self.executor.flush()
        if self.config.check_accounting:
            self.scheduler.check()
        if batch is not None or landed is not None:
            device_s = self._passes.forward_s + self._passes.wait_s
            num_tokens = 0 if batch is None else batch.num_tokens
            seconds = time.perf_counter() - started
            self._counters.step_done(num_tokens, budget, seconds, device_s)
        # the ends of what was rejected or delivered may have made others ready
        return batch is not None or landed is not None or bool(rejected) or bool(self._inbox)

    def _run_commands(self) -> None:
        """Run what was posted; with overlap, no longer than the device has work meanwhile.

        A device that has none waits for a few milliseconds of commands, not for all of them.
        """
        until = time.perf_counter() + _COMMANDS_S if self._overlap else math.inf
        while self._inbox:
            self._inbox.popleft()()
            if time.perf_counter() > until and (self._results is None or self._results.is_ready):
                break

    def _fail(self, request: Request, error: UmbelError) -> None:
        """Fail what a request was for, if that has not ended."""
        if self.executor.is_live(request):
            self.executor.request_failed(request, error)
        elif request.is_prefetch:
            self.scheduler.abort(request)  # who begins with it will see for itself
        else:
            self._prompts.fail(request, error)

    def _loop(self) -> None:
        try:
            while not self._is_drained():
                if self.step():
                    continue
                with self._wake:
                    if self._inbox or self._is_drained():
                        continue
                    wait = self._seconds_to_wait()
                    if wait > 0:
                        self._wake.wait(wait)
        except StepAbandonedError:
            return  # another thread has told everybody, and nothing is ours any more
        except BaseException as cause:
            logger.exception("the engine stopped")
            self._cause = cause
        self._shut_down()

    def _seconds_to_wait(self) -> float:
        """Return how long nothing will be due, if no command comes."""
        wait = _MAX_WAIT_S
        deadline = self.executor.next_deadline()
        for until in (deadline, self._drain_until):
            if until is not None:
                wait = min(wait, until - time.monotonic())
        return wait

    def _give_up(self, cause: EngineError) -> None:
        """End the engine whose thread is stuck in a pass; called on the watchdog's thread.

        The pass may still be running, so its slots and its memory stay as they are.
        """
        logger.error("the engine stopped: %s", cause)
        self._cause = cause
        self._owner = threading.current_thread()
        self._shut_down(release=False)

    def _shut_down(self, release: bool = True) -> None:
        """Fail what has not ended, and release everything. Idempotent."""
        with self._wake:
            self._stopping = True
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
            if release:
                for request in requests:
                    self.abort(request)
                self._prompts.close()
        except Exception:  # what broke the engine may have broken this too; nobody needs it now
            logger.exception("the requests that were left could not be released")
        if self._owns_grammar:
            self._grammar.close()
        self._watch.close()
        self.stopped.set()

    def _stopped_error(self) -> EngineStoppedError:
        error = EngineStoppedError("the engine is no longer running")
        error.__cause__ = self._cause
        return error


class _Link:
    """A session's way to the engine: commands for its thread."""

    def __init__(self, engine: Engine, run: ProgramRun) -> None:
        self._engine, self._run = engine, run

    def extend(self, piece: RequestGraph, failed: Mapping[int, UmbelError]) -> None:
        engine = self._engine
        encode_ahead(engine.executor.rows, piece)
        engine.post(lambda: engine.executor.extend(self._run, piece, failed))

    def cancel(self, nodes: list[int] | None) -> None:
        self._engine.post_if_running(lambda: self._engine.executor.cancel(self._run, nodes))

    def close(self) -> None:
        self._engine.post_if_running(lambda: self._engine.executor.close(self._run))
