"""A run that has ended: its nodes with their outcomes, which never change; knows no backend.

Results keep their runs, thousands at a time. What an ended run needn't hold (locks, waiters, a
session) would be walked by each garbage collection, so this is all that is left of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from .errors import GenerationError, ProgramError, UmbelError, WireError, described, from_wire
from .expressions import ValueExpr
from .graph import GraphNode
from .ir import Op
from .results import NodeResult
from .transcript import tried

Outcome = NodeResult | WireError


# gc=False: what it holds is data, and a backend, which keeps no results
class EndedRun(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The language's `Run` once nothing more can happen: one outcome for each node.

    `backend` is what it ran on, None for one that was read back.
    """

    nodes: tuple[GraphNode, ...]
    outcomes: tuple[Outcome, ...]
    backend: object | None = None

    @property
    def exprs(self) -> dict[int, ValueExpr[Any]] | None:
        """Nobody wants to know expressions any more."""
        return None

    def add(self, op: Op, address: str, parent: int | None) -> NoReturn:
        """Refuse with a ProgramError."""
        refuse_append()

    def result(self, node: int) -> NodeResult:
        """Return a node's result; raises GenerationError when it failed."""
        outcome = self.outcomes[node]
        if type(outcome) is NodeResult:
            return outcome
        raise self._error(node)

    async def aresult(self, node: int) -> NodeResult:
        """Do the same; there is nothing to wait for."""
        return self.result(node)

    def failure(self, node: int) -> UmbelError | None:
        """Return the error of a failed node; None for one that finished."""
        return self._error(node) if isinstance(self.outcomes[node], WireError) else None

    def cancel(self, nodes: Sequence[int]) -> None:
        """Do nothing: all have ended."""

    def _error(self, node: int) -> GenerationError:
        outcome = self.outcomes[node]
        assert isinstance(outcome, WireError)
        return read_error(self.nodes[node], outcome)


def refuse_append() -> NoReturn:
    """Raise what an append to an ended run raises."""
    raise ProgramError("the run has ended: nothing can be appended")


def read_error(node: GraphNode, outcome: WireError) -> GenerationError:
    """Return what a read of a failed node raises; a new one each time, with its own trace."""
    error = from_wire(outcome)
    if isinstance(error, GenerationError):  # poisoned: it names the node that failed first
        return error
    made = GenerationError(
        f"{node.label} failed{tried(node.address)}: {described(error)}", address=node.address
    )
    made.__cause__ = error
    return made
