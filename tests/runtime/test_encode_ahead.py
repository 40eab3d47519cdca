"""A run's literal start is encoded where the run is handed over, not by the engine's thread."""

from __future__ import annotations

import threading

import pytest
from tests.support.engine_harness import (
    GRAMMAR,
    Collector,
    GraphMaker,
    drive,
    make_engine,
    make_runner,
    open_run,
)
from tests.support.graphs import chain

from umbel.lang.errors import ProgramError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Branch, Gen, Op, RoleEnd, RoleStart, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.encode_ahead import encode_ahead
from umbel.runtime.engine import Engine
from umbel.runtime.token_row import RowBuilder, TokenRow
from umbel.runtime.tokenizer import Tokenizer

GEN = Gen("a", SamplingParams(max_tokens=3, ignore_eos=True))
LONG = "0123456789" * 110


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
    ahead, later = encoded(chain(*ops), monkeypatch)
    assert sum(map(len, ahead)) >= 1100
    assert all(len(text) < 20 for text in later if text not in ahead), "choices and turns' ends"
    assert not set(ahead) & set(later)


def test_a_short_start_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, later = encoded(chain(Text(("short",)), GEN), monkeypatch)
    assert ahead == []
    assert later == ["short"]


def test_what_can_t_be_encoded_fails_where_it_always_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, later = encoded(chain(Text((LONG + "\ud800",)), GEN), monkeypatch)
    assert ahead[-1] == later[-1], "asked for again by who can say why"


def test_each_branch_is_encoded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, later = encoded(forked(), monkeypatch)
    assert ahead == [LONG + "branch 0", LONG + "branch 1"]
    assert not set(ahead) & set(later)


def test_a_defect_fails_the_node_and_not_who_hands_it_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr(RowBuilder, "append_text", broken)
    engine = make_engine()
    _, collector = open_run(engine, chain(Text((LONG,)), GEN))
    drive(engine)
    engine.close()
    assert collector.errors == {0: "EngineError", 1: "GenerationError"}


def test_a_run_can_be_closed_while_its_start_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    session = engine.open(RunOptions(), Collector())
    closing = threading.Thread(target=session.close)

    def closed_meanwhile(*_: object) -> None:
        closing.start()
        closing.join()

    monkeypatch.setattr("umbel.runtime.engine.encode_ahead", closed_meanwhile)
    with pytest.raises(ProgramError, match="the session is closed"):
        session.extend(chain(Text((LONG,)), GEN))
    engine.close()


def test_a_row_that_branches_share_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = GraphMaker()
    stem = maker.add(Text((LONG,)), None)
    for i in range(9):
        maker.add(GEN, maker.add(Branch(i, 9, "g"), stem))
    rows = RowBuilder(Tokenizer.byte_level(288))
    encoded: list[TokenRow] = []
    monkeypatch.setattr(rows, "encode", encoded.append)
    encode_ahead(rows, maker.graph())
    assert len(encoded) == 1


def test_what_follows_a_value_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, later = encoded(chain(GEN, Text((LONG,)), GEN), monkeypatch)
    assert ahead == []
    assert LONG in later[-1]
