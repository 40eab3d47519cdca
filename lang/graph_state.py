"""Where a running graph stands: what is ready, what a failure poisons, how a join resolves.

Pure bookkeeping, shared by the engine's graph executor and the interpreter's: no I/O, no clock,
no tokens. Each node ends exactly once, as finished or failed.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import msgspec

from .errors import CancelledError, GenerationError, UmbelError, described, to_wire
from .graph import GraphNode, RequestGraph
from .ir import Branch, Join, Op
from .results import NodeResult


class NodeStatus(Enum):
    """A node's place in its life."""

    WAITING = "waiting"
    READY = "ready"
    FINISHED = "finished"
    FAILED = "failed"


class Changes(msgspec.Struct, eq=False):
    """What one call changed: nodes that became ready, nodes that failed, nodes to be stopped.

    `cancelled` lists nodes that were ready (perhaps running) and must be stopped by whoever runs
    them; each is in `failed` too. What became ready and failed in the same call is in `failed`
    only.
    """

    ready: list[int] = []
    failed: list[tuple[int, UmbelError]] = []
    cancelled: list[int] = []


class GraphState:
    """The state of one run's nodes, over all pieces handed in so far."""

    __slots__ = (
        "_missing",
        "_num_unfinished",
        "_open",
        "_users",
        "errors",
        "nodes",
        "results",
        "status",
    )

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self.status: list[NodeStatus] = []
        self.results: dict[int, NodeResult] = {}
        self.errors: dict[int, UmbelError] = {}
        self._users: list[list[int]] = []  # nodes with an edge to this one
        self._missing: list[int] = []  # edges that have not finished
        self._open: list[int] = []  # edges that have not ended; the rest of the missing failed
        self._num_unfinished = 0

    @property
    def is_done(self) -> bool:
        """Whether every node has ended."""
        return not self._num_unfinished

    def unfinished(self) -> list[int]:
        """Return the ids of the nodes that have not ended, in order."""
        return [i for i in range(len(self.nodes)) if not self._has_ended(i)]

    def add(self, piece: RequestGraph) -> Changes:
        """Take in a checked piece; its base must be the number of nodes so far."""
        if piece.base != len(self.nodes):
            raise ValueError(f"piece starts at {piece.base}, the run has {len(self.nodes)} nodes")
        changes = Changes()
        status, users = self.status, self._users
        for node in piece.nodes:
            missing, num_open, failed = 0, 0, -1
            for edge in _edges(node):
                users[edge].append(node.id)
                if status[edge] is not NodeStatus.FINISHED:
                    missing += 1
                    if status[edge] is not NodeStatus.FAILED:
                        num_open += 1
                    elif failed < 0 or edge < failed:
                        failed = edge
            self.nodes.append(node)
            users.append([])
            status.append(NodeStatus.WAITING)
            self._missing.append(missing)
            self._open.append(num_open)
            self._num_unfinished += 1
            if _is_lenient(node.op):
                self._settle_join(node, changes)
            elif failed >= 0:
                self._fail(node.id, self._poison(node, failed), changes)
            elif missing == 0:
                status[node.id] = NodeStatus.READY
                changes.ready.append(node.id)
        return self._net(changes) if changes.failed else changes

    def finish(self, node_id: int, result: NodeResult) -> Changes:
        """Record a ready node's result and return what becomes ready (or is cancelled) by it."""
        changes = Changes()
        if self._has_ended(node_id):
            return changes
        status, missing = self.status, self._missing
        status[node_id] = NodeStatus.FINISHED
        self.results[node_id] = result
        self._num_unfinished -= 1
        users = self._users[node_id]
        for user in users:
            missing[user] -= 1
            self._open[user] -= 1
        for user in users:
            if _is_lenient(self.nodes[user].op):
                self._settle_join(self.nodes[user], changes)
            elif missing[user] == 0 and status[user] is NodeStatus.WAITING:
                status[user] = NodeStatus.READY
                changes.ready.append(user)
        return self._net(changes) if changes.failed else changes

    def fail(self, node_id: int, error: UmbelError) -> Changes:
        """Record a failure and poison what depends on it, and nothing else."""
        changes = Changes()
        self._fail(node_id, error, changes)
        return self._net(changes)

    def cancel(self, node_ids: list[int] | None = None) -> Changes:
        """Cancel nodes (all, by default) that have not ended; what depends on them is poisoned."""
        changes = Changes()
        for node_id in range(len(self.nodes)) if node_ids is None else node_ids:
            self._cancel(node_id, changes, "cancelled")
        return self._net(changes)

    def _net(self, changes: Changes) -> Changes:
        """Leave out what became ready in this call and failed in it too: nobody started it."""
        if changes.failed and changes.ready:
            gone = {i for i in changes.ready if self.status[i] is not NodeStatus.READY}
            if gone:
                changes.ready = [i for i in changes.ready if i not in gone]
                changes.cancelled = [i for i in changes.cancelled if i not in gone]
        return changes

    def _has_ended(self, node_id: int) -> bool:
        status = self.status[node_id]
        return status is NodeStatus.FINISHED or status is NodeStatus.FAILED

    def _settle_join(self, node: GraphNode, changes: Changes) -> None:
        """Make a waiting join that takes failures ready, or fail it, if its branches now say so."""
        op = node.op
        assert isinstance(op, Join), "only joins take failures"
        if self.status[node.id] is not NodeStatus.WAITING:
            return
        parent = node.parent
        if parent is not None and self.status[parent] is NodeStatus.FAILED:
            self._fail(node.id, self._poison(node, parent), changes)
            return
        if parent is not None and self.status[parent] is not NodeStatus.FINISHED:
            return
        num_open = self._open[node.id]  # counts, since every end of a branch comes by here
        num_finished = len(op.branches) - self._missing[node.id]
        if op.policy == "any":
            if num_finished >= op.k:
                self.status[node.id] = NodeStatus.READY
                changes.ready.append(node.id)
                for branch in op.branches:
                    if not self._has_ended(branch):
                        self._cancel_branch(branch, changes)
            elif num_finished + num_open < op.k:
                self._fail(node.id, self._poison(node, _first_failed(self, op)), changes)
        elif num_open == 0:
            self.status[node.id] = NodeStatus.READY
            changes.ready.append(node.id)

    def _cancel_branch(self, last: int, changes: Changes) -> None:
        """Cancel a branch from its Branch node on, with every branch that was forked from it."""
        first = last
        while not isinstance(self.nodes[first].op, Branch):
            parent = self.nodes[first].parent
            assert parent is not None, "a branch's path leads to its Branch node"
            first = parent
        branch = [first]
        for at in branch:
            branch += [user for user in self._users[at] if self.nodes[user].parent == at]
        for node_id in sorted(branch):
            self._cancel(node_id, changes, "another branch met the join's policy first")

    def _cancel(self, node_id: int, changes: Changes, why: str) -> None:
        if self._has_ended(node_id):
            return
        if self.status[node_id] is NodeStatus.READY:
            changes.cancelled.append(node_id)
        self._fail(node_id, CancelledError(f"{self.nodes[node_id].label}: {why}"), changes)

    def _fail(self, node_id: int, error: UmbelError, changes: Changes) -> None:
        todo = [(node_id, error)]
        while todo:
            at, cause = todo.pop()
            if self._has_ended(at):
                continue
            self.status[at] = NodeStatus.FAILED
            self.errors[at] = cause
            self._num_unfinished -= 1
            changes.failed.append((at, cause))
            for user in self._users[at]:
                node = self.nodes[user]
                self._open[user] -= 1
                if self._has_ended(user):
                    continue
                if _is_lenient(node.op):
                    self._settle_join(node, changes)
                else:
                    if self.status[user] is NodeStatus.READY:
                        changes.cancelled.append(user)
                    todo.append((user, self._poison(node, at)))

    def _poison(self, node: GraphNode, failed: int) -> UmbelError:
        """Return the error of a node that depends on a failed one; the first cause is chained."""
        where = ""
        if isinstance(node.op, Join) and failed in node.op.branches:
            where = f"branch {node.op.branches.index(failed)} failed: "
            if node.op.policy == "any":
                num_branches = len(node.op.branches)
                wanted = f"{node.op.k} of {num_branches} branches had to finish"
                where = f"{wanted}, and too many failed; {where}"
        return poisoned(self.errors[failed], self.nodes[failed].address, where)

    def join_result(self, node_id: int) -> NodeResult:
        """Return the result of a ready Join: its appended text and its branches' errors."""
        node = self.nodes[node_id]
        assert isinstance(node.op, Join)
        failed = tuple(
            to_wire(self.errors[b]) if b in self.errors else None for b in node.op.branches
        )
        text = ""
        if node.op.mode == "append":
            text = "".join(self.branch_text(b) for b in node.op.branches if b not in self.errors)
        return NodeResult(text=text, branch_errors=failed if any(failed) else ())

    def branch_text(self, last: int) -> str:
        """Return what a branch wrote: the texts from its Branch node to `last`."""
        texts = []
        at: int | None = last
        while at is not None:
            node = self.nodes[at]
            if isinstance(node.op, Branch):
                break
            texts.append(self.results[at].text)
            at = node.parent
        return "".join(reversed(texts))


def poisoned(cause: BaseException, address: str, where: str = "") -> GenerationError:
    """Return the error of what depends on the node at `address`, which failed with `cause`."""
    root = cause
    if isinstance(cause, GenerationError) and cause.__cause__ is not None:
        root, address = cause.__cause__, cause.address
    error = GenerationError(f"{where}{address} failed: {described(root)}", address=address)
    error.__cause__ = root
    return error


def _is_lenient(op: Op) -> bool:
    """Whether a node can finish although something it depends on has failed."""
    return type(op) is Join and op.policy != "all"


def _edges(node: GraphNode) -> Collection[int]:
    deps = node.deps
    if not deps:
        return () if node.parent is None else (node.parent,)
    return {*deps} if node.parent is None else {*deps, node.parent}


def _first_failed(state: GraphState, op: Join) -> int:
    return next(b for b in op.branches if state.status[b] is NodeStatus.FAILED)
