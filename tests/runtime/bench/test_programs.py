"""The program benchmark: what its arms compute is counted against a trie of the rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
from tests.support.engine_harness import make_engine

from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Select, Text
from umbel.runtime.bench.arms import ARMS, Submission, separate_choices
from umbel.runtime.bench.clients import BenchmarkError, drive
from umbel.runtime.bench.engines import NULL, BenchmarkModel
from umbel.runtime.bench.graph_builder import GraphBuilder
from umbel.runtime.bench.programs import RunFigures, count_least, run_once, run_programs
from umbel.runtime.bench.random_text import RandomText
from umbel.runtime.bench.workloads import LIMITS, WORKLOADS, Workload, make_workload
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.request import Request

SUBMISSIONS: tuple[Submission, ...] = ("graph", "nodes", "requests")


@pytest.fixture(scope="module")
def model() -> Iterator[BenchmarkModel]:
    limits = LIMITS["small"]
    config = EngineConfig(
        max_running=limits.max_running,
        max_step_tokens=limits.max_step_tokens,
        kv_tokens=4096,
        check_accounting=True,
    )
    model = BenchmarkModel(NULL, config)
    yield model
    model.close()


def small(model: BenchmarkModel, name: str) -> Workload:
    return make_workload(name, RandomText(model.tokenizer, 0), "small", LIMITS["small"])


def run(model: BenchmarkModel, name: str, arm: str) -> RunFigures:
    return run_once(model, small(model, name), ARMS[arm])


class Rows:
    """The rows of a workload on the null runner, whose greedy gens are a's: one token each."""

    def __init__(self, graphs: tuple[RequestGraph, ...]) -> None:
        self.prompts: list[tuple[str, str]] = []  # what each gen or select reads, what it appends
        for number, graph in enumerate(graphs):
            after: dict[int | None, str] = {None: ""}
            for node in graph.nodes:
                before, added = after[node.parent], ""
                match node.op:
                    case Text():
                        added = "".join(part for part in node.op.parts if isinstance(part, str))
                    case Gen() as gen:
                        assert gen.constraint is None, f"program {number}"
                        added = "a" * gen.sampling.max_tokens
                        self.prompts.append((before, added))
                    case Select() as select:
                        added = select.choices[0]
                        self.prompts.append((before, ""))
                after[node.id] = before + added

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.prompts)

    @property
    def least_prefill(self) -> int:
        """Distinct prefixes of prompts, but for those that were decoded."""
        read = {p[:n] for p, _ in self.prompts for n in range(1, len(p) + 1)}
        return len(read - self.decoded)

    @property
    def decoded(self) -> set[str]:
        """Prefixes that end in a sampled token whose row is computed: in each gen all but one."""
        return {prompt + added[:n] for prompt, added in self.prompts for n in range(1, len(added))}


FREE = [name for name in WORKLOADS if name not in ("json", "agents")]


@pytest.mark.parametrize("name", FREE)
def test_with_a_cache_the_least_possible_is_prefilled(model: BenchmarkModel, name: str) -> None:
    workload = small(model, name)
    rows = Rows(workload.graphs)
    figures = run_once(model, workload, ARMS["default"])
    assert figures.prefilled - figures.tree == rows.least_prefill
    assert count_least(model, workload) == figures.prefilled
    assert figures.decoded == sum(max(0, len(added) - 1) for _, added in rows.prompts)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "json"])
def test_without_a_cache_every_prompt_is_computed(model: BenchmarkModel, name: str) -> None:
    workload = small(model, name)
    figures = run_once(model, workload, ARMS["no-cache"])
    assert figures.prefilled - figures.tree == Rows(workload.graphs).num_tokens
    assert figures.cached == 0
    assert figures.prompt == figures.prefilled


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in ("agents", "wide")])
def test_every_arm_decodes_the_same_tokens(model: BenchmarkModel, name: str, arm: str) -> None:
    workload = small(model, name)
    figures = run_once(model, workload, ARMS[arm])
    assert figures.decoded == run(model, name, "default").decoded
    assert figures.steps >= figures.decode_steps
    if ARMS[arm].settings.get("prefix_cache", True):
        # what a tree scores at once, branches prefill: as much of it
        assert figures.prefilled == count_least(model, workload)


def test_a_tree_of_thought_takes_as_many_steps_as_it_is_deep(model: BenchmarkModel) -> None:
    workload = small(model, "tree-of-thought")
    gens = [node.op for node in workload.graphs[0].nodes if isinstance(node.op, Gen)]
    assert len(gens) == 30
    one = Workload("one", "", workload.graphs[:1], workload.max_tokens)
    wide = BenchmarkModel(NULL, EngineConfig(max_running=16, max_step_tokens=512, kv_tokens=4096))
    try:
        steps = {name: run_once(wide, one, ARMS[name]).decode_steps for name in ARMS}
    finally:
        wide.close()
    each = gens[0].sampling.max_tokens - 1
    assert steps["default"] == 4 * each
    assert steps["no-parallel"] == steps["no-graph"] == 30 * each


def test_choices_are_scored_in_a_tree_or_as_branches(model: BenchmarkModel) -> None:
    workload = small(model, "select")
    select = next(n.op for n in workload.graphs[0].nodes if isinstance(n.op, Select))
    length = len(select.choices[0])
    tree, branches = run(model, "select", "default"), run(model, "select", "no-tree")
    assert tree.tree == len(workload.graphs) * 4 * length
    assert branches.tree == 0
    # a branch's own last row is a prompt's last row, which gives the logits to sample from
    assert tree.prompt < branches.prompt == len(workload.graphs) * 4 * (50 + length)


def test_selects_become_branches_that_read_what_they_did() -> None:
    builder = GraphBuilder()
    asked = builder.text("which? ", None)
    chosen = builder.select(("one", "two"), asked)
    builder.gen(3, builder.after((chosen,), asked))
    graph = separate_choices(builder.graph())
    graph.check()
    assert not any(isinstance(node.op, Select) for node in graph.nodes)
    engine = make_engine()
    drive(engine, [graph], "graph")
    assert engine.core.scheduler.stats.tree_tokens == 0


def test_a_json_answer_has_its_five_fields(model: BenchmarkModel) -> None:
    figures = run(model, "json", "default")
    shortest = len('{"name": "aaaaaaaa", "age": 10, "city": "aaaaaaaa", ')
    workload = small(model, "json")
    assert figures.decoded > shortest * len(workload.graphs)
    assert figures.decode_steps < figures.decoded / len(workload.graphs)  # its text is forced


def test_the_pool_of_the_agents_is_too_small_for_least_recently_used(
    model: BenchmarkModel,
) -> None:
    rows = Rows(small(model, "agents").graphs)
    lru, default = run(model, "agents", "lru"), run(model, "agents", "default")
    assert lru.cached < 0.06 * rows.num_tokens  # of the last agents, when the first have ended
    assert default.cached > 0.25 * rows.num_tokens
    assert lru.retractions == default.retractions == 0


def test_programs_that_fill_the_batch_end_one_after_the_other(model: BenchmarkModel) -> None:
    program, fcfs = run(model, "wide", "default"), run(model, "wide", "fcfs")
    assert program.steps == pytest.approx(fcfs.steps, rel=0.01)
    assert program.mean_latency_steps <= 0.65 * fcfs.mean_latency_steps


def record_rows(engine: Engine) -> list[tuple[int, ...]]:
    """Return where the rows of requests come that end from now on."""
    rows: list[tuple[int, ...]] = []
    finish = engine.core.finish

    def record(request: Request, keep: Sequence[int]) -> None:
        rows.append(tuple(request.token_ids))
        finish(request, keep)

    engine.core.finish = record  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("name", ["tree-of-thought", "judge", "select", "agents"])
def test_rows_are_the_same_however_a_program_is_submitted(model: BenchmarkModel, name: str) -> None:
    """On logits that are a hash of the prefix: one wrong token would change all after it."""
    graphs = small(model, name).graphs[:2]
    rows = {}
    for submission in SUBMISSIONS:
        engine = make_engine()
        ended = rows[submission] = record_rows(engine)
        drive(engine, graphs, submission)
        ended.sort()
    assert rows["graph"] == rows["nodes"] == rows["requests"]


@pytest.mark.parametrize("submission", SUBMISSIONS)
def test_a_program_that_fails_fails_the_benchmark(submission: Submission) -> None:
    builder = GraphBuilder()
    builder.gen(2, builder.select(("same", "same"), builder.text("x", None)))
    with pytest.raises(BenchmarkError, match="each given once"):
        drive(make_engine(), [builder.graph()], submission)


def test_figures_come_for_each_workload_and_arm(model: BenchmarkModel) -> None:
    results = run_programs(
        model, workloads=["judge", "select"], arms=["fcfs", "no-tree"], size="small", repeats=2
    )
    places = [(result.workload, result.arm) for result in results]
    assert places == [(w, a) for w in ("judge", "select") for a in ("fcfs", "no-tree")]
    assert results[0].times_default["time"] == 1.0
    assert json.dumps([result.times_default for result in results])
