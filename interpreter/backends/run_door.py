"""The way of a run's pieces and commands from any thread to the loop that owns the run.

Knows the order of the pieces, and no wire.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from umbel.lang.errors import BackendError, ProgramError
from umbel.lang.graph import GraphNode, RequestGraph

Call = Callable[[Callable[[], object]], None]


class RunDoor:
    """Where callers of one session hand in. `call` runs a command on the loop's thread, and raises
    BackendError once the backend is closed.
    """

    __slots__ = ("_call", "_lock", "_num_nodes")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._num_nodes = 0  # handed in so far

    def extend(
        self,
        piece: RequestGraph,
        take: Callable[[RequestGraph], None],
        *,
        check: Callable[[Sequence[GraphNode]], None] | None = None,
    ) -> None:
        """Hand the run's next piece to `take`, after `check` of its nodes here.

        Raises ProgramError for a piece that is not well formed or not the next, what `check`
        raises, and BackendError when the backend is closed.
        """
        piece.check()
        with self._lock:
            if piece.base != self._num_nodes:
                raise ProgramError(
                    f"the piece starts at node {piece.base}; the run has {self._num_nodes}"
                )
            if check is not None:
                check(piece.nodes)
            self._call(lambda: take(piece))
            self._num_nodes += len(piece.nodes)

    def tell(self, command: Callable[[], object]) -> None:
        """Run a command unless the backend is closed: then all nodes have failed."""
        with suppress(BackendError):
            self._call(command)
