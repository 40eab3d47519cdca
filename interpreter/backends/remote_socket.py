"""One run on an umbel server over one socket: pieces out, events in; knows no frames.

The server keeps the run, so it alone decides what becomes of a node: what is cancelled here, too,
has ended when the server says so. Where there turns out to be no socket, the run goes on as posts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from umbel.lang.errors import (
    BackendError,
    NodeTimeoutError,
    ProgramError,
    UmbelError,
    WireError,
    described,
    from_wire,
    to_wire,
)
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Text
from umbel.lang.results import Event, NodeFailed, NodeFinished, RunOptions
from umbel.lang.wire import (
    SOCKET_VERSION,
    UNWRITABLE,
    CancelNodes,
    ClientMessage,
    CloseRun,
    ExtendRun,
    OpenRun,
    RunRefused,
    encode_message,
)

from .base import EventSink
from .remote_connection import NoSocketError, RunConnection
from .remote_errors import BACKEND, broken, for_node, too_large, unsendable
from .remote_posts import TIMEOUT_GRACE_S, PostSession
from .run_door import RunDoor

logger = logging.getLogger(__name__)


class SocketLink(Protocol):
    """What a session asks of the backend that opened it."""

    url: str
    max_body_bytes: int  # 0: the server didn't say

    def call(self, command: Callable[[], object]) -> None:
        """Run a command on the loop's thread; raises BackendError once the backend is closed."""
        ...

    def connection(self) -> AbstractAsyncContextManager[RunConnection]:
        """Open a socket; raises NoSocketError, UmbelError."""
        ...

    def without_socket(
        self, options: RunOptions, sink: EventSink, reason: NoSocketError
    ) -> PostSession:
        """Return a session that posts, or raise UmbelError where that is not wanted."""
        ...

    def forget(self, session: SocketSession) -> None:
        """Drop a run that is over."""
        ...


class SocketSession:
    """One run on a server. All its state belongs to the loop's thread."""

    def __init__(self, link: SocketLink, options: RunOptions, sink: EventSink) -> None:
        self._link = link
        self._door = RunDoor(link.call)
        self._options = options
        self._sink = sink
        self._deadline = None if options.timeout is None else time.monotonic() + options.timeout
        self._nodes: list[GraphNode] = []
        self._open: set[int] = set()  # nodes that have not ended
        self._outbox: deque[tuple[ClientMessage, bytes]] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._posts: PostSession | None = None  # what runs it where there is no socket
        self._over: UmbelError | None = None  # why no more can be sent
        self._is_closed = False

    def extend(self, piece: RequestGraph) -> None:
        """Hand over more of the graph; raises ProgramError, or BackendError when closed."""
        self._door.extend(piece, self._take)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes (all, by default) that have not ended."""
        message = CancelNodes(None if nodes is None else tuple(nodes))
        self._door.tell(lambda: self._cancel(message))

    def close(self) -> None:
        """Promise that no more pieces come. Idempotent."""
        self._door.tell(self._close)

    def fail_unfinished(self, error: UmbelError) -> None:
        """Fail every node that has not ended and drop the connection. On the loop's thread."""
        self._end(error)
        if self._posts is not None:
            self._posts.fail_unfinished(error)
        if self._task is not None:
            self._task.cancel()

    # --- on the loop's thread -----------------------------------------------------------------

    def _take(self, piece: RequestGraph) -> None:
        self._nodes += piece.nodes
        self._open.update(node.id for node in piece.nodes)
        if self._posts is not None:
            self._posts.take(piece)
            return
        if self._over is None and self._deadline is not None and self._task is None:
            self._start_clock(self._deadline - time.monotonic())
        if self._over is not None:
            self._fail([node.id for node in piece.nodes], self._over)
            return
        message = ExtendRun(piece)
        try:
            data = encode_message(message)
            limit = self._link.max_body_bytes
            if limit and len(data) > limit:
                raise too_large(self._link.url, len(data), limit)
        except UNWRITABLE as failure:
            self._refuse_piece(piece, unsendable(failure))
        except ProgramError as error:
            self._refuse_piece(piece, error)
        else:
            self._post(message, data)

    def _start_clock(self, left: float) -> None:
        if left <= 0:
            self._end(self._timeout_error())
        else:  # the server's own word on the time limit comes first
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(left + TIMEOUT_GRACE_S, self._expire)

    def _expire(self) -> None:
        if self._open:
            self.fail_unfinished(self._timeout_error())

    def _refuse_piece(self, piece: RequestGraph, error: UmbelError) -> None:
        """Fail nodes that can't be sent, and tell the server of them, on whom others may build."""
        ids = [node.id for node in piece.nodes]
        failed = {node.id: to_wire(for_node(error, node)) for node in piece.nodes}
        stubs = tuple(GraphNode(node.id, node.address, Text(("",))) for node in piece.nodes)
        message = ExtendRun(RequestGraph(stubs, piece.base), failed)
        self._fail(ids, error)
        self._post(message, encode_message(message))

    def _cancel(self, message: CancelNodes) -> None:
        if self._posts is not None:
            self._posts.cancel_here(message.nodes)
        elif self._open and self._over is None:
            self._post(message, encode_message(message))

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._posts is not None:
            self._posts.close_here()
        elif self._task is None or self._over is not None:
            self._link.forget(self)
        else:
            self._post(CloseRun(), encode_message(CloseRun()))

    def _post(self, message: ClientMessage, data: bytes) -> None:
        self._outbox.append((message, data))
        self._wake.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _deliver(self, events: Sequence[Event]) -> None:
        """Pass on the events of nodes that have not ended."""
        out: list[Event] = []
        for event in events:
            if event.node not in self._open:
                continue
            if isinstance(event, NodeFinished | NodeFailed):
                self._open.discard(event.node)
            out.append(event)
        if not out:
            return
        try:
            self._sink(out)
        except Exception:  # the sink is the user's side: it must not stop the loop
            logger.exception("the event sink of a run failed; the run is cancelled")
            self._sink = _drop
            self._cancel(CancelNodes())

    def _fail(self, nodes: Sequence[int], error: UmbelError) -> None:
        self._deliver([NodeFailed(i, to_wire(for_node(error, self._nodes[i]))) for i in nodes])

    def _end(self, error: UmbelError) -> None:
        """Fail what has not ended, and all that is still to come."""
        if self._over is None:
            self._over = error
        self._fail(sorted(self._open), error)

    def _timeout_error(self) -> NodeTimeoutError:
        return NodeTimeoutError(f"the run did not finish within {self._options.timeout} s")

    # --- the socket ---------------------------------------------------------------------------

    async def _run(self) -> None:
        """See the run through: when this ends, every node has ended, or posts see to it."""
        error: UmbelError = broken(self._link.url, "the server ended the run before its end")
        try:
            try:
                async with self._link.connection() as connection:
                    await self._talk(connection)
            finally:
                if self._timer is not None:  # it would keep the run in memory
                    self._timer.cancel()
        except asyncio.CancelledError:
            pass  # whoever cancels has failed the nodes
        except NoSocketError as reason:
            try:
                self._go_on_without(reason)
                return
            except UmbelError as failure:
                error = failure
        except UmbelError as failure:
            error = failure
        except Exception as failure:  # the task's edge: nobody else would end the nodes
            logger.exception("a run on a server failed")
            error = BackendError(described(failure), backend=BACKEND)
            error.__cause__ = failure
        self._outbox.clear()
        self._end(error)
        if self._is_closed:
            self._link.forget(self)

    async def _talk(self, connection: RunConnection) -> None:
        sending = asyncio.ensure_future(self._send(connection))
        try:
            while (message := await connection.receive()) is not None:
                if isinstance(message, RunRefused):
                    raise from_wire(message.error)
                self._deliver(message.events)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, connection: RunConnection) -> None:
        """Send what is to be sent, in its order; ends when the connection does."""
        opening = OpenRun(SOCKET_VERSION, self._remaining_options())
        await connection.send(encode_message(opening))
        while True:
            while self._outbox:
                _, data = self._outbox.popleft()
                await connection.send(data)
            self._wake.clear()
            await self._wake.wait()

    def _remaining_options(self) -> RunOptions:
        if self._deadline is None:
            return self._options
        left = max(0.0, self._deadline - time.monotonic())
        return msgspec.structs.replace(self._options, timeout=left)

    def _go_on_without(self, reason: NoSocketError) -> None:
        """Hand what was to be sent to a session that posts; raises UmbelError."""
        posts = self._link.without_socket(self._remaining_options(), self._deliver, reason)
        self._posts = posts
        outbox, self._outbox = self._outbox, deque()
        for message, _ in outbox:
            if isinstance(message, ExtendRun):
                posts.take(message.graph, _errors(message.failed))
            elif isinstance(message, CancelNodes):
                posts.cancel_here(message.nodes)
            else:
                posts.close_here()
        self._link.forget(self)


def _errors(failed: dict[int, WireError]) -> dict[int, UmbelError]:
    return {node: from_wire(error) for node, error in failed.items()}


def _drop(_: Sequence[Event]) -> None:
    pass
