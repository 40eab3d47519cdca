"""Records a program up to its first read, without running anything; knows no backend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

from .errors import UmbelError
from .expressions import ValueExpr
from .graph import GraphNode, RequestGraph
from .ir import Op
from .results import NodeResult
from .runner import Call
from .state import State


class _ReadReached(BaseException):
    """Leaves a body at its first read; not an Exception, so that no handler of the body eats it."""


class _TraceRun:
    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self.exprs: dict[int, ValueExpr[Any]] | None = None

    def add(self, op: Op, address: str, parent: int | None) -> int:
        node = GraphNode(len(self.nodes), address, op, parent)
        self.nodes.append(node)
        return node.id

    def result(self, node: int) -> NoReturn:
        raise _ReadReached

    async def aresult(self, node: int) -> NodeResult:
        raise _ReadReached

    def failure(self, node: int) -> UmbelError | None:
        return None

    def cancel(self, nodes: Sequence[int]) -> None:
        """Nothing runs, so nothing stops."""


def trace(call: Call) -> RequestGraph:
    """Run a body once, with its real arguments, up to its first read; return what it wrote.

    An `async def` body ends at its first read too; what it awaits besides is awaited. Raises what
    the body raises.
    """
    run = _TraceRun()
    state = State(run, call.settings.sampling)
    try:
        made = call.start(state)
        if call.is_async:
            asyncio.run(_awaited(made))
    except _ReadReached:
        pass
    graph = RequestGraph(tuple(run.nodes))
    graph.check()
    return graph


async def _awaited(made: Any) -> None:
    try:
        await made
    except _ReadReached:  # caught inside the loop: asyncio lets BaseExceptions break out of run()
        return
