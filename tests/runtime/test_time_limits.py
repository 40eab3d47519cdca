"""A node whose time limit passes is called by its name and its place."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.engine_harness import drive, make_engine
from tests.support.graphs import GraphBuilder

from umbel.lang.ir import Gen
from umbel.lang.results import Event, NodeFailed, RunOptions


@pytest.mark.parametrize(("name", "label"), [("city", "'city' (0)"), ("", "0")])
def test_a_late_node_is_named(name: str, label: str) -> None:
    events: list[Event] = []

    def sink(some: Sequence[Event]) -> None:
        events.extend(some)

    builder = GraphBuilder()
    builder.add(Gen(name, timeout=0.0))
    engine = make_engine()
    session = engine.open(RunOptions(), sink)
    session.extend(builder.piece())
    session.close()
    drive(engine)
    messages = [event.error.message for event in events if isinstance(event, NodeFailed)]
    assert messages == [f"{label} did not finish within 0.0 s"]
