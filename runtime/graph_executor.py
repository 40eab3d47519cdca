"""Walks submitted graphs inside the engine, with no Python of the user between nodes.

Starts the nodes that are ready, and finds what is ready once they have ended. Knows graphs, events
and time limits; what a gen or a select does meanwhile is `NodeTasks`'s.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

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
    RunOptions,
)

from .deadlines import Deadlines
from .defects import defect, node_error
from .grammar.compiler import GrammarCompiler
from .live_places import LivePlaces
from .node_places import NodePlaces
from .node_tasks import NodeTasks, TaskParts
from .program_report import ProgramReports
from .program_run import EventSink, NodeTask, ProgramRun
from .request import Request
from .request_queue import RequestQueue
from .token_row import RowBuilder, TokenRow
from .tokenizer import Tokenizer
from .trunks import Trunks

logger = logging.getLogger(__name__)


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
        least_jump: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = RowBuilder(tokenizer, max_seq_len)
        self._places = NodePlaces(self.rows)
        self._clock = clock
        self._deadlines: Deadlines[tuple[int, int | None]] = Deadlines()  # of a run, of a node
        parts = TaskParts(
            tokenizer, self.rows, self._places, grammar, queue, max_seq_len, least_jump, clock
        )
        self.tasks = NodeTasks(parts, self._deadlines, self)
        self._live = LivePlaces(queue.holds, self.rows)
        self._trunks = Trunks(self.rows, queue, self.tasks.next_request_id, max_seq_len)
        self._run_ids = itertools.count()
        self.runs: dict[int, ProgramRun] = {}
        self.reports = ProgramReports()
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
        # clients are told first, whatever state the queue is in
        requests = self.tasks.forget_requests() + self._trunks.stop()
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
                self.tasks.fail(task, error)

    def flush(self) -> None:
        """Deliver pending events and forget runs that are over."""
        dirty, self._dirty = self._dirty, {}
        for run in dirty.values():
            if not run.deliver():
                self._end_run(run, CancelledError("the run's event sink failed"))
            if not run.is_idle:
                continue
            if run.is_closed:
                if self.runs.pop(run.run_id, None) is not None:
                    self.reports.ended(run.run_id, run.num_nodes, run.times, self._clock())
                self._live.over(run)
                self._trunks.over(run)
                self._deadlines.discard((run.run_id, None))
            else:
                run.times.idles(self._clock())

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
            self.tasks.stop(run, node_id)
        for node_id, error in change.failed:
            self.tasks.stop(run, node_id)
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
            self.emit(run, NodeFinished(node.id, result))
        return run.state.finish(node.id, result)

    def _tell_failed(self, run: ProgramRun, node_id: int, error: UmbelError) -> None:
        if node_id in run.ended:
            return
        run.ended.add(node_id)
        run.times.num_failed += 1
        if run.over is None:
            self._live.ended(run, node_id, failed=True)
        if node_id not in run.failed:
            self.emit(run, NodeFailed(node_id, to_wire(error)))

    def _end_run(self, run: ProgramRun, error: UmbelError) -> None:
        """Fail every node of a run that has not ended, those that will still come too."""
        run.over = error
        for node_id in list(run.tasks):
            self.tasks.stop(run, node_id)
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
                self.tasks.start_gen(run, node, op, before, row)
                return None
            case Select():
                if resolved is not None:
                    self._places.after_select(run, node, before, resolved.text)
                    return resolved
                return self.tasks.start_select(run, node, op, before, row)
            case _:
                return self._places.append(run, node, op, before)

    # --- what becomes of tasks --------------------------------------------------------------

    def emit(self, run: ProgramRun, event: Event) -> None:
        """See TaskOwner."""
        run.events.append(event)
        self._dirty[run.run_id] = run

    def task_ended(self, task: NodeTask, result: NodeResult) -> None:
        """See TaskOwner."""
        self._change(task.run, lambda: self._computed(task, result))

    def task_failed(self, task: NodeTask, error: UmbelError) -> None:
        """See TaskOwner."""
        self._change(task.run, lambda: task.run.state.fail(task.node.id, error))
