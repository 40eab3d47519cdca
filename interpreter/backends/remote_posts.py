"""One run on an umbel server as requests: what goes out when, what came back; knows no HTTP.

A graph that is whole from the start is one request; so is each piece of one that grows where the
server has no socket (`remote_socket` is for those that have).

A node goes out as soon as every node it builds on has ended or goes out with it. The nodes that go
out together are one post, which also carries what they need to see: the prefixes they continue,
with the outcomes that came back before, renumbered. So a run that reads between its parts needs
no state on the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import msgspec

from umbel.lang.errors import (
    BackendError,
    CancelledError,
    NodeTimeoutError,
    UmbelError,
    described,
    from_wire,
    to_wire,
)
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.graph_state import Changes, GraphState, NodeStatus
from umbel.lang.ir import Join, Op, Ref, Text
from umbel.lang.results import (
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    NodeStarted,
    RunOptions,
    TextDelta,
)
from umbel.lang.wire import UNWRITABLE, RunRequest, encode_request

from .base import EventSink
from .remote_errors import BACKEND, broken, for_node, too_large, unsendable
from .run_door import RunDoor

logger = logging.getLogger(__name__)

TIMEOUT_GRACE_S = 5.0  # the server's own word on a run's time limit comes first
_NONE: Mapping[int, UmbelError] = MappingProxyType({})
_ENDED = frozenset({NodeStatus.FINISHED, NodeStatus.FAILED})


class Link(Protocol):
    """What a session asks of the backend that opened it."""

    url: str
    max_body_bytes: int  # 0: the server didn't say

    def call(self, command: Callable[[], object]) -> None:
        """Run a command on the loop's thread; raises BackendError once the backend is closed."""
        ...

    def stream(self, body: bytes) -> AsyncGenerator[list[Event]]:
        """Post a run and yield its events; raises BackendError or the server's own error."""
        ...

    def cancel_nodes(self, run_id: str, nodes: Sequence[int]) -> None:
        """Tell the server, without waiting, that nodes of a post are no longer wanted."""
        ...

    def forget(self, session: PostSession) -> None:
        """Drop a run that is over."""
        ...


@dataclass(slots=True, eq=False)
class Post:
    """Nodes that went out together. `local_ids` are the run's ids by the server's."""

    run_id: str
    request: RunRequest
    local_ids: list[int]
    open: set[int]  # nodes the server has not ended
    task: asyncio.Task[None] | None = None


class PostSession:
    """One run on a server. All its state belongs to the loop's thread."""

    def __init__(self, link: Link, options: RunOptions, sink: EventSink) -> None:
        self._link = link
        self._door = RunDoor(link.call)
        self._options = options
        self._sink = sink
        self._deadline = None if options.timeout is None else time.monotonic() + options.timeout
        self._state = GraphState()
        self._unsent: list[int] = []
        self._posts: list[Post] = []
        self._is_closed = False

    def extend(self, piece: RequestGraph) -> None:
        """Hand over more of the graph; raises ProgramError, or BackendError when closed."""
        self._door.extend(piece, self.take)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes (all, by default) that have not ended."""
        ids = None if nodes is None else list(nodes)
        self._door.tell(lambda: self.cancel_here(ids))

    def close(self) -> None:
        """Promise that no more pieces come. Idempotent."""
        self._door.tell(self.close_here)

    def fail_unfinished(self, error: UmbelError) -> None:
        """Fail every node that has not ended and drop its connections. On the loop's thread."""
        self._fail(self._state.unfinished(), error)
        for post in self._posts:
            if post.task is not None:
                post.task.cancel()

    # --- on the loop's thread -----------------------------------------------------------------

    def take(self, piece: RequestGraph, failed: Mapping[int, UmbelError] = _NONE) -> None:
        """Take a checked piece, whose nodes in `failed` have ended without an event."""
        out: list[Event] = []
        self._note(self._state.add(piece), out)
        for node_id, error in failed.items():
            self._note(self._state.fail(node_id, error), out)
        self._unsent += [node.id for node in piece.nodes]
        self._advance(out)

    def cancel_here(self, nodes: Sequence[int] | None) -> None:
        """Stop nodes."""
        out: list[Event] = []
        self._note(self._state.cancel(None if nodes is None else list(nodes)), out)
        self._advance(out)

    def close_here(self) -> None:
        """Note that no more pieces come."""
        self._is_closed = True
        self._advance([])

    def _receive(self, post: Post, events: Sequence[Event]) -> None:
        """Take what the server said about a post's nodes."""
        out: list[Event] = []
        for event in events:
            node_id = post.local_ids[event.node]
            if isinstance(event, NodeFinished | NodeFailed):
                post.open.discard(node_id)
            if self._has_ended(node_id):
                continue  # cancelled or poisoned here first
            match event:
                case NodeStarted():
                    out.append(NodeStarted(node_id))
                case TextDelta(text=text):
                    out.append(TextDelta(node_id, text))
                case NodeFinished(result=result):
                    out.append(NodeFinished(node_id, result))
                    self._note(self._state.finish(node_id, result), out)
                case NodeFailed(error=error):
                    self._note(self._state.fail(node_id, from_wire(error)), out)
        self._advance(out)

    def _fail(self, nodes: Sequence[int], error: UmbelError) -> None:
        """Fail nodes of one cause, the last first, so that none is said to be another's victim.

        Each one's error names it.
        """
        out: list[Event] = []
        for node_id in reversed(nodes):
            named = for_node(error, self._state.nodes[node_id])
            self._note(self._state.fail(node_id, named), out)
        self._advance(out)

    def _note(self, changes: Changes, out: list[Event]) -> None:
        out += [NodeFailed(node_id, to_wire(error)) for node_id, error in changes.failed]

    def _has_ended(self, node_id: int) -> bool:
        return self._state.status[node_id] in _ENDED

    def _advance(self, out: list[Event]) -> None:
        """Deliver events, drop what is no longer wanted, send what can go out."""
        self._decide_joins(out)
        if out:
            try:
                self._sink(out)
            except Exception:  # the sink is the user's side: it must not stop the loop
                logger.exception("the event sink of a run failed; the run is cancelled")
                self._sink = _drop
                self._state.cancel()
        self._stop_unwanted()
        self._send()
        if self._is_closed and self._state.is_done:
            self._link.forget(self)

    def _decide_joins(self, out: list[Event]) -> None:
        """Finish joins whose branches ended before they could go out: they need no model."""
        for node_id in self._unsent:
            is_join = isinstance(self._state.nodes[node_id].op, Join)
            if is_join and self._state.status[node_id] is NodeStatus.READY:
                result = self._state.join_result(node_id)
                out.append(NodeFinished(node_id, result))
                self._note(self._state.finish(node_id, result), out)

    def _stop_unwanted(self) -> None:
        """Tell the server of nodes that were cancelled here."""
        for post in self._posts:
            errors = self._state.errors
            stopped = [i for i in sorted(post.open) if isinstance(errors.get(i), CancelledError)]
            if not stopped or post.task is None:
                continue
            if all(self._has_ended(i) for i in post.open):
                post.task.cancel()  # closing the connection cancels the whole run
            else:
                post.open.difference_update(stopped)
                remote = {local: i for i, local in enumerate(post.local_ids)}
                self._link.cancel_nodes(post.run_id, [remote[i] for i in stopped])

    def _send(self) -> None:
        """Send the nodes whose every edge has ended or goes out with them."""
        going: list[int] = []
        staying: list[int] = []
        together: set[int] = set()
        for node_id in self._unsent:
            if self._has_ended(node_id):
                continue
            node = self._state.nodes[node_id]
            edges = node.deps if node.parent is None else (node.parent, *node.deps)
            if all(edge in together or self._has_ended(edge) for edge in edges):
                going.append(node_id)
                together.add(node_id)
            else:
                staying.append(node_id)
        self._unsent = staying
        if going:
            post = make_post(self._state, going)
            self._posts.append(post)
            post.task = asyncio.get_running_loop().create_task(self._run(post))

    async def _run(self, post: Post) -> None:
        """See a post through: when this ends, every node of it has ended."""
        error: UmbelError = broken(self._link.url, "the server closed it before the run's end")
        try:
            await self._follow(post)
        except asyncio.CancelledError:
            error = CancelledError("the run was cancelled")
        except UmbelError as failure:
            error = failure
        except TimeoutError:
            error = self._timeout_error()
        except UNWRITABLE as failure:
            error = unsendable(failure)
        except Exception as failure:  # the task's edge: nobody else would end the nodes
            logger.exception("a run on a server failed")
            error = BackendError(described(failure), backend=BACKEND)
            error.__cause__ = failure
        self._posts.remove(post)
        self._fail([i for i in sorted(post.local_ids) if not self._has_ended(i)], error)

    async def _follow(self, post: Post) -> None:
        options = self._options
        left = None
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise self._timeout_error()
            options = msgspec.structs.replace(options, timeout=left)
        body = encode_request(msgspec.structs.replace(post.request, options=options))
        limit = self._link.max_body_bytes
        if limit and len(body) > limit:
            raise too_large(self._link.url, len(body), limit)
        async with (
            asyncio.timeout(None if left is None else left + TIMEOUT_GRACE_S),
            aclosing(self._link.stream(body)) as stream,
        ):
            async for events in stream:
                self._receive(post, events)

    def _timeout_error(self) -> NodeTimeoutError:
        return NodeTimeoutError(f"the run did not finish within {self._options.timeout} s")


def make_post(state: GraphState, node_ids: Sequence[int]) -> Post:
    """Return the request for nodes whose every edge outside has ended."""
    own = set(node_ids)
    prefixes: set[int] = set()  # ended nodes that these continue
    values: set[int] = set()  # ended nodes of which these read the value alone
    for node_id in node_ids:
        node = state.nodes[node_id]
        _add_prefix(state, node.parent, own, prefixes)
        if isinstance(node.op, Join):  # an append takes what each branch wrote
            for branch in node.op.branches:
                _add_prefix(state, branch, own, prefixes)
        else:
            values.update(dep for dep in node.deps if dep not in own)
    local_ids = sorted(own | prefixes | values)
    remote_ids = {local: i for i, local in enumerate(local_ids)}
    nodes = []
    for i in local_ids:
        node = state.nodes[i]
        if i in own:
            nodes.append(_renumber(node, remote_ids))
        elif i in state.errors or i not in prefixes:
            nodes.append(_ended(state, node, None, remote_ids))
        else:
            nodes.append(_ended(state, node, node.parent, remote_ids))
    run_id = uuid.uuid4().hex
    request = RunRequest(
        RequestGraph(tuple(nodes)),
        resolved={remote_ids[i]: state.results[i] for i in local_ids if i in state.results},
        failed={remote_ids[i]: to_wire(state.errors[i]) for i in local_ids if i in state.errors},
        run_id=run_id,
    )
    return Post(run_id, request, local_ids, open=own)


def _add_prefix(state: GraphState, at: int | None, own: set[int], prefixes: set[int]) -> None:
    """Add a path of ended nodes: back to nodes that go out too, to a failed one, or to the root."""
    while at is not None and at not in own and at not in prefixes:
        prefixes.add(at)
        if at in state.errors:
            return  # nothing continues it: only the failure matters
        at = state.nodes[at].parent


def _ended(
    state: GraphState, node: GraphNode, parent: int | None, ids: dict[int, int]
) -> GraphNode:
    """Return an ended node as it goes along: a gen or role as it is, other nodes as their text.

    So what a text or join was made of need not go along; nor need it for a value alone.
    """
    op = node.op
    if (parent is None and node.parent is not None) or isinstance(op, Text | Join):
        op = Text((state.results.get(node.id, NodeResult()).text,))
    return GraphNode(ids[node.id], node.address, op, None if parent is None else ids[parent])


def _renumber(node: GraphNode, ids: dict[int, int]) -> GraphNode:
    op: Op = node.op
    if isinstance(op, Text):
        op = Text(tuple(Ref(ids[p.node]) if isinstance(p, Ref) else p for p in op.parts))
    elif isinstance(op, Join):
        op = msgspec.structs.replace(op, branches=tuple(ids[b] for b in op.branches))
    parent = None if node.parent is None else ids[node.parent]
    return GraphNode(ids[node.id], node.address, op, parent)


def _drop(_: Sequence[Event]) -> None:
    pass
