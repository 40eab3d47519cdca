"""What a closed engine leaves behind: no thread, no child process, and none of its memory."""

from __future__ import annotations

import gc
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.engine_harness import Collector, open_run
from tests.support.graphs import chain
from tests.support.tiny_config import tiny_llama

from umbel.lang.constraints import Grammar, Regex
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Select, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine

WAIT_S = 60.0
SHORT = SamplingParams(max_tokens=4)


@pytest.fixture
def ref(tmp_path: Path) -> str:
    return tiny_llama(tmp_path)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The child processes that are started from here on."""
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen.__init__

    def note(child: subprocess.Popen[bytes], *args: Any, **options: Any) -> None:
        start(child, *args, **options)
        started.append(child)

    monkeypatch.setattr(subprocess.Popen, "__init__", note)
    return started


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Nothing is freed but what nobody refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def program() -> RequestGraph:
    return chain(
        Text(("abc",)),
        Gen("plain", SHORT),
        Gen("regex", SHORT, Regex("[ab]{2,3}")),
        Gen("grammar", SHORT, Grammar('start: "a" start "b" | "c"')),
        Select("select", ("yes", "no")),
    )


def held_by(engine: Engine) -> list[weakref.ref[Any]]:
    """What takes an engine's memory."""
    runner = engine.core._passes._parts.runner
    model: Any = runner._model  # type: ignore[attr-defined]
    pool = runner._pool  # type: ignore[attr-defined]
    return [weakref.ref(held) for held in (runner, model, model.embedding, pool, pool.k[0])]


@pytest.mark.usefixtures("no_collection")
def test_an_engine_that_was_closed_frees_its_model_at_once_whoever_holds_the_engine(
    ref: str, children: list[subprocess.Popen[bytes]]
) -> None:
    threads = set(threading.enumerate())
    engine = Engine.from_model(ref, device="cpu", max_running=3)
    held = held_by(engine)
    _, whole = open_run(engine, program())
    whole.wait(5, WAIT_S)
    assert not whole.errors
    cut = Collector()
    engine.open(RunOptions(), cut).extend(program())  # may run on, and is not closed
    engine.close()
    assert children
    assert [child for child in children if child.returncode is None] == []
    assert set(threading.enumerate()) - threads == set()
    assert [reference() for reference in held if reference() is not None] == []
    assert engine.stats()["tokens_decoded"] > 0, "its counters can still be read"


@pytest.mark.usefixtures("no_collection")
def test_an_engine_that_broke_frees_its_model_too_and_says_where_it_broke(
    ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_model(ref, device="cpu", max_running=3)
    held = held_by(engine)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("as asked")

    monkeypatch.setattr(engine.core.scheduler, "complete", broken)
    _, collector = open_run(engine, program())
    collector.wait(5, WAIT_S)
    assert engine.stopped.wait(WAIT_S)
    engine.close()
    assert isinstance(engine.stop_cause, ZeroDivisionError)
    assert engine.stop_cause.__traceback__ is not None
    assert [reference() for reference in held if reference() is not None] == []


def test_a_run_is_not_kept_by_the_constraint_that_it_was_the_first_to_have(ref: str) -> None:
    engine = Engine.from_model(ref, device="cpu", max_running=3)
    session, collector = open_run(engine, program())
    collector.wait(5, WAIT_S)
    assert engine._grammar.cached_bytes > 0
    gone = weakref.ref(collector)
    del session, collector
    engine.reset_cache()  # by now the engine is done with the step that ended the run
    gc.collect()
    assert gone() is None
    engine.close()
