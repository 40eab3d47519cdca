"""A run's threads: whoever aborts, expires, seals or cancels meets a run that ends meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from umbel.interpreter import graph_run
from umbel.interpreter.backends.base import Capabilities, EventSink, Session
from umbel.interpreter.graph_run import GraphRun
from umbel.lang.errors import CancelledError, GenerationError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Op, Text
from umbel.lang.results import NodeFinished, NodeResult, RunOptions


class FakeBackend:
    """Keeps what it is told, as one session; sends what `finish` is told to."""

    name = "fake"
    capabilities = Capabilities()
    token_counter = None

    def __init__(self) -> None:
        self.told: list[str] = []
        self.sent: list[int] = []
        self.sink: EventSink | None = None
        self.on_open: Callable[[], None] = lambda: None
        self.on_cancel: Callable[[], None] = lambda: None

    def open(self, options: RunOptions, sink: EventSink) -> FakeBackend:
        self.sink = sink
        self.on_open()
        return self

    def extend(self, piece: RequestGraph) -> None:
        self.sent += [node.id for node in piece.nodes]

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        self.told.append("cancel")
        self.on_cancel()

    def close(self) -> None:
        self.told.append("close")

    def stats(self) -> dict[str, float]:
        return {}

    def finish(self) -> None:
        """Deliver the outcome of every node from another thread, and wait until it is in."""
        assert self.sink is not None
        sink, events = self.sink, [NodeFinished(i, NodeResult(text="a")) for i in self.sent]
        elsewhere(lambda: sink(events))


def elsewhere(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


class RacingRun(GraphRun):
    """A run whose nodes all end right after someone looked at its session."""

    backend: FakeBackend

    @property
    def _session(self) -> Session | None:
        found = self.kept
        if self.is_racing:
            self.is_racing = False
            self.backend.finish()
        return found

    @_session.setter
    def _session(self, session: Session | None) -> None:
        self.kept = session

    kept: Session | None = None
    is_racing: bool = False


def started(backend: FakeBackend, kind: type[GraphRun] = GraphRun) -> GraphRun:
    run = kind(backend, RunOptions(seed=1))
    run.add(Text(("a",)), "0", None)
    return run


@pytest.mark.parametrize("act", ["expire", "seal", "cancel"])
def test_run_that_ends_while_it_is_stopped_keeps_its_outcome(act: str) -> None:
    backend = FakeBackend()
    run = started(backend, RacingRun)
    assert isinstance(run, RacingRun)
    run.backend = backend
    run.flush()
    if act != "seal":
        run._is_sealed = True  # the body has ended: the last outcome ends the run
    run.is_racing = True
    if act == "cancel":
        run.cancel([0])
    else:
        getattr(run, act)()
    assert not run.is_racing
    assert run.is_ended
    assert run.result(0).text == "a"


def test_run_that_ends_while_it_is_aborted_closes_its_session() -> None:
    backend = FakeBackend()
    run = started(backend)
    run.flush()
    backend.on_cancel = backend.finish
    run.abort()
    assert run.is_ended
    assert run.result(0).text == "a"
    assert backend.told == ["cancel", "close"]


def test_abort_while_the_body_hands_over_counts_each_node_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = started(FakeBackend())
    aborting = threading.Thread(target=run.abort)

    def abort_first(nodes: tuple[GraphNode, ...], base: int) -> RequestGraph:
        aborting.start()
        aborting.join(0.1)  # it ends, unless it has to wait until the nodes are counted
        return RequestGraph(nodes, base)

    monkeypatch.setattr(graph_run, "RequestGraph", abort_first)
    run.flush()
    aborting.join()
    assert run.is_ended


def test_session_opened_while_another_thread_aborts_is_stopped() -> None:
    backend = FakeBackend()
    run = started(backend)
    backend.on_open = lambda: elsewhere(run.abort)
    run.flush()
    assert run.is_ended
    assert sorted(backend.told) == ["cancel", "close"]


def test_node_recorded_as_the_run_is_aborted_fails_and_reaches_no_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend()
    run = GraphRun(backend, RunOptions(seed=1))

    def abort_first(node_id: int, address: str, op: Op, parent: int | None) -> GraphNode:
        elsewhere(run.abort)  # the body's thread has seen that nothing was aborted yet
        return GraphNode(node_id, address, op, parent)

    monkeypatch.setattr(graph_run, "GraphNode", abort_first)
    node = run.add(Text(("a",)), "0", None)
    with pytest.raises(GenerationError) as caught:
        run.result(node)
    assert isinstance(caught.value.__cause__, CancelledError)
    assert backend.sent == []


def test_wait_that_an_abort_ends_is_reported_as_over() -> None:
    waits: list[bool] = []
    backend = FakeBackend()
    run = GraphRun(backend, RunOptions(seed=1), on_block=waits.append)
    node = run.add(Text(("a",)), "0", None)

    def abort_once_it_waits() -> None:
        while run._waiters is None:
            is_waiting.wait(0.001)
        run.abort()

    is_waiting = threading.Event()
    thread = threading.Thread(target=abort_once_it_waits)
    thread.start()
    with pytest.raises(GenerationError):
        run.result(node)
    thread.join()
    assert waits == [True, False]
