"""Emptying an engine's prefix cache: from any thread, and never under what runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from tests.support.engine_harness import (
    GRAMMAR,
    TOKENIZER,
    Collector,
    check_idle,
    drive,
    make_engine,
    make_runner,
    open_run,
    run_graphs,
)
from tests.support.graphs import GraphBuilder

from umbel.interpreter.backends.base import CacheOwner
from umbel.interpreter.backends.local import LocalBackend
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.lang.errors import EngineError, EngineStoppedError
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Text
from umbel.lang.results import Event, RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine


def program() -> RequestGraph:
    build = GraphBuilder()
    build.add(Gen("x", SamplingParams(max_tokens=8, ignore_eos=True)), build.add(Text(("ab" * 9,))))
    return build.piece()


def cached(collector: Collector) -> int:
    return collector.results[1].usage.cached_tokens


def test_what_was_cached_is_computed_again_and_to_the_same_end() -> None:
    engine = make_engine()
    (cold,) = run_graphs(engine, [program()])
    (warm,) = run_graphs(engine, [program()])
    assert cached(warm) > 0
    assert engine.reset_cache() > 0
    assert engine.reset_cache() == 0
    (again,) = run_graphs(engine, [program()])
    assert cached(again) == cached(cold) == 0
    assert again.outcome() == warm.outcome() == cold.outcome()
    check_idle(engine)
    engine.close()


def test_it_is_refused_while_something_runs() -> None:
    engine = make_engine()
    _, collector = open_run(engine, program())
    engine.step()
    with pytest.raises(EngineError, match="1 requests running"):
        engine.reset_cache()
    drive(engine)
    assert collector.errors == {}
    assert engine.reset_cache() > 0
    engine.close()
    with pytest.raises(EngineStoppedError):
        engine.reset_cache()


def test_a_sink_may_ask_for_it_on_the_engines_own_thread() -> None:
    engine = Engine(
        make_runner(), TOKENIZER, EngineConfig(max_running=8), max_seq_len=512, grammar=GRAMMAR
    )
    freed: list[int] = []
    done = threading.Event()

    def sink(events: Sequence[Event]) -> None:
        if any(event.node == 1 and type(event).__name__ == "NodeFinished" for event in events):
            freed.append(engine.reset_cache())
            done.set()

    session = engine.open(RunOptions(), sink)
    session.extend(program())
    session.close()
    assert done.wait(20)
    assert freed[0] > 0
    engine.close()


def test_a_backend_says_whether_it_has_a_cache() -> None:
    engine = make_engine()
    with LocalBackend(engine) as local, ScriptedBackend() as scripted:
        assert isinstance(local, CacheOwner)
        assert not isinstance(scripted, CacheOwner)
        run_graphs(engine, [program()])
        assert local.reset_cache() > 0


def test_log_probabilities_tell_their_tokens_texts() -> None:
    engine = make_engine()
    build = GraphBuilder()
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True, top_logprobs=3)
    build.add(Gen("x", sampling), build.add(Text(("abc",))))
    (collector,) = run_graphs(engine, [build.piece()])
    (sample,) = collector.results[1].samples
    assert [token.text for token in sample.logprobs] == [
        TOKENIZER.decode((token_id,)) for token_id in sample.token_ids
    ]
    for token in sample.logprobs:
        assert token.top_texts == tuple(TOKENIZER.decode((i,)) for i, _ in token.top)
    engine.close()
