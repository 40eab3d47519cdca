"""What an engine counts of itself, and where programs' time went."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    Collector,
    drive,
    graphs,
    make_engine,
    open_run,
    run_graphs,
)
from tests.support.graphs import GraphBuilder

from umbel.lang.constraints import Regex
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Join, Select
from umbel.lang.results import NodeResult, RunOptions, Timings
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine_stats import COUNTERS, GAUGES, STEP_LOGGER
from umbel.runtime.metrics import EngineMetrics
from umbel.runtime.program_report import PROGRAM_LOGGER, ProgramTimes

DOCS = Path(__file__).resolve().parents[2] / "docs" / "engine.md"
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def reports(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = []
    for record in caplog.records:
        if record.name == PROGRAM_LOGGER:
            report: dict[str, Any] = vars(record)["program"]
            assert json.loads(record.getMessage()) == report
            found.append(report)
    return found


def test_every_counter_is_named_explained_and_shown() -> None:
    stats = make_engine().stats()
    assert stats.keys() == COUNTERS.keys() | GAUGES.keys()
    assert not COUNTERS.keys() & GAUGES.keys()
    text = EngineMetrics(lambda: stats).render().decode()
    documented = DOCS.read_text()
    for name, meaning in (COUNTERS | GAUGES).items():
        metric = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
        assert f"umbel_engine_{metric}" in text
        assert f"| `{name}` | {meaning} |" in documented, f"docs/engine.md lacks {name}"


@settings(max_examples=60)
@given(st.lists(graphs(), min_size=1, max_size=4), st.booleans(), st.integers(160, 400))
def test_the_counters_of_any_programs_add_up(
    programs: list[RequestGraph], overlap: bool, num_slots: int
) -> None:
    engine = make_engine(overlap=overlap, kv_tokens=num_slots, track_bound=True)
    collectors = run_graphs(engine, programs)
    stats = engine.stats()
    assert stats["programs"] == len(programs)
    assert stats["active_programs"] == 0
    assert stats["useful_tokens"] <= stats["step_tokens"] <= stats["budget_tokens"]
    parts = stats["forward_s"] + stats["wait_s"] + stats["host_s"]
    assert parts == pytest.approx(stats["step_s"])
    results = [result for c in collectors for result in c.results.values()]
    assert stats["saved_tokens"] == sum(result.usage.cached_tokens for result in results)
    timings = [r.timings for r in results if r.timings.scheduled]
    spent = sum(t.finished - t.ready for t in timings)
    told = [stats[name] for name in ("queue_s", "grammar_s", "prefill_s", "decode_s")]
    assert min(told) >= 0
    assert sum(told) == pytest.approx(spent)
    assert 0 <= stats["hit_rate"] <= 1
    assert 0 <= stats["hit_rate_bound"] <= 1


def test_a_program_is_logged_when_it_ends_as_one_line_of_json(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    builder = GraphBuilder()
    at = builder.add(Gen("x", LONG), builder.text("abc"))
    at = builder.add(Select("s", ("yes", "no")), at)
    at = builder.add(Gen("y", LONG, Regex("[ab]{3}")), at)
    with caplog.at_level(logging.INFO, PROGRAM_LOGGER):
        _, collector = open_run(engine, builder.piece())
        drive(engine)
    (report,) = reports(caplog)
    results = collector.results.values()
    assert report["nodes"] == 4
    assert report["failed"] == 0
    for field in ("saved_tokens", "prompt_tokens", "completion_tokens"):
        name = field.replace("saved", "cached")
        assert report[field] == sum(getattr(r.usage, name) for r in results)
    times = [r.timings for r in results if r.timings.scheduled]
    critical = sum(t.finished - t.scheduled for t in times)  # it is one chain
    assert report["critical_path_s"] == pytest.approx(critical, abs=1e-5)
    ratio = (report["seconds"] - report["tool_s"]) / critical
    assert report["critical_path_ratio"] == pytest.approx(max(1.0, ratio), rel=0.01)


def test_it_is_not_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_graphs(make_engine(), [GraphBuilder().piece()])
    assert reports(caplog) == []


def test_failures_are_counted_and_a_program_that_used_no_model_has_no_ratio(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    builder = GraphBuilder()
    builder.add(Gen("x", LONG, Regex("(")), builder.text("abc"))
    with caplog.at_level(logging.INFO, PROGRAM_LOGGER):
        open_run(engine, builder.piece())
        drive(engine)
    (report,) = reports(caplog)
    assert report["failed"] == 1
    assert report["critical_path_ratio"] is None


def test_time_in_which_a_program_had_nothing_to_do_here_is_the_tools() -> None:
    engine = make_engine()
    now = 100.0

    def clock() -> float:
        return now

    engine.core.executor._clock = engine.core.executor.tasks._clock = clock
    builder, collector = GraphBuilder(), Collector()
    session = engine.open(RunOptions(), collector)
    at = builder.add(Gen("x", LONG), builder.text("abc"))
    session.extend(builder.piece())
    drive(engine)
    now += 7.0  # a tool runs
    builder.add(Gen("y", LONG), at)
    session.extend(builder.piece())
    drive(engine)
    now += 2.0
    session.close()
    drive(engine)
    assert engine.stats()["tool_s"] == 9.0
    assert engine.stats()["programs"] == 1


def test_the_critical_path_is_the_longest_chain_and_knows_no_waiting() -> None:
    times = ProgramTimes()

    def node(number: int, parent: int | None, ready: float, start: float, end: float) -> None:
        result = NodeResult(timings=Timings(ready, start, start, end))
        seconds = times.took(result, ready, [])
        times.follows(GraphNode(number, str(number), Gen("x"), parent), seconds)

    node(0, None, 0.0, 1.0, 2.0)
    node(1, 0, 2.0, 2.0, 5.0)  # two branches
    node(2, 0, 2.0, 6.0, 7.0)
    times.follows(GraphNode(3, "3", Join((1, 2)), 0), 0.0)
    node(4, 3, 7.0, 7.0, 8.0)
    assert times.critical_s == 1 + 3 + 1
    assert times.sums.queue_s == 1 + 0 + 4 + 0


def test_a_step_is_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    builder = GraphBuilder()
    builder.add(Gen("x", LONG), builder.text("abc"))
    with caplog.at_level(logging.DEBUG, STEP_LOGGER):
        open_run(engine, builder.piece())
        drive(engine)
    steps = [vars(record)["step"] for record in caplog.records if record.name == STEP_LOGGER]
    assert len(steps) == engine.stats()["steps"]
    assert sum(step["tokens"] for step in steps) == engine.stats()["step_tokens"]
