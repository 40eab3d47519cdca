"""Gens and selects while they run: from a ready node to its requests, and from those to a result.

Knows rows, tasks and what is made for them on other threads; nothing of what follows a node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import msgspec

from umbel.lang.choice_scoring import only_choice
from umbel.lang.errors import ProgramError, UmbelError
from umbel.lang.graph import GraphNode
from umbel.lang.ir import Gen, Select
from umbel.lang.results import Event, NodeResult, NodeStarted, TextDelta

from .deadlines import Deadlines
from .defects import defect, node_error
from .gen_start import GenStarter
from .gen_task import GenTask, check_gen, check_samples
from .grammar.compiler import GrammarCompiler
from .grammar.matcher import CompiledGrammar
from .healing import Healing
from .node_places import NodePlaces
from .program_run import NodeTask, Place, ProgramRun
from .request import UNKNOWN_TOKEN, Request
from .request_queue import RequestQueue
from .select_start import begin_select
from .select_task import SelectTask, TreeScoring
from .token_row import RowBuilder, TokenRow
from .tokenizer import Tokenizer

T = TypeVar("T")


class TaskOwner(Protocol):
    """Who is told what becomes of tasks."""

    def emit(self, run: ProgramRun, event: Event) -> None:
        """Deliver an event of a run when the step is over."""
        ...

    def task_ended(self, task: NodeTask, result: NodeResult) -> None:
        """Go on with what follows a node; its task is forgotten."""
        ...

    def task_failed(self, task: NodeTask, error: UmbelError) -> None:
        """Fail a node, whose task is forgotten, with all that builds on it."""
        ...


@dataclass(frozen=True, slots=True)
class TaskParts:
    """What tasks are made with."""

    tokenizer: Tokenizer
    rows: RowBuilder
    places: NodePlaces
    grammar: GrammarCompiler
    queue: RequestQueue
    max_seq_len: int
    least_jump: int  # forced tokens that are jumped over; 0: none ever are
    clock: Callable[[], float]


class NodeTasks:
    """All nodes of one engine that run. Every method is called on the engine's thread.

    `deadlines` are of runs and of nodes; these add and discard their own.
    """

    def __init__(
        self, parts: TaskParts, deadlines: Deadlines[tuple[int, int | None]], owner: TaskOwner
    ) -> None:
        self._parts = parts
        self._deadlines = deadlines
        self._owner = owner
        self._places, self._queue, self._clock = parts.places, parts.queue, parts.clock
        self._starter = GenStarter(parts.tokenizer, parts.rows, parts.max_seq_len)
        self._vocab_size = parts.tokenizer.vocabulary().size
        self._request_ids = itertools.count()
        self._by_request: dict[int, tuple[NodeTask, GenTask | TreeScoring]] = {}

    def next_request_id(self) -> int:
        """Return the id of one more request, of the engine's own making."""
        return next(self._request_ids)

    def stop(self, run: ProgramRun, node_id: int) -> None:
        """Drop a node's task and its requests, wherever they are. Idempotent."""
        task = run.tasks.get(node_id)
        if task is None:
            return
        self._forget(task)
        for request in task.requests():
            if self._by_request.pop(request.request_id, None) is not None:
                self._queue.abort(request)

    def fail(self, task: NodeTask, error: UmbelError) -> None:
        """Drop a task and fail its node."""
        self.stop(task.run, task.node.id)
        self._owner.task_failed(task, error)

    def forget_requests(self) -> list[Request]:
        """Forget which task each request belongs to, and return those left to be aborted."""
        requests = [part.request for _, part in self._by_request.values()]
        self._by_request.clear()
        return requests

    # --- what the engine reports ------------------------------------------------------------

    def task_of(self, request: Request) -> tuple[NodeTask, GenTask | TreeScoring]:
        """Return the task that a request belongs to."""
        return self._by_request[request.request_id]

    def gens_of(self, requests: Iterable[Request]) -> list[GenTask]:
        """Return the gens that requests belong to."""
        by_request = self._by_request
        return cast("list[GenTask]", [by_request[each.request_id][1] for each in requests])

    def is_live(self, request: Request) -> bool:
        """Whether a request still belongs to a running task."""
        return request.request_id in self._by_request

    @property
    def live_ids(self) -> Set[int]:
        """The ids of requests that are live, now and later."""
        return self._by_request.keys()

    def scheduled(self, request: Request) -> None:
        """Note that a request runs in this step."""
        task, part = self._by_request[request.request_id]
        if not task.scheduled_s:
            task.scheduled_s = self._clock()
            self._owner.emit(task.run, NodeStarted(task.node.id))
        if request.num_computed == request.num_cached and request.num_retractions == 0:
            first = task.select is None or part is task.select.main
            if first and (not isinstance(part, GenTask) or part.sample_index == 0):
                task.cached_tokens = request.num_cached

    def token(self, request: Request, token_id: int) -> None:
        """Take a sampled id of a gen's request."""
        task, gen = self._by_request[request.request_id]
        assert isinstance(gen, GenTask)
        if not task.first_token_s:
            task.first_token_s = self._clock()
        row = request.token_ids
        runs_on = row[-1] == UNKNOWN_TOKEN  # with the id already
        if runs_on:
            row[-1] = token_id
        text = gen.accept(token_id)
        if gen.sample is None:
            if not runs_on:
                row.append(token_id)
            if gen.matcher is not None and self._parts.least_jump:
                num_tokens = len(gen.token_ids)
                text += gen.jump(self._parts.least_jump)
                task.forced_tokens += len(gen.token_ids) - num_tokens
        if text and gen.sample_index == 0:
            self._owner.emit(task.run, TextDelta(task.node.id, text))
        if gen.sample is None:
            return
        end = min(request.num_computed, request.num_prompt + gen.sample.num_kept)
        self._release(request, range(request.num_shared, end))
        self._finish_if_over(task)

    def _finish_if_over(self, task: NodeTask) -> None:
        """End a gen whose samples have ended, unless scores of its prompt are still to come."""
        is_scored = task.scores is None or task.scores.is_complete
        if is_scored and all(gen.sample is not None for gen in task.gens):
            self._finish_gen(task)

    def tree_scored(self, request: Request) -> None:
        """Note that every row of a select's tree has been computed."""
        task, scoring = self._by_request[request.request_id]
        assert isinstance(scoring, TreeScoring)
        assert task.select is not None
        scoring.is_done = True
        if task.select.is_done:
            self._finish_select(task, task.select, scoring)
        else:  # at once: the other tree may be waiting for the room that this one takes
            self._release(request, task.select.rows_to_keep(scoring, None))

    def request_failed(self, request: Request, error: UmbelError) -> None:
        """Fail the node of a request, and nothing else."""
        task, _ = self._by_request[request.request_id]
        self.fail(task, error)

    # --- gen --------------------------------------------------------------------------------

    def start_gen(
        self, run: ProgramRun, node: GraphNode, op: Gen, before: Place, row: TokenRow
    ) -> None:
        """Begin a gen that is ready, at `before`; raises what its node fails with."""
        check_gen(op, self._vocab_size)
        task = self._new_task(run, node, before, row, op.timeout)
        if op.constraint is None:
            self._heal(task)
        else:
            self._when_done(task, self._parts.grammar.submit(op.constraint), self._grammar_ready)

    def _when_done(
        self, task: NodeTask, future: Future[T], take: Callable[[NodeTask, Future[T]], None]
    ) -> None:
        """Go on with a task when something that is made on another thread is there."""

        def later() -> None:
            if task.is_ended:
                return
            try:
                take(task, future)
            except Exception as cause:  # the node's edge: see GraphExecutor
                self.fail(task, node_error(task.node, cause))

        if future.done():
            take(task, future)
        else:
            future.add_done_callback(lambda _: self._queue.post_if_running(later))

    def _grammar_ready(self, task: NodeTask, future: Future[CompiledGrammar]) -> None:
        cause = future.exception()
        if cause is not None and not isinstance(cause, Exception):
            # a panic in a native library, which is no Exception: it must not pass as one of ours
            raise defect("the constraint could not be compiled", cause)
        task.grammar = future.result()
        self._heal(task)

    def _heal(self, task: NodeTask) -> None:
        healing = self._starter.healing_of(task)
        if healing is None:
            self._queue_gen(task)
        else:
            self._when_done(task, self._parts.grammar.run(healing), self._healing_ready)

    def _healing_ready(self, task: NodeTask, future: Future[Healing | None]) -> None:
        task.healing = future.result()
        self._queue_gen(task)

    def _queue_gen(self, task: NodeTask) -> None:
        for gen in self._starter.begin(task, self._request_ids):
            if not task.gens:
                task.scores = self._starter.scores_of(
                    gen, lambda: self._finish_if_over(task), lambda e: self.fail(task, e)
                )
            gen.scores = task.scores
            task.gens.append(gen)
            self._add(task, gen, gen.request)
        if task.scores is not None:
            self._queue.score_prompt(task.scores, task.gens[0].request)

    def _finish_gen(self, task: NodeTask) -> None:
        samples = tuple(gen.sample for gen in task.gens if gen.sample is not None)
        if task.scores is not None:  # the samples have one prompt: the first one carries it
            scored = task.scores.result(self._parts.tokenizer.decode)
            first = msgspec.structs.replace(samples[0], prompt_logprobs=scored)
            samples = (first, *samples[1:])
        result = task.result(
            self._clock(),
            text=samples[0].text,
            samples=samples,
            completion_tokens=sum(gen.num_completion_tokens for gen in task.gens),
        )
        try:
            check_samples(task.node.op, samples)
            self._places.after_gen(task.run, task.node, task.place, result)
        except Exception as cause:  # the node's edge: see GraphExecutor
            self.fail(task, node_error(task.node, cause))
            return
        self._end_task(task, result)

    # --- select -----------------------------------------------------------------------------

    def start_select(
        self, run: ProgramRun, node: GraphNode, op: Select, before: Place, row: TokenRow
    ) -> NodeResult | None:
        """Begin a select that is ready, at `before`; return its result if it has one at once.

        Raises what its node fails with.
        """
        if not op.choices or len(set(op.choices)) < len(op.choices):
            raise ProgramError(f"select {op.name!r} needs choices, each given once")
        if len(op.choices) == 1:
            self._places.after_select(run, node, before, op.choices[0])
            return only_choice(op)
        task = self._new_task(run, node, before, row, op.timeout)
        parts = self._parts
        task.select = begin_select(task, parts.rows, self._request_ids, parts.max_seq_len)
        task.prompt_tokens = task.select.main.tree.num_context
        for scoring in task.select.trees:
            self._add(task, scoring, scoring.request)
        return None

    def _finish_select(self, task: NodeTask, select: SelectTask, last: TreeScoring) -> None:
        try:
            winner, table = select.decide()
            choice = select.select.choices[winner]
            self._places.after_select(task.run, task.node, task.place, choice)
        except Exception as cause:  # the node's edge: see GraphExecutor
            self.fail(task, node_error(task.node, cause))
            return
        self._release(last.request, select.rows_to_keep(last, winner))
        result = task.result(
            self._clock(),
            text=choice,
            scores=table,
            tree_tokens=sum(scoring.tree.num_tree for scoring in select.trees),
        )
        self._end_task(task, result)

    # --- tasks ------------------------------------------------------------------------------

    def _new_task(
        self, run: ProgramRun, node: GraphNode, place: Place, row: TokenRow, timeout: float | None
    ) -> NodeTask:
        task = NodeTask(run, node, place, row, ready_s=self._clock())
        run.tasks[node.id] = task
        if timeout is not None:
            self._deadlines.add((run.run_id, node.id), task.ready_s + timeout)
        return task

    def _add(self, task: NodeTask, part: GenTask | TreeScoring, request: Request) -> None:
        task.queued_s = task.queued_s or self._clock()
        self._queue.add(request)
        self._by_request[request.request_id] = (task, part)

    def _release(self, request: Request, keep: Sequence[int]) -> None:
        del self._by_request[request.request_id]
        self._queue.finish(request, keep)

    def _end_task(self, task: NodeTask, result: NodeResult) -> None:
        self._forget(task)
        self._owner.task_ended(task, result)

    def _forget(self, task: NodeTask) -> None:
        task.is_ended = True
        if task.scores is not None:
            task.scores.is_wanted = False
        del task.run.tasks[task.node.id]
        self._deadlines.discard((task.run.run_id, task.node.id))
