"""An event sink that keeps what it gets and can be waited for."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from umbel.lang.errors import GenerationError, UmbelError, from_wire
from umbel.lang.results import Event, NodeFailed, NodeFinished, NodeResult, TextDelta

WAIT_S = 20.0


class Recorder:
    """Collects the events of one run; refuses a second end of a node and what follows an end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.results: dict[int, NodeResult] = {}
        self.errors: dict[int, UmbelError] = {}
        self.faults: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, events: Sequence[Event]) -> None:
        with self._changed:
            for event in events:
                self.events.append(event)
                if event.node in self.results or event.node in self.errors:
                    self.faults.append(f"{event} came after the node's end")
                if isinstance(event, NodeFinished):
                    self.results[event.node] = event.result
                elif isinstance(event, NodeFailed):
                    self.errors[event.node] = from_wire(event.error)
            self._changed.notify_all()

    def wait(self, *nodes: int) -> None:
        """Wait until the nodes have ended; AssertionError when they do not."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: all(n in self.results or n in self.errors for n in nodes), WAIT_S
            )
        assert done, f"nodes {nodes} did not end; {self.results} {self.errors}"
        assert self.faults == []

    def wait_text(self, node: int) -> None:
        """Wait for the first text of a node."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._text(node)), WAIT_S)

    def wait_started(self, node: int) -> None:
        """Wait for any event of a node."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(e.node == node for e in self.events), WAIT_S)

    def text(self, node: int) -> str:
        """Return the deltas of a node, put together."""
        with self._changed:
            return self._text(node)

    def _text(self, node: int) -> str:
        return "".join(e.text for e in self.events if isinstance(e, TextDelta) and e.node == node)

    def outcome(self, node: int) -> tuple[str, str]:
        """Return what a node came to, in a form to compare.

        A poisoned node says so and no more: which of two failures came first depends on time.
        """
        if node in self.results:
            return "finished", repr(self.results[node])
        error = self.errors[node]
        return "failed", "poisoned" if isinstance(error, GenerationError) else repr(error)
