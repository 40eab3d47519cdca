"""Sixteen greedy programs on the real small model in fp32: one outcome, however they are run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engine_harness import Collector, check_idle, run_graphs
from tests.support.equality import assert_same_outcome
from tests.support.token_trie import least_prefill

import umbel as ub
from umbel.interpreter.backends.remote import RemoteBackend
from umbel.lang.results import RunOptions
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.kv_cache.kv_pool import KVPool
from umbel.runtime.model_runner.runner import ModelRunner
from umbel.runtime.models import CausalLM, load_model
from umbel.runtime.models.gguf_file import GGUFFile
from umbel.runtime.server import BackgroundServer, create_app
from umbel.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
TICKETS = (
    "I was charged twice for order 4471.",
    "My parcel is lost since 12 May.",
    "The app crashes on start.",
    "Please send me a new invoice.",
)


@ub.function
def triage(s: ub.State, ticket: str) -> None:
    s += ub.system("You are a support agent.")
    s += ub.user(ticket + " How severe is it?")
    s += ub.assistant(ub.select("severity", choices=["low", "medium", "high"]))
    sides = s.fork(3)
    for side, question in zip(sides, ("Who?", "What?", "Why?"), strict=True):
        side += ub.user(question)
        side += ub.assistant(ub.gen("note", max_tokens=6, top_logprobs=2, stop="\n"))
    sides.join()
    s += ub.user("In short: " + sides[0].var("note"))
    s += ub.assistant(ub.gen("end", max_tokens=6, top_logprobs=2))


@ub.function
def extract(s: ub.State, ticket: str) -> None:
    s += f"Ticket: {ticket}\nDate: "
    s += ub.gen("date", regex=r"[0-9]{1,2} (May|June)", max_tokens=8, top_logprobs=2)
    s += "\nJSON: "
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    s += ub.gen("json", schema=schema, max_tokens=24, top_logprobs=2)


@ub.function
def tree(s: ub.State, ticket: str) -> None:
    s += f"Idea about: {ticket}\n"
    first = s.fork(2)
    for i, branch in enumerate(first):
        branch += f"{i + 1}. " + ub.gen("idea", max_tokens=5, top_logprobs=2)
        second = branch.fork(2)
        second += " because" + ub.gen("why", max_tokens=4, top_logprobs=2)
        second.join(mode="append")
    first.join(mode="append")
    s += "\nBest: " + ub.select("best", choices=["1", "2", "both of them"])
    s += ub.gen("rest", max_tokens=5, top_logprobs=2, stop=["."])


@ub.function
def chat(s: ub.State, ticket: str) -> None:
    for turn in ("Hello.", ticket, "And then?"):
        s += ub.user(turn)
        s += ub.assistant(ub.gen("reply", max_tokens=8, top_logprobs=2, stop=[". ", "!"]))


GRAPHS = [p.compile(t) for p in (triage, extract, tree, chat) for t in TICKETS]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> CausalLM:
    return load_model(smollm2_path, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(smollm2_path))


class Engines:
    """Makes engines on one loaded model and closes them."""

    def __init__(self, model: CausalLM, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._made: list[Engine] = []

    def make(self, *, start: bool = False, **options: Any) -> Engine:
        shape = self._model.config
        pool = KVPool(
            num_layers=shape.num_layers,
            num_slots=4096,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=torch.float32,
            device=CPU,
        )
        config = EngineConfig(check_accounting=True, track_bound=True, **options)
        runner = ModelRunner(self._model, pool, CPU)
        engine = Engine(runner, self._tokenizer, config, max_seq_len=2048, start=start)
        self._made.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._made:
            engine.close()


@pytest.fixture
def engines(model: CausalLM, tokenizer: Tokenizer) -> Iterator[Engines]:
    made = Engines(model, tokenizer)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(model: CausalLM, tokenizer: Tokenizer) -> Iterator[list[Collector]]:
    """One run of all programs in one batch, with the cache."""
    made = Engines(model, tokenizer)
    yield run_graphs(made.make(), GRAPHS)
    made.close()


def assert_same(expected: list[Collector], found: list[Collector]) -> None:
    agree = [
        assert_same_outcome(graph, a, b)
        for graph, a, b in zip(GRAPHS, expected, found, strict=True)
    ]
    assert sum(agree) >= len(agree) - 2, "ties of less than 1e-4 are rare"


def test_no_program_fails(expected: list[Collector]) -> None:
    for graph, collector in zip(GRAPHS, expected, strict=True):
        assert not collector.errors
        assert len(collector.results) == len(graph.nodes)


def test_rule_16_cached_equals_cold(expected: list[Collector], engines: Engines) -> None:
    cold = engines.make(prefix_cache=False)
    assert_same(expected, run_graphs(cold, GRAPHS))
    check_idle(cold)


def test_rule_16_batched_equals_alone(expected: list[Collector], engines: Engines) -> None:
    assert_same(expected, run_graphs(engines.make(), GRAPHS, alone=True))


def test_rule_16_chunked_equals_whole(expected: list[Collector], engines: Engines) -> None:
    assert_same(expected, run_graphs(engines.make(max_step_tokens=64), GRAPHS))


def test_rule_16_compiled_equals_stepwise(expected: list[Collector], engines: Engines) -> None:
    assert_same(expected, run_graphs(engines.make(), GRAPHS, pieces=True))


def test_rule_16_local_equals_remote(expected: list[Collector], engines: Engines) -> None:
    engine = engines.make(start=True)
    app = create_app(engine, model_name="smollm2", capabilities={"token_native": True})
    with BackgroundServer(app) as server, RemoteBackend(server.url) as backend:
        found = []
        for row, graph in enumerate(GRAPHS):
            collector = Collector()
            session = backend.open(RunOptions(seed=7, row=row), collector)
            session.extend(graph)
            session.close()
            found.append(collector)
        for graph, collector in zip(GRAPHS, found, strict=True):
            collector.wait(len(graph.nodes), timeout=120)
    assert_same(expected, found)


def test_nothing_is_prefilled_twice(engines: Engines) -> None:
    engine = engines.make()
    collectors = run_graphs(engine, GRAPHS)
    bound = least_prefill(engine.tokenizer, GRAPHS, collectors)
    assert 0 <= engine.stats()["tokens_prefilled"] - bound.least <= bound.repeats
    assert engine.stats()["least_prefill"] == bound.least
