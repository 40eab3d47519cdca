"""What keeps a run cheap and changes nothing: passes that are passed by, no reference cycles."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.interpreter.conftest import MakeBackend
from tests.support.graphs import GraphBuilder, graphs

import umbel as ub
from umbel.interpreter.backends.scripted_replies import Reply
from umbel.interpreter.passes import rewrite
from umbel.interpreter.passes.session import stays_as_written
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Select


@given(nodes=graphs(), cuts=st.sets(st.integers(1, 40), max_size=6))
def test_a_piece_that_is_known_to_stay_is_what_all_passes_leave(
    nodes: list[GraphNode], cuts: set[int]
) -> None:
    ends = sorted({cut for cut in cuts if cut < len(nodes)} | {len(nodes)})
    for start, end in zip([0, *ends], ends, strict=False):
        piece = RequestGraph(tuple(nodes[start:end]), start)
        if stays_as_written(piece):
            done = rewrite(piece)
            assert done.graph is piece
            assert done.origins == tuple((node,) for node in piece.nodes)


def test_a_text_and_a_gen_stay_and_what_a_pass_looks_for_does_not() -> None:
    builder = GraphBuilder()
    at = builder.gen("x", builder.text("a"))
    assert stays_as_written(builder.piece())
    builder.add(Select("y", ("only",)), at)
    assert not stays_as_written(builder.piece())
    branches = builder.fork(at, 2)
    assert stays_as_written(builder.piece())
    last: int | None = builder.join(branches, at)
    assert not stays_as_written(builder.piece())
    for _ in range(8):
        last = builder.text("a", last)
    texts = builder.piece()
    assert not stays_as_written(texts)
    assert len(rewrite(texts).graph.nodes) == 1


def _one_piece(s: ub.State) -> None:
    s += "Question: "
    s += ub.gen("a")


def _pieces(s: ub.State) -> None:
    for i in range(3):
        s += f"{i}: " + ub.gen("a")
        assert s["a"] == "yes"


def _merged(s: ub.State) -> None:
    for text in "abcdefghij":
        s += text
    s += ub.gen("a") + ub.select("only", ["one"])


def _joined(s: ub.State) -> None:
    with s.fork(3) as branches:
        branches += ub.gen("a")
    s += ub.gen("a")


def _failed(s: ub.State) -> None:
    s += ub.gen("bad")
    s += ub.gen("a")


@pytest.mark.parametrize("way", ["run", "run_batch"])
@pytest.mark.parametrize("body", [_one_piece, _pieces, _merged, _joined, _failed])
def test_a_run_goes_when_its_result_does_without_a_garbage_collection(
    scripted: MakeBackend, body: Any, way: str
) -> None:
    scripted({"a": "yes", "bad": Reply(error=ub.BackendError("down", backend="scripted"))})
    runs: list[weakref.ref[Any]] = []

    def noted(s: ub.State) -> None:
        runs.append(weakref.ref(s._run))
        body(s)

    program = ub.function(noted)
    gc.collect()
    gc.disable()
    try:
        if way == "run_batch":
            assert len(program.run_batch([()] * 5, on_error="collect")) == 5
        elif body is not _failed:  # an exception that is raised holds its frames
            program.run()
        deadline = time.monotonic() + 10
        while any(run() is not None for run in runs) and time.monotonic() < deadline:
            time.sleep(0.001)  # the backend's thread may still be busy with the last events
        assert [run() for run in runs if run() is not None] == []
    finally:
        gc.enable()
