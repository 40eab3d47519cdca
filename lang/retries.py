"""Asks again for a value that does not fit its type; knows no backend, and decodes nothing itself.

A gen with `retries` is looked at when its sequence goes on or is read: what follows must follow the
value that fits. Each attempt is a node of its own, so each has its own address and seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .ended_run import EndedRun
from .errors import GenerationError, InvalidValueError, TruncatedError
from .expressions import GenExpr, RoleMark
from .ir import Ref, Text
from .transcript import misfit, value_of

if TYPE_CHECKING:
    from .state import State

_MORE = re.compile(r"\n *For further information visit \S+")  # pydantic's links are no help here


class Attempts:
    """A gen with `retries` whose value nobody has looked at yet.

    The state then goes on behind the value that fits, or behind the last one.
    """

    __slots__ = ("_branch", "_expr", "_first", "_node", "_num_made", "_state")

    def __init__(self, state: State, node: int, expr: GenExpr[Any]) -> None:
        self._state = state
        self._first = node
        self._node = node
        self._expr = expr
        self._num_made = 1
        self._branch: State | None = None  # where the conversation about the failures is

    def settle(self) -> None:
        """Wait for the value, asking again where that is due.

        Raises ProgramError where waiting would block an event loop.
        """
        for node in self._nodes():
            with suppress(GenerationError):  # judged by `_misfit`
                self._state._run.result(node)
        self._state._settled()

    async def asettle(self) -> None:
        """Do the same without blocking the event loop."""
        for node in self._nodes():
            with suppress(GenerationError):
                await self._state._run.aresult(node)
        self._state._settled()

    def _nodes(self) -> Iterator[int]:
        """Yield the node of each attempt; it must have ended before the next one is asked for."""
        while True:
            yield self._node
            error = self._misfit()
            is_last = self._num_made > self._expr.retries
            if error is None or is_last or isinstance(self._state._run, EndedRun):
                break
            self._ask_again(error)
        if self._branch is not None:
            first = self._state._run.nodes[self._first]
            address = f"{first.address}.value"
            text = Text((Ref(self._node),))
            self._state._tail = self._state._run.add(text, address, first.parent)

    def _misfit(self) -> Exception | None:
        """Return why the latest value does not fit; None where another attempt would not help."""
        run = self._state._run
        try:
            value_of(run.nodes[self._node], run.result(self._node), self._expr)
        except TruncatedError:
            return None
        except GenerationError as error:
            cause = error.__cause__
            # a node that failed otherwise would fail again
            is_value = run.failure(self._node) is None or isinstance(cause, InvalidValueError)
            return cause if is_value and isinstance(cause, Exception) else None
        return None

    def _ask_again(self, error: Exception) -> None:
        state, run = self._state, self._state._run
        first = run.nodes[self._first]
        address = f"{first.address}.retry{self._num_made}"
        self._num_made += 1
        before = self._node
        if self._expr.reask:
            self._node = self._reask(error, address)
        else:
            op = self._expr.op(state._defaults)
            self._node = state._tail = self._noted(run.add(op, address, first.parent))
        state._rebind(before, self._node)

    def _reask(self, error: Exception, address: str) -> int:
        """Go on behind the wrong value with what is wrong about it, and ask for another."""
        state = self._state
        here = self._branch or state
        is_failed = state._run.failure(self._node) is not None
        if is_failed:  # nothing can follow a failed node: its text is written again
            here._tail = state._run.nodes[self._node].parent
        self._branch = branch = here._branch(address, 0, 1)
        role = state._role
        if is_failed and isinstance(error, InvalidValueError):
            branch += error.text
        why = _MORE.sub("", misfit(error)).strip()
        question = f"This is not valid: {why}\nWrite it again, corrected, and nothing else."
        if role:
            branch += RoleMark(role, "end")
            branch += RoleMark("user", "begin")
            branch += question
            branch += RoleMark("user", "end")
            branch += RoleMark(role, "begin")
        else:
            branch += f"\n{question}\n"
        return self._noted(branch._add(self._expr.op(state._defaults)))

    def _noted(self, node: int) -> int:
        exprs = self._state._run.exprs
        if exprs is not None:
            exprs[node] = self._expr
        return node
