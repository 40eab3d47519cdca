"""The figures of docs/cache.md: rows that come late, between programs that fill the pool."""

from __future__ import annotations

import pytest

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Text
from umbel.lang.results import RunOptions
from umbel.runtime.bench.engines import NULL, BenchmarkModel
from umbel.runtime.bench.graph_builder import GraphBuilder
from umbel.runtime.bench.random_text import RandomText
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine

PREFIX, OWN, NEW, ROWS = 1860, 20, 8, 1000  # tokens, and rows
POOL = int(0.3 * (PREFIX + ROWS * (OWN + NEW)))
OTHERS, OTHERS_PROMPT, OTHERS_NEW = 32, 512, 64  # programs between the rows, and their tokens


def submit(
    engine: Engine, row: int, prompt: str, new: int, trunk: RequestGraph | None = None
) -> None:
    builder = GraphBuilder()
    builder.gen(new, builder.text(prompt, None))
    session = engine.open(RunOptions(row=row, trunk=trunk), lambda _: None)
    session.extend(builder.graph())
    session.close()


def drive(engine: Engine) -> None:
    while engine.step():
        pass


def prefilled_by_rows(at_once: int, *, is_told: bool) -> int:
    """Run the batch, so many rows at a time, and return the tokens prefilled for it."""
    config = EngineConfig(max_running=64, max_step_tokens=2048, max_seq_len=4096)
    model = BenchmarkModel(NULL, config)
    engine = model.new_engine(POOL)
    text = RandomText(model.tokenizer, 0)
    stem = text.draw(PREFIX)
    trunk = RequestGraph((GraphNode(0, "0", Text((stem,))),)) if is_told else None
    keeper = engine.open(RunOptions(trunk=trunk), lambda _: None)
    drive(engine)
    total = engine.core.scheduler.stats.tokens_prefilled
    for first in range(0, ROWS, at_once):
        for i in range(OTHERS if at_once < ROWS else 0):
            submit(engine, i, text.draw(OTHERS_PROMPT), OTHERS_NEW)
        drive(engine)
        before = engine.core.scheduler.stats.tokens_prefilled
        for row in range(first, first + at_once):
            submit(engine, row, stem + text.draw(OWN), NEW, trunk)
        drive(engine)
        total += engine.core.scheduler.stats.tokens_prefilled - before
    keeper.close()
    drive(engine)
    engine.core.scheduler.check()
    assert not engine.core.executor.runs
    assert not engine.core.holds._promises
    engine.close()
    model.close()
    return total


@pytest.mark.slow
def test_rows_that_come_late_find_their_trunk() -> None:
    at_once = prefilled_by_rows(ROWS, is_told=False)
    assert prefilled_by_rows(ROWS, is_told=True) == at_once
    late = prefilled_by_rows(50, is_told=True)
    untold = prefilled_by_rows(50, is_told=False)
    assert late < 1.05 * at_once, f"{late:,} after {at_once:,}"
    assert untold > 2.5 * late, f"{untold:,} after {late:,}"
