"""One run of a program on a backend: hands over pieces, keeps outcomes, wakes who waits.

Knows nothing of programs or states. Every wait ends: by the node's outcome, which the backend
delivers or a cancellation or deadline sets here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.lang.ended_run import EndedRun, read_error, refuse_append
from umbel.lang.errors import (
    BackendError,
    CancelledError,
    GenerationError,
    NodeTimeoutError,
    ProgramError,
    UmbelError,
    WireError,
    described,
    to_wire,
)
from umbel.lang.expressions import ValueExpr
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Join, Op, Text
from umbel.lang.results import Event, NodeFailed, NodeFinished, NodeResult, RunOptions

from .backends.base import Backend, Session
from .capability_check import check_op
from .passes import BatchTrunk, open_session
from .waiting import Register, block, wait

if TYPE_CHECKING:
    import asyncio

Listener = Callable[[Sequence[Event]], None]

_NOTHING: frozenset[str] = frozenset()


class GraphRun:
    """The language's `Run` over a backend's session.

    The body's thread (or loop) records nodes; the backend's threads deliver events to `_receive`.
    What both touch is guarded by `_lock`; callbacks are called outside it.
    """

    __slots__ = (
        "__weakref__",
        "_backend",
        "_batch",
        "_callbacks",
        "_deadline",
        "_flush_is_due",
        "_handled",
        "_is_ended",
        "_is_expired",
        "_is_sealed",
        "_listener",
        "_lock",
        "_loop",
        "_num_open",
        "_num_sent",
        "_on_block",
        "_options",
        "_outcomes",
        "_session",
        "_waiters",
        "exprs",
        "nodes",
    )

    def __init__(
        self,
        backend: Backend,
        options: RunOptions,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        listener: Listener | None = None,
        on_block: Callable[[bool], None] | None = None,
        batch: BatchTrunk | None = None,
    ) -> None:
        """`loop` is the one that the body runs on, if it is `async def`; `batch` is that of a row.

        `on_block` is told when the body's thread begins (True) and ends a wait.
        """
        self.nodes: list[GraphNode] = []
        self.exprs: dict[int, ValueExpr[Any]] | None = None if listener is None else {}
        self._backend = backend
        self._batch = batch
        self._options = options
        self._loop = loop
        self._listener = listener
        self._on_block = on_block
        self._session: Session | None = None
        self._num_sent = 0
        self._num_open = 0  # nodes sent that have no outcome
        self._outcomes: dict[int, NodeResult | WireError] = {}
        # made when needed: runs are many, and each container costs garbage collection
        self._waiters: dict[int, list[Callable[[], None]]] | None = None
        self._callbacks: tuple[Callable[[], None], ...] = ()  # called when the run has ended
        self._handled = _NOTHING  # addresses of failures the body was told of
        self._is_sealed = False  # the body has ended: no more nodes
        self._is_ended = False
        self._is_expired = False
        self._flush_is_due = False
        self._lock = threading.Lock()
        self._deadline = None if options.timeout is None else time.monotonic() + options.timeout

    # --- the language's side ---------------------------------------------------------------

    def add(self, op: Op, address: str, parent: int | None) -> int:
        """Record a node and return its id; see `umbel.lang.runner.Run`."""
        if type(op) is not Text:
            check_op(op, self._backend.name, self._backend.capabilities)
        if self._is_sealed:
            refuse_append()
        if parent is not None and self._outcomes:
            self._refuse_poisoned(parent)
        node_id = len(self.nodes)
        self.nodes.append(GraphNode(node_id, address, op, parent))
        if self._loop is not None and not self._flush_is_due:
            # whatever the body awaits next, what it wrote so far should run meanwhile
            self._flush_is_due = True
            self._loop.call_soon(self.flush)
        return node_id

    def result(self, node: int) -> NodeResult:
        """Wait for a node and return its result; see `umbel.lang.runner.Run`."""
        outcome = self._outcomes.get(node)
        if outcome is None:
            if self._loop is not None:
                is_join = isinstance(self.nodes[node].op, Join)
                what = "the join" if is_join else self._where(node)
                how = "`await joined.get(...)`" if is_join else "`await s.get(...)`"
                all_of_it = "`await joined`" if is_join else "`await s.wait()`"
                raise ProgramError(
                    f"{what} is not there yet, and waiting would block the event loop: use {how}, "
                    f"or {all_of_it} before reading"
                )
            self.flush()
            self._block_on(node)
            outcome = self._outcomes[node]
        if type(outcome) is NodeResult:
            return outcome
        raise self._read_error(node)

    async def aresult(self, node: int) -> NodeResult:
        """Wait for a node without blocking the loop; see `umbel.lang.runner.Run`."""
        self.flush()
        if node not in self._outcomes:
            await self.await_for(lambda wake: self._add_waiter(node, wake))
        outcome = self._outcomes[node]
        if type(outcome) is NodeResult:
            return outcome
        raise self._read_error(node)

    def failure(self, node: int) -> UmbelError | None:
        """Return a failed node's error; None if it has not failed (yet)."""
        return self._read_error(node) if isinstance(self._outcomes.get(node), WireError) else None

    def cancel(self, nodes: Sequence[int]) -> None:
        """Stop nodes that have not ended; they fail at once, whatever the backend does."""
        self.flush()
        live = [node for node in nodes if node not in self._outcomes]
        if not live:
            return
        session = self._session  # read once: the thread that ends the run drops it
        if session is not None:
            session.cancel(live)
        for node in live:
            self._handled |= {self.nodes[node].address}
        self._fail_here(live, lambda n: CancelledError(f"{self._where(n)} was cancelled"))

    # --- the runner's side -----------------------------------------------------------------

    @property
    def is_ended(self) -> bool:
        """Whether the body has ended and every node has its outcome."""
        return self._is_ended

    @property
    def deadline(self) -> float | None:
        """When the run's timeout passes, on the monotonic clock; None once it has passed."""
        return None if self._is_expired else self._deadline

    def bind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop that the body will run on, if that was not known at first."""
        self._loop = loop

    def flush(self, *, is_last: bool = False) -> None:
        """Hand all recorded nodes over as one piece; a backend that refuses fails them.

        `is_last` says that no nodes come after them.
        """
        self._flush_is_due = False
        if self._num_sent == len(self.nodes):
            return
        with self._lock:  # another thread may abort at any time: each node is counted once
            start = self._num_sent
            piece = RequestGraph(tuple(self.nodes[start:]), start)
            self._num_sent += len(piece.nodes)
            self._num_open += len(piece.nodes)
            is_over = self._is_sealed
        if self._is_expired or is_over:
            error = self._lateness if self._is_expired else self._cancellation
            self._fail_here([node.id for node in piece.nodes], error)
            return
        try:
            session = self._session
            if session is None:
                options = self._options
                if is_last:  # nothing went before: this piece is the whole graph
                    options = msgspec.structs.replace(options, is_whole=True)
                session = self._session = open_session(
                    self._backend, options, self._receive, batch=self._batch
                )
            session.extend(piece)
            if self._is_sealed:  # aborted meanwhile, perhaps before there was a session
                self._session = None
                session.cancel()
                session.close()
        except UmbelError as error:
            self._refused(piece, error)
        except Exception as error:  # a backend is foreign code: its failure must not leave waits
            refused = BackendError(
                f"{self._backend.name} refused the graph: {described(error)}",
                backend=self._backend.name,
            )
            refused.__cause__ = error
            self._refused(piece, refused)

    def seal(self) -> None:
        """Hand over the rest; the body has ended."""
        self.flush(is_last=True)
        self._is_sealed = True
        session = self._session
        if session is not None:
            session.close()
        if not self._num_open:  # else it is looked at when the last one ends
            self._end_if_done()

    def abort(self, error: UmbelError | None = None) -> None:
        """Stop everything; what has not ended fails with `error` (a CancelledError by default)."""
        with self._lock:
            self._is_sealed = True
            num_sent = len(self.nodes)
            self._num_open += num_sent - self._num_sent
            self._num_sent = num_sent
            session = self._session
        if session is not None:
            if self._num_open:
                session.cancel()
            session.close()
        live = [node for node in range(num_sent) if node not in self._outcomes]
        self._fail_here(live, lambda n: error or self._cancellation(n))
        self._end_if_done()

    def expire(self) -> None:
        """Fail what has not ended, and all that is still to come: the timeout has passed."""
        self._is_expired = True
        session = self._session
        if session is not None:
            session.cancel()
        live = [node for node in range(self._num_sent) if node not in self._outcomes]
        self._fail_here(live, self._lateness)

    def wait_end(self) -> None:
        """Block until the run has ended."""
        self.wait_for(self.on_end)

    async def await_end(self) -> None:
        """Wait on the running loop until the run has ended."""
        if not self._is_ended:
            await self.await_for(self.on_end)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back once the run has ended, at once if it has; from any thread."""
        with self._lock:
            if not self._is_ended:
                self._callbacks += (callback,)
                return
        callback()

    def unhandled_error(self, tail: int | None) -> UmbelError | None:
        """Return why a sequence failed, unless the body was told so and went on."""
        if tail is None or not isinstance(self._outcomes.get(tail), WireError):
            return None
        error = self._make_error(tail)
        return None if error.address in self._handled else error

    def ended(self) -> EndedRun:
        """Return what is left of a run whose body and nodes have ended."""
        outcomes = self._outcomes
        nodes = tuple(self.nodes)
        if len(outcomes) < len(nodes):  # written while the run was aborted from elsewhere
            missing = [node.id for node in nodes if node.id not in outcomes]
            outcomes = outcomes | {node: to_wire(self._cancellation(node)) for node in missing}
        return EndedRun(nodes, tuple(map(outcomes.__getitem__, range(len(nodes)))), self._backend)

    # --- waiting ---------------------------------------------------------------------------

    def _block_on(self, node: int) -> None:
        on_block = self._on_block  # which an abort drops meanwhile
        if on_block is not None:
            on_block(True)
        try:
            self.wait_for(lambda wake: self._add_waiter(node, wake))
        finally:
            if on_block is not None:
                on_block(False)

    def wait_for(self, register: Register) -> None:
        """Block until the callback that `register` is given is called; expire past the deadline."""
        block(register, self._deadline, self.expire)

    async def await_for(self, register: Register) -> None:
        """Do the same on the running loop."""
        await wait(register, self._deadline, self.expire)

    def _add_waiter(self, node: int, wake: Callable[[], None]) -> None:
        with self._lock:
            if node not in self._outcomes:
                if self._waiters is None:
                    self._waiters = {}
                self._waiters.setdefault(node, []).append(wake)
                return
        wake()

    # --- outcomes --------------------------------------------------------------------------

    def _receive(self, events: Sequence[Event]) -> None:
        """Take a batch of events; what has its outcome already keeps it."""
        outcomes = self._outcomes
        wake: Sequence[Callable[[], None]] = ()
        with self._lock:
            for event in events:
                outcome: NodeResult | WireError
                if type(event) is NodeFinished:
                    outcome = event.result
                elif type(event) is NodeFailed:
                    outcome = event.error
                else:
                    continue
                node = event.node
                if node in outcomes or not 0 <= node < self._num_sent:
                    continue
                outcomes[node] = outcome
                self._num_open -= 1
                if self._waiters:
                    wake = [*wake, *self._waiters.pop(node, ())]
        if self._listener is not None:
            self._listener(events)
        for callback in wake:
            callback()
        if self._is_sealed and not self._num_open:
            self._end_if_done()

    def _fail_here(self, nodes: Sequence[int], error: Callable[[int], UmbelError]) -> None:
        self._receive([NodeFailed(node, to_wire(error(node))) for node in nodes])

    def _refused(self, piece: RequestGraph, error: UmbelError) -> None:
        self._fail_here([node.id for node in piece.nodes], lambda _: error)

    def _end_if_done(self) -> None:
        with self._lock:
            if self._is_ended or self._num_open or not self._is_sealed:
                return
            self._is_ended = True
            callbacks, self._callbacks = self._callbacks, ()
        # let go of what the session holds, and of the cycle through it
        self._session = self._on_block = None
        for callback in callbacks:
            callback()

    # --- errors ----------------------------------------------------------------------------

    def _refuse_poisoned(self, parent: int) -> None:
        """Raise if the nearest node behind `parent` that was handed over has failed."""
        at: int | None = parent
        while at is not None and at >= self._num_sent:
            at = self.nodes[at].parent
        if at is not None and isinstance(self._outcomes.get(at), WireError):
            raise self._read_error(at)

    def _read_error(self, node: int) -> GenerationError:
        error = self._make_error(node)
        self._handled |= {error.address}
        return error

    def _make_error(self, node: int) -> GenerationError:
        outcome = self._outcomes[node]
        assert isinstance(outcome, WireError)
        return read_error(self.nodes[node], outcome)

    def _lateness(self, node: int) -> UmbelError:
        limit = self._options.timeout
        return NodeTimeoutError(f"{self._where(node)}: the run's timeout of {limit} s passed")

    def _cancellation(self, node: int) -> UmbelError:
        return CancelledError(f"{self._where(node)}: the run was cancelled")

    def _where(self, node: int) -> str:
        return self.nodes[node].label
