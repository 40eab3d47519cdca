"""All of an engine that one thread owns: its parts, and one step of them.

Knows requests and passes; nothing of threads, clients, or when to step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from umbel.lang.errors import UmbelError

from .config import EngineConfig
from .engine_stats import StepCounters, share
from .forward_pass import ForwardPasses, LaunchedPass, PassParts, PassResults
from .grammar import GrammarCompiler, TokenBitmask
from .grammar.device_grammars import DeviceGrammars
from .graph_executor import GraphExecutor
from .kv_cache import Holds, PageAllocator, RadixCache
from .model_runner.runner import Runner
from .pass_retry import PassRetry
from .prefix_bound import PrefixBound
from .prompt_scorer import PromptScorer
from .prompt_scores import PromptScores
from .request import Request
from .request_queue import PrefixRoom
from .row_pieces import RowPieces
from .sampling.device_sampler import HostSampler, TokenSampler
from .scheduler import Scheduler, SchedulerLimits
from .tokenizer import Tokenizer
from .watchdog import StepWatch

logger = logging.getLogger(__name__)

_LEAST_JUMP = 3  # forced tokens that are jumped over where passes overlap


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What an engine runs on. A sampler of None is the host's."""

    runner: Runner
    tokenizer: Tokenizer
    grammar: GrammarCompiler
    sampler: TokenSampler | None
    max_seq_len: int


class EngineCore:
    """Scheduler, cache, graphs and passes of one engine, and the graph executor's RequestQueue.

    Every method but `stats` is called on the thread that owns it. `post_if_running` hands that
    thread a command from any other.
    """

    def __init__(
        self,
        model: ModelParts,
        config: EngineConfig,
        watch: StepWatch,
        post_if_running: Callable[[Callable[[], None]], None],
    ) -> None:
        runner, tokenizer, sampler = model.runner, model.tokenizer, model.sampler
        self._config = config
        self.post_if_running = post_if_running
        limits = config.limits("cpu" if sampler is None else sampler.samples.device.type)
        self._allocator = PageAllocator(runner.num_slots, config.page_size)
        self.cache = RadixCache(config.page_size)
        self.scheduler = Scheduler(
            self.cache,
            self._allocator,
            SchedulerLimits(limits.max_step_tokens, limits.max_running),
            policy=config.policy,
            eviction=config.eviction,
            cache_enabled=config.prefix_cache,
        )
        self._budget = limits.max_step_tokens
        self.overlaps = (sampler is not None) if config.overlap is None else config.overlap
        self._results: PassResults | None = None  # of the last pass, not looked at yet
        self._bound = PrefixBound() if config.track_bound else None
        self._counters = StepCounters()
        # with overlap a row is in the next pass already, whose sample a jump wastes; and that jump
        # makes a pass of decodes a mixed one, an eighth longer with 64 rows of an 8B model
        least_jump = (_LEAST_JUMP if self.overlaps else 1) if config.jump_forward else 0
        self.executor = GraphExecutor(tokenizer, model.grammar, self, model.max_seq_len, least_jump)
        self._pieces = RowPieces(watch)
        self._prompts = PromptScorer(
            self.scheduler,
            self.cache,
            runner.num_slots,
            self.executor.tasks.next_request_id,
            self._pieces,
        )
        self._retry = PassRetry(self.scheduler, self._fail, limits.max_step_tokens)
        most_rows = min(limits.max_running, limits.max_step_tokens)  # that sample in one pass
        sampler = sampler or HostSampler(runner.vocab_size, most_rows)
        on_gpu = sampler.samples.device.type == "cuda"
        self._grammars = DeviceGrammars(sampler.arena)
        self._passes = ForwardPasses(
            PassParts(
                runner,
                sampler,
                TokenBitmask(most_rows, runner.vocab_size, pin_memory=on_gpu),
                self._grammars,
                tokenizer,
                self.executor.tasks,
                self._prompts,
                self._pieces,
                self.overlaps,
            ),
            self._retry,
            watch,
            self._fail,
        )

    @property
    def device_is_idle(self) -> bool:
        """Whether the device has nothing to do until the next pass."""
        return self._results is None or self._results.is_ready

    def step(self, started: float) -> bool:
        """Run one forward pass; return whether there may be more to do at once.

        With overlap the pass of this step is launched before what the last one brings is looked at:
        the host works on that while the device computes. A row whose sample is not known yet runs
        on with it all the same; where it turns out to have ended, what was computed is dropped.
        `started` is when the step began, on the performance counter: commands come before it.
        """
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
            if self.overlaps:
                self._results = results
            else:
                self._passes.deliver(results)
        rejected = self.scheduler.take_rejected()
        for request, error in rejected:  # after the pass, which a sibling may have been in
            self._fail(request, error)
        self.executor.flush()
        if self._config.check_accounting:
            self.scheduler.check()
        if batch is not None or landed is not None:
            device_s = self._passes.forward_s + self._passes.wait_s
            num_tokens = 0 if batch is None else batch.num_tokens
            seconds = time.perf_counter() - started
            self._counters.step_done(num_tokens, budget, seconds, device_s)
        # the ends of what was rejected or delivered may have made others ready
        return batch is not None or landed is not None or bool(rejected)

    def _fail(self, request: Request, error: UmbelError) -> None:
        """Fail what a request was for, if that has not ended."""
        if self.executor.tasks.is_live(request):
            self.executor.tasks.request_failed(request, error)
        elif request.is_prefetch:
            self.scheduler.abort(request)  # who begins with it will see for itself
        else:
            self._prompts.fail(request, error)

    def stop(self, error: UmbelError, *, release: bool) -> None:
        """Fail all that has not ended; with `release` give back what it holds, and the model.

        Who still holds the engine, to read its counters, holds no weights and no KV by that.
        """
        requests = self.executor.stop(error)
        if not release:
            return
        try:
            for request in requests:
                self.abort(request)
            self._prompts.close()
        except Exception:  # what broke the engine may have broken this too; nobody needs it now
            logger.exception("the requests that were left could not be released")
        self._results = None
        self._grammars.close()
        self._passes.close()

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

    # --- the queue that the graph executor uses -------------------------------------------

    @property
    def holds(self) -> Holds:
        """What live programs hold of the cache."""
        return self.scheduler.holds

    @property
    def prefix_room(self) -> PrefixRoom:
        """The room that shared prefixes have."""
        num_tokens = self._allocator.num_slots if self._config.prefix_cache else 0
        return PrefixRoom(self._config.page_size, num_tokens)

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
