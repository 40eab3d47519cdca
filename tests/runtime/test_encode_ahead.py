"""A run's literal start is encoded where the run is handed over, not by the engine's thread."""

from __future__ import annotations

import pytest
from tests.support.engine_harness import GRAMMAR, Collector, GraphMaker, drive, make_runner

from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Branch, Gen, Op, RoleEnd, RoleStart, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.tokenizer import Tokenizer

GEN = Gen("a", SamplingParams(max_tokens=3, ignore_eos=True))
LONG = "0123456789" * 110


def graph_of(*ops: Op) -> RequestGraph:
    maker = GraphMaker()
    at: int | None = None
    for op in ops:
        at = maker.add(op, at)
    return maker.graph()


def forked() -> RequestGraph:
    maker = GraphMaker()
    stem = maker.add(Text((LONG,)), None)
    for i in range(2):
        at = maker.add(Text((f"branch {i}",)), maker.add(Branch(i, 2, "g"), stem))
        maker.add(GEN, at)
    return maker.graph()


def encoded(graph: RequestGraph, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Run a graph; return what was encoded when it was handed over, and what later."""
    pieces: list[str] = []
    encode = Tokenizer._encode_anew

    def counting(self: Tokenizer, text: str) -> tuple[int, ...]:
        pieces.append(text)
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "_encode_anew", counting)
    tokenizer = Tokenizer.byte_level(288)
    config = EngineConfig(max_running=8, max_step_tokens=4096)
    engine = Engine(
        make_runner(8192), tokenizer, config, max_seq_len=4096, grammar=GRAMMAR, start=False
    )
    collector = Collector()
    pieces.clear()
    session = engine.open(RunOptions(), collector)
    session.extend(graph)
    ahead = pieces.copy()
    session.close()
    drive(engine)
    engine.close()
    return ahead, pieces[len(ahead) :]


@pytest.mark.parametrize(
    "ops",
    [
        (Text((LONG,)), GEN),
        (Text((LONG[:600],)), Text((LONG[:600],)), GEN),
        (RoleStart("user"), Text((LONG,)), RoleEnd("user"), RoleStart("assistant"), GEN),
    ],
    ids=["text", "texts", "roles"],
)
def test_a_long_start_is_encoded_ahead(
    ops: tuple[Op, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, later = encoded(graph_of(*ops), monkeypatch)
    assert sum(map(len, ahead)) >= 1100
    assert all(len(text) < 20 for text in later if text not in ahead), "choices and turns' ends"
    assert not set(ahead) & set(later)


def test_a_short_start_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, later = encoded(graph_of(Text(("short",)), GEN), monkeypatch)
    assert ahead == []
    assert later == ["short"]


def test_what_can_t_be_encoded_fails_where_it_always_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, later = encoded(graph_of(Text((LONG + "\ud800",)), GEN), monkeypatch)
    assert ahead[-1] == later[-1], "asked for again by who can say why"


def test_each_branch_is_encoded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, later = encoded(forked(), monkeypatch)
    assert ahead == [LONG + "branch 0", LONG + "branch 1"]
    assert not set(ahead) & set(later)


def test_what_follows_a_value_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, later = encoded(graph_of(GEN, Text((LONG,)), GEN), monkeypatch)
    assert ahead == []
    assert LONG in later[-1]
