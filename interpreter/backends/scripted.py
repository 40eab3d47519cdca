"""Answers from a script, without a model: deterministic, for tests, docs and examples.

One thread serves all runs of a backend; latencies are timers, so that nothing waits in it.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

from umbel.lang.errors import BackendError, NodeTimeoutError, ProgramError, UmbelError, described
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Select, SelectMethod
from umbel.lang.results import NodeResult, RunOptions, Sample, Timings, Usage

from ..executor import Executor
from .base import Capabilities, EventSink, TokenCounter
from .own_process import OwnProcess
from .scripted_replies import (
    Answer,
    Chunks,
    Reply,
    Script,
    ScriptedCall,
    choose,
    play,
    unscripted,
)

CAPABILITIES = Capabilities(
    token_native=False,
    regex=True,
    json_schema=True,
    grammar=True,
    choices=True,
    select_methods=frozenset(get_args(SelectMethod)),
    logprobs=True,
    prompt_logprobs=True,
    heal=True,
    thinking=True,
    seed=True,
    stop_regex=True,
)


class ScriptedBackend:
    """Answers gens and selects from a script.

    `script` maps a name or an address to an answer: text, a `Reply` (latencies, failures, token
    splits, scores), a list of them (one for each use in a run, in the order in which the nodes
    become ready; one for each sample), or a callable that gets a `ScriptedCall`. A callable in
    place of the mapping answers everything. A select's answer is one of its choices. Without a
    script, a gen answers its name or a small value of its constraint, a select its first choice.

    `latency` passes before every answer (seconds). `num_runs` and `num_pieces` count what was
    handed over.
    """

    name = "scripted"
    token_counter: TokenCounter | None = None  # a script has no tokens

    def __init__(
        self,
        script: Script | Callable[[ScriptedCall], Answer] | None = None,
        *,
        latency: float = 0.0,
        capabilities: Capabilities = CAPABILITIES,
    ) -> None:
        self.capabilities = capabilities
        self.num_runs = 0
        self._script = script
        self._latency = latency
        self._process = OwnProcess(self.name)
        self._server = _Server()
        # an unused backend may be dropped without close(): its thread must not outlive it
        self._finalizer = weakref.finalize(self, self._server.stop, wait=False)

    def open(self, options: RunOptions, sink: EventSink) -> ScriptedSession:
        """Start a run; raises BackendError after `close` and in a fork of this process.

        Raises ProgramError in this backend's own script.
        """
        self._process.check()
        if self._server.is_own_thread:
            raise ProgramError(
                "a script can't run programs on its own backend, whose one thread would wait for "
                "itself: give it another backend"
            )
        self.num_runs += 1
        return ScriptedSession(self._server, options, sink, self._script, self._latency)

    def stats(self) -> dict[str, float]:
        """Return no counters: a script has no engine."""
        return {}

    @property
    def num_pieces(self) -> int:
        """How many graph pieces were handed over, by all runs."""
        return self._server.num_pieces

    def close(self) -> None:
        """Stop: unfinished nodes fail with BackendError."""
        self._server.stop()

    def __enter__(self) -> ScriptedBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ScriptedSession:
    """One run. All but `extend`, `cancel` and `close` runs on the server's thread."""

    def __init__(
        self,
        server: _Server,
        options: RunOptions,
        sink: EventSink,
        script: Script | Callable[[ScriptedCall], Answer] | None,
        latency: float,
    ) -> None:
        self._server = server
        self._options = options
        self._script = script
        self._latency = latency
        self._uses: dict[str, int] = {}  # answers taken from each list so far
        self._started: set[int] = set()
        self._executor = Executor(sink)
        if options.timeout is not None:
            limit = options.timeout
            server.submit(self, lambda: server.after(limit, self, self._expire))

    def extend(self, piece: RequestGraph) -> None:
        """Hand over more of the graph; raises BackendError when the backend is closed."""
        self._server.num_pieces += 1
        self._server.submit(self, partial(self._executor.add, piece))

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes that have not ended."""
        self._server.submit_if_open(self, lambda: self._executor.cancel(nodes))

    def close(self) -> None:
        """Promise that no more pieces come; nothing is held for them."""

    @property
    def is_idle(self) -> bool:
        """Whether every node so far has ended."""
        return self._executor.is_idle

    def advance(self) -> None:
        """Answer what became ready, and what that makes ready, and send what happened."""
        executor, started = self._executor, self._started
        started.difference_update(executor.take_stopped())
        while ready := executor.take_ready():
            for node in ready:
                started.add(node.id)
            for node in ready:
                self._answer(node)
            started.difference_update(executor.take_stopped())
        executor.deliver()

    def shut(self) -> None:
        """Fail what has not ended, since the backend is closed."""
        self._executor.fail_all(
            lambda node: BackendError(f"{node.label}: the backend was closed", backend="scripted")
        )

    def _expire(self) -> None:
        limit = self._options.timeout
        self._executor.fail_all(
            lambda node: NodeTimeoutError(f"{node.label}: the run's timeout of {limit} s passed")
        )

    def _answer(self, node: GraphNode) -> None:
        op = node.op
        assert isinstance(op, Gen | Select), "an executor starts gens and selects"
        if op.timeout is not None:
            limit = op.timeout
            self._server.after(limit, self, lambda: self._time_out(node, limit))
        try:
            if isinstance(op, Select):
                self._answer_select(node, op)
            else:
                self._answer_gen(node, op)
        except UmbelError as error:
            self._fail(node.id, error)
        except BaseException as error:  # a script's callable is foreign code on our thread
            failed = BackendError(f"the script failed: {described(error)}", backend="scripted")
            self._fail(node.id, failed)

    def _answer_select(self, node: GraphNode, op: Select) -> None:
        reply = self._reply(node, op, 0) or Reply()
        seed, row = self._options.seed, self._options.row
        self._later(node, reply, lambda: choose(op, reply, seed, row, node.address))

    def _answer_gen(self, node: GraphNode, op: Gen) -> None:
        ready = time.monotonic()
        if op.n > 1:
            replies = [self._gen_reply(node, op, i) for i in range(op.n)]
            samples = tuple([play(op, reply, node.address).sample for reply in replies])
            last = max(replies, key=lambda r: (r.error is not None, r.latency))
            self._later(node, last, partial(_gen_result, samples, ready))
            return
        reply = self._gen_reply(node, op, 0)
        played = play(op, reply, node.address)
        result = partial(_gen_result, (played.sample,), ready)
        if reply.tokens or reply.token_latency:
            self._stream(node, reply, played, result)
        else:
            self._later(node, reply, result)

    def _gen_reply(self, node: GraphNode, op: Gen, sample: int) -> Reply:
        return self._reply(node, op, sample) or unscripted(op, node.address)

    def _later(self, node: GraphNode, reply: Reply, result: Callable[[], NodeResult]) -> None:
        if reply.stalls:
            return
        delay = reply.latency or self._latency
        if delay:
            self._server.after(delay, self, lambda: self._end(node, reply, result))
        else:
            self._end(node, reply, result)

    def _stream(
        self, node: GraphNode, reply: Reply, chunks: Chunks, result: Callable[[], NodeResult]
    ) -> None:
        def emit(text: str) -> Callable[[], None]:
            return lambda: self._executor.delta(node.id, text)

        delay = reply.latency or self._latency
        for text in chunks.deltas:
            self._server.after(delay, self, emit(text))
            delay += reply.token_latency
        if not reply.stalls:
            last = max(delay - reply.token_latency, 0.0)
            self._server.after(last, self, lambda: self._end(node, reply, result))

    def _end(self, node: GraphNode, reply: Reply, result: Callable[[], NodeResult]) -> None:
        if node.id not in self._started:
            return
        if reply.error is not None:
            self._fail(node.id, _as_backend_error(reply.error))
            return
        try:
            made = result()
        except UmbelError as error:
            self._fail(node.id, error)
            return
        self._started.discard(node.id)
        self._executor.finish(node.id, made)

    def _fail(self, node: int, error: UmbelError) -> None:
        self._started.discard(node)
        self._executor.fail(node, error)

    def _time_out(self, node: GraphNode, limit: float) -> None:
        if node.id in self._started:
            self._fail(node.id, NodeTimeoutError(f"{node.label}: timeout of {limit} s passed"))

    def _reply(self, node: GraphNode, op: Gen | Select, sample: int) -> Reply | None:
        script = self._script
        if script is None:
            return None
        key = node.address
        answer: Answer | Sequence[Answer] | Callable[[ScriptedCall], Answer] | None
        if callable(script):
            answer = script
        else:
            answer = script.get(key)
            if answer is None:
                key = op.name
                answer = script.get(key) if key else None
            if answer is None:
                known = ", ".join(map(repr, script))
                raise BackendError(
                    f"the script has no answer for {op.name or 'a node without a name'!r} "
                    f"({node.address}); it has {known or 'none'}",
                    backend="scripted",
                )
        if isinstance(answer, str):
            return Reply(text=answer)
        if callable(answer):
            answer = answer(self._call(node, op, sample))
        elif not isinstance(answer, Reply):
            used = self._uses.get(key, 0)
            self._uses[key] = used + 1
            if used >= len(answer):
                raise BackendError(
                    f"the script has {len(answer)} answers for {key!r}, and {node.address} "
                    "asks for one more",
                    backend="scripted",
                )
            answer = answer[used]
        return Reply(text=answer) if isinstance(answer, str) else answer

    def _call(self, node: GraphNode, op: Gen | Select, sample: int) -> ScriptedCall:
        return ScriptedCall(
            op.name,
            node.address,
            op,
            self._options.row,
            self._options.seed,
            sample,
            lambda: self._executor.text_before(node),
            lambda: self._executor.messages_before(node),
        )


def _gen_result(samples: tuple[Sample, ...], ready: float) -> NodeResult:
    finished = time.monotonic()
    num_tokens = 0
    for sample in samples:
        num_tokens += len(sample.token_ids)
    return NodeResult(
        text=samples[0].text if len(samples) == 1 else "",
        samples=samples,
        usage=Usage(completion_tokens=num_tokens),
        timings=Timings(ready=ready, scheduled=ready, first_token=finished, finished=finished),
    )


def _as_backend_error(error: Exception) -> UmbelError:
    if isinstance(error, UmbelError):
        return error
    made = BackendError(described(error), backend="scripted")
    made.__cause__ = error
    return made


class _Server:
    """The thread that serves all sessions of a backend, started with the first command."""

    def __init__(self) -> None:
        self.num_pieces = 0  # handed over by all sessions
        self._inbox: queue.SimpleQueue[tuple[ScriptedSession, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._timers: list[tuple[float, int, ScriptedSession, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._thread_id = 0  # while it serves
        self._is_stopped = False
        #: with nodes that had not ended when they were last looked at
        self._sessions: weakref.WeakSet[ScriptedSession] = weakref.WeakSet()

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread that serves."""
        return threading.get_ident() == self._thread_id

    def submit(self, session: ScriptedSession, command: Callable[[], None]) -> None:
        """Run a command on the thread; raises BackendError after `stop`."""
        if not self.submit_if_open(session, command):
            raise BackendError("the scripted backend is closed", backend="scripted")

    def submit_if_open(self, session: ScriptedSession, command: Callable[[], None]) -> bool:
        """Run a command on the thread; False after `stop`."""
        with self._lock:
            if self._is_stopped:
                return False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="umbel-scripted", daemon=True
                )
                self._thread.start()
            self._inbox.put((session, command))
            return True

    def after(self, delay: float, session: ScriptedSession, command: Callable[[], None]) -> None:
        """Run a command later; only from the thread itself."""
        due = time.monotonic() + delay
        heapq.heappush(self._timers, (due, next(self._order), session, command))

    def stop(self, *, wait: bool = True) -> None:
        """End the thread; what has not ended fails. Idempotent."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            thread = self._thread
            self._inbox.put(None)
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        self._thread_id = threading.get_ident()
        touched: dict[ScriptedSession, None] = {}
        running = True
        while running:
            running = self._take(touched)
            self._run_due(touched)
            if not running:
                self._shut_all(touched)
            self._advance(touched)
        self._thread_id = 0  # another thread may get it

    # in methods of their own, so that the waiting thread's frames keep no session alive

    def _run_due(self, touched: dict[ScriptedSession, None]) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, session, command = heapq.heappop(self._timers)
            touched[session] = None
            command()

    def _shut_all(self, touched: dict[ScriptedSession, None]) -> None:
        touched.update(dict.fromkeys(self._sessions))
        for session in touched:
            session.shut()

    def _advance(self, touched: dict[ScriptedSession, None]) -> None:
        for session in touched:
            session.advance()
            if not session.is_idle:
                self._sessions.add(session)
        touched.clear()

    def _take(self, touched: dict[ScriptedSession, None]) -> bool:
        """Wait for commands or a timer, and run the commands; False when told to stop."""
        try:
            if self._timers:
                item = self._inbox.get(timeout=max(0.0, self._timers[0][0] - time.monotonic()))
            else:
                item = self._inbox.get()
            num_run = 0
            while item is not None:
                session, command = item
                touched[session] = None
                command()
                num_run += 1
                if num_run == _MAX_BATCH:
                    return True
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False


#: commands run before what they made is delivered
_MAX_BATCH = 256
