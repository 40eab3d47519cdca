"""One run in an engine, as its client holds it: pieces in order, and none after the end.

Knows the rules of a session; where the engine is (`SessionLink`) it does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from umbel.lang.errors import ProgramError, UmbelError
from umbel.lang.graph import RequestGraph

_NONE: Mapping[int, UmbelError] = MappingProxyType({})


class SessionLink(Protocol):
    """The way of one run to its engine. But for `prepare`, calls come in the pieces' order."""

    def prepare(self, piece: RequestGraph) -> None:
        """Do what can be done for a piece before its turn, on the caller's thread."""
        ...

    def extend(self, piece: RequestGraph, failed: Mapping[int, UmbelError]) -> None:
        """Hand over a checked piece; raises EngineStoppedError."""
        ...

    def cancel(self, nodes: list[int] | None) -> None:
        """Cancel nodes; nothing once the engine has stopped."""
        ...

    def close(self) -> None:
        """Say that no more pieces come; nothing once the engine has stopped."""
        ...


class EngineSession:
    """One run in the engine; may be used from any thread."""

    def __init__(self, link: SessionLink) -> None:
        self._link = link
        self._lock = threading.Lock()  # pieces reach the engine in the order of their nodes
        self._num_nodes = 0
        self._is_closed = False

    def extend(self, piece: RequestGraph, failed: Mapping[int, UmbelError] = _NONE) -> None:
        """Hand over more of the graph; raises ProgramError, EngineStoppedError.

        Nodes of the piece in `failed` have ended elsewhere: they fail without an event.
        """
        piece.check()
        self._link.prepare(piece)  # takes a long text's time, in which others may close the run
        with self._lock:
            if self._is_closed:
                raise ProgramError("the session is closed: a run takes no pieces after that")
            if piece.base != self._num_nodes:
                raise ProgramError(
                    f"the piece starts at node {piece.base}; the run has {self._num_nodes} nodes"
                )
            self._link.extend(piece, failed)
            self._num_nodes += len(piece.nodes)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Cancel nodes (all, by default) that have not ended."""
        self._link.cancel(None if nodes is None else list(nodes))

    def close(self) -> None:
        """Promise that no more pieces come. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._link.close()
