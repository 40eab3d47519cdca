"""Walks submitted graphs inside the engine, with no Python of the user between nodes.

Turns ready nodes into requests and finished requests into ready nodes. Knows graphs, rows, tasks
and time limits; never touches logits or pages.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from umbel.lang.choice_scoring import only_choice
from umbel.lang.errors import (
    CancelledError,
    NodeTimeoutError,
    ProgramError,
    UmbelError,
    to_wire,
)
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.graph_state import Changes, NodeStatus
from umbel.lang.ir import Gen, Pick, Select
from umbel.lang.results import (
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    NodeStarted,
    RunOptions,
    TextDelta,
)

from .deadlines import Deadlines
from .defects import defect, node_error
from .gen_start import GenStarter
from .gen_task import GenTask, check_gen, check_samples
from .grammar.compiler import GrammarCompiler
from .grammar.matcher import CompiledGrammar
from .healing import Healing
from .live_places import LivePlaces
from .node_places import NodePlaces
from .program_report import ProgramReports
from .program_run import EventSink, NodeTask, Place, ProgramRun
from .request import Request
from .request_queue import RequestQueue
from .select_start import begin_select
from .select_task import SelectTask, TreeScoring
from .token_row import RowBuilder, TokenRow
from .tokenizer import Tokenizer
from .trunks import Trunks

logger = logging.getLogger(__name__)
T = TypeVar("T")


class GraphExecutor:
    """All runs of one engine. Every method is called on the engine's thread.

    What goes wrong has one of three edges. An error of the tree, or a defect in what one node
    needs (its template, its grammar, its tokens), fails that node. A defect in a run's own
    bookkeeping ends that run. What the queue raises when a request leaves it is nobody's in
    particular, and is left to the engine.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        grammar: GrammarCompiler,
        queue: RequestQueue,
        max_seq_len: int,
        jump_forward: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.vocabulary()
        self.rows = RowBuilder(tokenizer)
        self._places = NodePlaces(self.rows)
        self._live = LivePlaces(queue.holds, self.rows)
        self._trunks = Trunks(self.rows, queue, self.next_request_id, max_seq_len)
        self._starter = GenStarter(tokenizer, self.rows, max_seq_len)
        self._grammar = grammar
        self._queue = queue
        self._max_seq_len = max_seq_len
        self._jump_forward = jump_forward
        self._clock = clock
        self._run_ids = itertools.count()
        self._request_ids = itertools.count()
        self.runs: dict[int, ProgramRun] = {}
        self.reports = ProgramReports()
        self._by_request: dict[int, tuple[NodeTask, GenTask | TreeScoring]] = {}
        self._deadlines: Deadlines[tuple[int, int | None]] = Deadlines()  # of a run, of a node
        self._dirty: dict[int, ProgramRun] = {}

    # --- runs -----------------------------------------------------------------------------

    def open(
        self,
        options: RunOptions,
        sink: EventSink,
        resolved: dict[int, NodeResult],
        failed: dict[int, UmbelError],
    ) -> ProgramRun:
        """Make a run; the one method that any thread may call.

        Nodes in `resolved` and `failed` have ended before, and give no events here.
        """
        return ProgramRun(next(self._run_ids), options, sink, dict(resolved), dict(failed))

    def register(self, run: ProgramRun) -> None:
        """Take up a run."""
        self.runs[run.run_id] = run
        self._trunks.opened(run)
        run.times.opened = self._clock()
        if run.options.timeout is not None:
            self._deadlines.add((run.run_id, None), self._clock() + run.options.timeout)

    def extend(
        self, run: ProgramRun, piece: RequestGraph, failed: Mapping[int, UmbelError]
    ) -> None:
        """Take in more of a run's graph; what comes when the run is over fails at once.

        Nodes of the piece in `failed` fail without an event.
        """
        run.failed.update(failed)
        run.num_nodes = piece.base + len(piece.nodes)
        run.times.goes_on(self._clock())
        if run.over is None:
            self._change(run, lambda: self._add_piece(run, piece))
        else:
            self._end_run(run, run.over)

    def cancel(self, run: ProgramRun, nodes: list[int] | None) -> None:
        """Cancel nodes that have not ended; ids that no piece has brought yet are left out."""
        if nodes is not None:
            nodes = [node for node in nodes if 0 <= node < len(run.state.nodes)]
        self._change(run, lambda: run.state.cancel(nodes))

    def close(self, run: ProgramRun) -> None:
        """Note that no more pieces come."""
        run.is_closed = True
        self._live.close(run)
        self._dirty[run.run_id] = run

    def stop(self, error: UmbelError) -> list[Request]:
        """Fail all that has not ended and deliver it; return the requests left to be aborted."""
        requests = [
            request
            for run in self.runs.values()
            for task in run.tasks.values()
            for request in task.requests()
            if request.request_id in self._by_request
        ]
        requests += self._trunks.stop()
        self._by_request.clear()  # clients are told first, whatever state the queue is in
        for run in list(self.runs.values()):
            self._end_run(run, error)
        self.flush()
        self.runs.clear()
        return requests

    @property
    def is_idle(self) -> bool:
        """Whether no node is compiling, waiting or running."""
        return not any(run.tasks for run in self.runs.values())

    def next_deadline(self) -> float | None:
        """Return the clock time of the earliest time limit still in force."""
        return self._deadlines.earliest()

    def expire(self) -> None:
        """Fail what has passed its time limit."""
        for run_id, node_id in self._deadlines.pop_due(self._clock()):
            run = self.runs.get(run_id)
            if run is None:
                continue  # it was over when its limit passed
            if node_id is None:
                limit = run.options.timeout
                self._end_run(run, NodeTimeoutError(f"the run did not finish within {limit} s"))
            elif (task := run.tasks.get(node_id)) is not None:
                assert isinstance(task.node.op, Gen | Select)
                limit = task.node.op.timeout
                error = NodeTimeoutError(f"{task.node.label} did not finish within {limit} s")
                self._fail_task(task, error)

    def flush(self) -> None:
        """Deliver pending events and forget runs that are over."""
        dirty, self._dirty = self._dirty, {}
        for run in dirty.values():
            if not run.deliver():
                self._end_run(run, CancelledError("the run's event sink failed"))
            if run.is_done:
                if self.runs.pop(run.run_id, None) is not None:
                    self.reports.ended(run.run_id, run.num_nodes, run.times, self._clock())
                self._live.over(run)
                self._trunks.over(run)
                self._deadlines.discard((run.run_id, None))
            elif run.is_idle:
                run.times.idles(self._clock())

    # --- what the engine reports ------------------------------------------------------------

    def next_request_id(self) -> int:
        """Return the id of one more request, of the engine's own making."""
        return next(self._request_ids)

    def task_of(self, request: Request) -> tuple[NodeTask, GenTask | TreeScoring]:
        """Return the task that a request belongs to."""
        return self._by_request[request.request_id]

    def is_live(self, request: Request) -> bool:
        """Whether a request still belongs to a running task."""
        return request.request_id in self._by_request

    def scheduled(self, request: Request) -> None:
        """Note that a request runs in this step."""
        task, part = self._by_request[request.request_id]
        if not task.scheduled_s:
            task.scheduled_s = self._clock()
            self._emit(task.run, NodeStarted(task.node.id))
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
        if request.num_known < len(request.token_ids):  # it runs on with the id already
            request.token_ids[-1] = token_id
            text = gen.accept(token_id)
        else:
            text = gen.accept(token_id)
            if gen.sample is None:
                request.token_ids.append(token_id)
        if gen.sample is None and self._jump_forward:
            num_tokens = len(gen.token_ids)
            text += gen.jump()
            task.forced_tokens += len(gen.token_ids) - num_tokens
        if text and gen.sample_index == 0:
            self._emit(task.run, TextDelta(task.node.id, text))
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
        self._fail_task(task, error)

    # --- the walk ---------------------------------------------------------------------------

    def _change(self, run: ProgramRun, change: Callable[[], Changes]) -> None:
        """Change a run's state and carry out what that implies, to the end."""
        try:
            todo = deque([change()])
            while todo:
                self._carry_out(run, todo.popleft(), todo)
        except Exception as cause:  # the run's edge: see the class
            logger.exception("run %d met a defect and is over", run.run_id)
            self._end_run(run, defect("the run's graph could not be followed", cause))
        self._dirty[run.run_id] = run

    def _carry_out(self, run: ProgramRun, change: Changes, todo: deque[Changes]) -> None:
        for node_id in change.cancelled:
            self._stop_task(run, node_id)
        for node_id, error in change.failed:
            self._stop_task(run, node_id)
            self._tell_failed(run, node_id, error)
        for node_id in change.ready:
            if run.state.status[node_id] is not NodeStatus.READY:
                continue  # a node that was ready with it met its join's policy first
            node = run.state.nodes[node_id]
            try:
                result = self._start(run, node)
            except Exception as cause:  # the node's edge: see the class
                error = node_error(node, cause)
                todo.append(run.state.fail(node_id, error))
                continue
            if result is not None:
                todo.append(self._finished(run, node, result))

    def _add_piece(self, run: ProgramRun, piece: RequestGraph) -> Changes:
        changes = run.state.add(piece)
        self._live.extend(run, piece)
        run.add_gangs(piece.nodes)
        return changes

    def _computed(self, task: NodeTask, result: NodeResult) -> Changes:
        self._live.computed(task.run, task.node.id)
        seconds = task.run.times.took(result, task.queued_s, task.requests())
        return self._finished(task.run, task.node, result, seconds)

    def _finished(
        self, run: ProgramRun, node: GraphNode, result: NodeResult, seconds: float = 0.0
    ) -> Changes:
        run.ended.add(node.id)
        self._live.ended(run, node.id)
        run.times.follows(node, seconds)
        if node.id not in run.resolved:
            self._emit(run, NodeFinished(node.id, result))
        return run.state.finish(node.id, result)

    def _tell_failed(self, run: ProgramRun, node_id: int, error: UmbelError) -> None:
        if node_id in run.ended:
            return
        run.ended.add(node_id)
        run.times.num_failed += 1
        if run.over is None:
            self._live.ended(run, node_id, failed=True)
        if node_id not in run.failed:
            self._emit(run, NodeFailed(node_id, to_wire(error)))

    def _end_run(self, run: ProgramRun, error: UmbelError) -> None:
        """Fail every node of a run that has not ended, those that will still come too."""
        run.over = error
        for node_id in list(run.tasks):
            self._stop_task(run, node_id)
        for node_id in range(run.num_nodes):  # past the state: its bookkeeping may be the defect
            self._tell_failed(run, node_id, error)
        self._live.over(run)
        self._trunks.over(run)
        self._dirty[run.run_id] = run

    def _start(self, run: ProgramRun, node: GraphNode) -> NodeResult | None:
        """Begin a ready node; return its result if it has one at once."""
        if node.id in run.failed:
            raise run.failed[node.id]
        before = run.place_after(node.parent)
        if before.row is None and not isinstance(node.op, Pick):
            raise ProgramError(
                f"{node.label} follows a gen with n > 1: pick one of its samples first"
            )
        resolved = run.resolved.get(node.id)
        row, op = before.row or TokenRow(), node.op
        match op:
            case Gen():
                if resolved is not None:
                    self._places.after_gen(run, node, before, resolved)
                    return resolved
                self._start_gen(run, node, op, before, row)
                return None
            case Select():
                if resolved is not None:
                    self._places.after_select(run, node, before, resolved.text)
                    return resolved
                return self._start_select(run, node, op, before, row)
            case _:
                return self._places.append(run, node, op, before)

    # --- gen --------------------------------------------------------------------------------

    def _start_gen(
        self, run: ProgramRun, node: GraphNode, op: Gen, before: Place, row: TokenRow
    ) -> None:
        check_gen(op, self._vocabulary.size)
        task = self._new_task(run, node, before, row, op.timeout)
        if op.constraint is None:
            self._heal(task)
        else:
            self._when_done(task, self._grammar.submit(op.constraint), self._grammar_ready)

    def _when_done(
        self, task: NodeTask, future: Future[T], take: Callable[[NodeTask, Future[T]], None]
    ) -> None:
        """Go on with a task when something that is made on another thread is there."""

        def later() -> None:
            if task.is_ended:
                return
            try:
                take(task, future)
            except Exception as cause:  # the node's edge: see the class
                self._fail_task(task, node_error(task.node, cause))

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
            self._when_done(task, self._grammar.run(healing), self._healing_ready)

    def _healing_ready(self, task: NodeTask, future: Future[Healing | None]) -> None:
        task.healing = future.result()
        self._queue_gen(task)

    def _queue_gen(self, task: NodeTask) -> None:
        for gen in self._starter.begin(task, self._request_ids):
            if not task.gens:
                task.scores = self._starter.scores_of(
                    gen, lambda: self._finish_if_over(task), lambda e: self._fail_task(task, e)
                )
            gen.scores = task.scores
            task.gens.append(gen)
            self._add(task, gen, gen.request)
        if task.scores is not None:
            self._queue.score_prompt(task.scores, task.gens[0].request)

    def _finish_gen(self, task: NodeTask) -> None:
        samples = tuple(gen.sample for gen in task.gens if gen.sample is not None)
        if task.scores is not None:  # the samples have one prompt: the first one carries it
            scored = task.scores.result(self._tokenizer.decode)
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
        except Exception as cause:  # the node's edge: see the class
            self._fail_task(task, node_error(task.node, cause))
            return
        self._end_task(task, result)

    # --- select -----------------------------------------------------------------------------

    def _start_select(
        self, run: ProgramRun, node: GraphNode, op: Select, before: Place, row: TokenRow
    ) -> NodeResult | None:
        if not op.choices or len(set(op.choices)) < len(op.choices):
            raise ProgramError(f"select {op.name!r} needs choices, each given once")
        if len(op.choices) == 1:
            self._places.after_select(run, node, before, op.choices[0])
            return only_choice(op)
        task = self._new_task(run, node, before, row, op.timeout)
        task.select = begin_select(task, self.rows, self._request_ids, self._max_seq_len)
        task.prompt_tokens = task.select.main.tree.num_context
        for scoring in task.select.trees:
            self._add(task, scoring, scoring.request)
        return None

    def _finish_select(self, task: NodeTask, select: SelectTask, last: TreeScoring) -> None:
        try:
            winner, table = select.decide()
            choice = select.select.choices[winner]
            self._places.after_select(task.run, task.node, task.place, choice)
        except Exception as cause:  # the node's edge: see the class
            self._fail_task(task, node_error(task.node, cause))
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
        self._forget_task(task)
        self._change(task.run, lambda: self._computed(task, result))

    def _fail_task(self, task: NodeTask, error: UmbelError) -> None:
        self._stop_task(task.run, task.node.id)
        self._change(task.run, lambda: task.run.state.fail(task.node.id, error))

    def _stop_task(self, run: ProgramRun, node_id: int) -> None:
        """Drop a node's requests, wherever they are. Idempotent."""
        task = run.tasks.get(node_id)
        if task is None:
            return
        self._forget_task(task)
        for request in task.requests():
            if self._by_request.pop(request.request_id, None) is not None:
                self._queue.abort(request)

    def _forget_task(self, task: NodeTask) -> None:
        task.is_ended = True
        if task.scores is not None:
            task.scores.is_wanted = False
        del task.run.tasks[task.node.id]
        self._deadlines.discard((task.run.run_id, task.node.id))

    def _emit(self, run: ProgramRun, event: Event) -> None:
        run.events.append(event)
        self._dirty[run.run_id] = run
