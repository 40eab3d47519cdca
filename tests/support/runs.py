"""Starts runs on a backend as the interpreter does: a session, and who hears of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from umbel.interpreter.backends.base import Backend, Session
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.results import RunOptions

from .graphs import GraphBuilder
from .recorder import Recorder


def start_run(
    backend: Backend, build: GraphBuilder, options: RunOptions | None = None
) -> tuple[Recorder, Session]:
    """Open a run and hand it what is built so far. It may still grow."""
    recorder = Recorder()
    session = backend.open(options or RunOptions(), recorder)
    session.extend(build.piece())
    return recorder, session


def extend_with_reads(
    session: Session, recorder: Recorder, nodes: Sequence[GraphNode], data: st.DataObject
) -> None:
    """Hand a graph over in pieces that are drawn, and wait for some of it in between."""
    start = 0
    while start < len(nodes):
        end = data.draw(st.integers(start + 1, len(nodes)))
        session.extend(RequestGraph(tuple(nodes[start:end]), start))
        if data.draw(st.booleans()):  # a read
            recorder.wait(data.draw(st.integers(0, end - 1)))
        start = end
