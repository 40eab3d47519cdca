"""Engines on the hash runner, random graphs for them, and what comes back, for property tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from tests.support.hash_runner import HashRunner

from umbel.lang.constraints import Choices, Constraint, Regex
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Join, JoinMode, Op, Ref, RoleEnd, RoleStart, Select, Text
from umbel.lang.results import (
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    NodeStarted,
    RunOptions,
    TextDelta,
)
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.engine_session import EngineSession
from umbel.runtime.grammar import GrammarCompiler
from umbel.runtime.model_runner.runner import Runner
from umbel.runtime.tokenizer import Tokenizer

MERGES = [("a", "b"), ("ab", "c"), ("b", "c"), ("c", "a"), (" ", "a"), ("x", "y")]
TOKENIZER = Tokenizer.byte_level(288, merges=MERGES)
GRAMMAR = GrammarCompiler(TOKENIZER.vocabulary())


@dataclass
class Collector:
    """Takes a run's events and checks the contract of a session while it does."""

    results: dict[int, NodeResult] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    messages: dict[int, str] = field(default_factory=dict)  # of the errors
    causes: dict[int, str] = field(default_factory=dict)
    deltas: dict[int, str] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, events: Sequence[Event]) -> None:
        with self._changed:
            self._take(events)
            self._changed.notify_all()

    def wait(self, num_nodes: int, timeout: float) -> None:
        """Wait until so many nodes have ended."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_ended >= num_nodes, timeout)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.node not in self.results, "an event after the terminal one"
            assert event.node not in self.errors, "an event after the terminal one"
            match event:
                case NodeStarted(node):
                    assert node not in self.started
                    self.started.add(node)
                case TextDelta(node, text):
                    self.deltas[node] = self.deltas.get(node, "") + text
                case NodeFinished(node, result):
                    self.results[node] = result
                case NodeFailed(node, error):
                    self.errors[node] = error.type
                    self.messages[node] = error.message
                    self.causes[node] = "" if error.cause is None else error.cause.message

    @property
    def num_ended(self) -> int:
        return len(self.results) + len(self.errors)

    def outcome(self) -> dict[int, object]:
        """What must be equal however the engine was set up: no timings, no cache counts."""
        seen: dict[int, object] = {n: ("failed", e) for n, e in self.errors.items()}
        for node, result in self.results.items():
            seen[node] = (result.text, result.samples, result.scores)
        return seen


def make_engine(runner: Runner | None = None, **options: Any) -> Engine:
    """An engine without a thread, on hash logits, that checks its accounting after each step."""
    fields: dict[str, Any] = {"check_accounting": True, "max_running": 8, "max_step_tokens": 64}
    runner = runner or make_runner()
    config = EngineConfig(**(fields | options))
    return Engine(
        runner,
        TOKENIZER,
        config,
        max_seq_len=config.max_seq_len or 512,
        grammar=GRAMMAR,
        start=False,
    )


def make_runner(num_slots: int = 768, **options: Any) -> HashRunner:
    return HashRunner(
        num_slots=num_slots,
        vocab_size=TOKENIZER.vocabulary().size,
        eos_id=min(TOKENIZER.eos_ids),
        eos_boost=2.0,
        **options,
    )


def drive(engine: Engine, max_steps: int = 20_000) -> None:
    """Step until there is nothing to do."""
    idle_since = time.monotonic()
    for _ in range(max_steps):
        if engine.step():
            idle_since = time.monotonic()
            continue
        if engine.core.executor.is_idle:
            return
        assert time.monotonic() < idle_since + 5, "the engine is stuck with work to do"
        time.sleep(0.001)  # a constraint is being compiled on another thread
    raise AssertionError(f"the engine is still at work after {max_steps} steps")


def run_graphs(
    engine: Engine, graphs: Sequence[RequestGraph], *, alone: bool = False, pieces: bool = False
) -> list[Collector]:
    """Run graphs as rows of one batch; `alone`: one after the other; `pieces`: node by node."""
    collectors = []
    for row, graph in enumerate(graphs):
        collector = Collector()
        session = engine.open(RunOptions(seed=7, row=row), collector)
        if pieces:
            for node in graph.nodes:
                session.extend(RequestGraph((node,), base=node.id))
                if alone:
                    drive(engine)
        else:
            session.extend(graph)
        session.close()
        if alone:
            drive(engine)
        collectors.append(collector)
    drive(engine)
    for graph, collector in zip(graphs, collectors, strict=True):
        assert collector.num_ended == len(graph.nodes), "a node without a terminal event"
    return collectors


def check_idle(engine: Engine) -> None:
    """Nothing is left of runs that are over: every page is free or in the cache."""
    engine.core.scheduler.check()
    assert not engine.core.executor.runs
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == stats["device_grammars"] == 0
    assert engine.core.cache.num_protected == 0
    assert engine.core.scheduler.num_available == stats["kv_slots"]


CONSTRAINTS = (None, None, None, Regex("[ab]{2,5}"), Choices(("yes", "no", "xyz")))


class GraphMaker:
    """Builds a graph the way the language does."""

    def __init__(
        self,
        greedy: bool = False,
        constraints: Sequence[Constraint | None] = CONSTRAINTS,
    ) -> None:
        self.nodes: list[GraphNode] = []
        self.greedy = greedy
        self.constraints = constraints  # that random gens draw from

    def add(self, op: Op, parent: int | None) -> int:
        node = GraphNode(len(self.nodes), f"{len(self.nodes)}", op, parent)
        self.nodes.append(node)
        return node.id

    def graph(self) -> RequestGraph:
        graph = RequestGraph(tuple(self.nodes))
        graph.check()
        return graph


_TEXTS = st.sampled_from(
    ["", "a", "ab", "abc ", "bca", "xyxy", " a b", "é日", "no", "0123456789" * 3]
)
_CHOICES = st.sampled_from(
    [("yes", "no"), ("a", "b", "c"), ("abc", "abd", "xy"), ("only",), ("ab", "cab", "bab", "b")]
)


@st.composite
def samplings(draw: st.DrawFn, greedy: bool) -> SamplingParams:
    scores_prompt = draw(st.sampled_from([False, False, True]))
    return SamplingParams(
        max_tokens=draw(st.integers(1, 9)),
        temperature=0.0 if greedy else draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])),
        top_logprobs=2 if greedy else draw(st.sampled_from([0, 1, 3])) if scores_prompt else 0,
        prompt_logprobs=scores_prompt,
        top_k=draw(st.sampled_from([0, 3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        stop=draw(st.sampled_from([(), ("a",), ("b", "ab"), ("q",)])),
    )


@st.composite
def graphs(
    draw: st.DrawFn,
    max_ops: int = 10,
    greedy: bool = False,
    constraints: Sequence[Constraint | None] = CONSTRAINTS,
) -> RequestGraph:
    """A random program: texts, gens, selects, nested forks, joins and roles.

    With `greedy` gens are greedy and give the two best log-probabilities.
    """
    maker = GraphMaker(greedy, constraints)
    prefix = draw(st.sampled_from(["", "system text ", "abcabcabcabcabcabcabcabc", "xy"]))
    at: int | None = maker.add(Text((prefix,)), None) if prefix else None
    _grow(draw, maker, at, draw(st.integers(1, max_ops)), depth=0)
    if not maker.nodes:
        maker.add(Text(("a",)), None)
    return maker.graph()


def _grow(
    draw: st.DrawFn, maker: GraphMaker, at: int | None, num_ops: int, depth: int
) -> int | None:
    gens: list[int] = []
    for _ in range(num_ops):
        kind = draw(st.sampled_from(["text", "gen", "gen", "select", "fork", "ref", "turn"]))
        if kind == "text":
            at = maker.add(Text((draw(_TEXTS),)), at)
        elif kind == "gen":
            gen = Gen(
                f"g{len(maker.nodes)}",
                draw(samplings(maker.greedy)),
                draw(st.sampled_from(maker.constraints)),
                heal=draw(st.sampled_from([False, False, True])),
            )
            at = maker.add(gen, at)
            gens.append(at)
        elif kind == "select":
            at = maker.add(Select(f"s{len(maker.nodes)}", draw(_CHOICES)), at)
        elif kind == "ref" and gens:
            at = maker.add(Text(("<", Ref(draw(st.sampled_from(gens))), ">")), at)
        elif kind == "turn":
            at = maker.add(RoleStart("user"), at)
            at = maker.add(Text((draw(_TEXTS),)), at)
            at = maker.add(RoleEnd("user"), at)
        elif kind == "fork" and depth < 2:
            at = _fork(draw, maker, at, depth)
    return at


def _fork(draw: st.DrawFn, maker: GraphMaker, at: int | None, depth: int) -> int:
    width = draw(st.integers(1, 3))
    gang = f"fork{len(maker.nodes)}"
    heads = [maker.add(Branch(i, width, gang), at) for i in range(width)]
    lasts = []
    for head in heads:
        last = _grow(draw, maker, head, draw(st.integers(0, 3)), depth + 1)
        lasts.append(head if last is None else last)
    mode: JoinMode = draw(st.sampled_from(["gather", "append"]))
    return maker.add(Join(tuple(lasts), "all", mode), at)


def open_run(
    engine: Engine, graph: RequestGraph, **options: Any
) -> tuple[EngineSession, Collector]:
    """Start a run of one graph."""
    collector = Collector()
    session = engine.open(RunOptions(**options), collector)
    session.extend(graph)
    session.close()
    return session, collector
