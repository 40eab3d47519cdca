"""Closing a compiler ends what compiles, whatever it is at, waits for none of it and tells all."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from umbel.lang.constraints import Constraint, Grammar, JsonSchema, Regex
from umbel.lang.errors import ConstraintError, EngineStoppedError
from umbel.runtime.grammar import GrammarCompiler, grammar_builder
from umbel.runtime.grammar.leavable_calls import LeavableCalls

from .vocabularies import byte_vocabulary

WAIT_S = 60.0  # for what ends by itself much sooner
AT_ONCE_S = 5.0  # on a busy machine
BOMB = Regex("((x{900}){900}){900}")  # more than a lane's time, in any process


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_vocabulary())
    yield compiler
    assert_ends(compiler.close)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Is set once llguidance compiles in this process; it goes on until the test's end."""
    began, end = threading.Event(), threading.Event()

    def compile_it(*args: Any, **options: Any) -> Any:
        began.set()
        assert end.wait(WAIT_S)
        raise ConstraintError("nobody is told of this")

    monkeypatch.setattr(grammar_builder, "compile_llguidance", compile_it)
    yield began
    end.set()


def assert_ends(*calls: Callable[[], object]) -> None:
    """Make calls side by side. A test that fails here must not wait for them."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    until = time.monotonic() + AT_ONCE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, until - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)


def assert_stopped(result: Future[Any]) -> None:
    with pytest.raises(EngineStoppedError, match="grammar compiler"):
        result.result(WAIT_S)


@pytest.mark.parametrize(
    ("pattern", "engine"),
    [("[ab]*a[ab]{24}%d", "outlines-core"), (f"{BOMB.pattern}%d", "llguidance")],
)
@pytest.mark.parametrize("seconds", [0.3, 2.0])  # among the others, and late among them
def test_what_compiles_in_a_process_or_waits_for_one_is_stopped(
    pattern: str, engine: str, seconds: float, compiler: GrammarCompiler
) -> None:
    results = [compiler.submit(Regex(pattern % i), engine) for i in range(12)]
    time.sleep(seconds)
    assert_ends(compiler.close)
    for result in results:
        assert result.done()
        assert_stopped(result)


def test_a_lenient_schema_is_stopped_too(compiler: GrammarCompiler) -> None:
    """What is refused is replaced by any JSON there; an end is no refusal."""
    schema = {"anyOf": [{"type": "string", "pattern": f"^{BOMB.pattern}$"}, {"$ref": "#"}]}
    result = compiler.submit(JsonSchema(json.dumps(schema), strict=False))
    time.sleep(0.5)
    assert_ends(compiler.close)
    assert_stopped(result)


@pytest.mark.parametrize("constraint", [Regex("((x{90}){90}){90}"), Grammar('start: "a" start?')])
def test_closing_leaves_what_llguidance_compiles_here(
    constraint: Constraint, compiler: GrammarCompiler, stuck: threading.Event
) -> None:
    result = compiler.submit(constraint, "llguidance")
    assert stuck.wait(WAIT_S)
    assert_ends(compiler.close)
    assert_stopped(result)


def test_who_waits_for_a_constraint_is_not_held_by_what_was_left(
    compiler: GrammarCompiler, stuck: threading.Event
) -> None:
    """A request holds its engine, and so the model's weights."""

    class Request:
        def __init__(self, result: Future[Any]) -> None:
            result.add_done_callback(self.take)

        def take(self, result: Future[Any]) -> None: ...

    request = weakref.ref(Request(compiler.submit(Grammar('start: "a" start?'))))
    assert stuck.wait(WAIT_S)
    assert request() is not None
    assert_ends(compiler.close)
    gc.collect()
    assert request() is None


def test_it_may_be_closed_from_many_threads_at_once(compiler: GrammarCompiler) -> None:
    results = [compiler.submit(Regex(f"{BOMB.pattern}{i}"), "llguidance") for i in range(4)]
    time.sleep(0.5)
    assert_ends(*[compiler.close] * 8)
    for result in results:
        assert_stopped(result)


def test_a_late_job_whose_slow_lane_has_ended_is_told(compiler: GrammarCompiler) -> None:
    """As at the interpreter's end, when no pool takes anything any more."""
    result = compiler.submit(BOMB, "llguidance")
    compiler._lanes[1].close()
    assert_stopped(result)


def test_a_constraint_that_no_lane_takes_any_more_is_told(compiler: GrammarCompiler) -> None:
    compiler._quick.close()
    for _ in range(2):  # an error is not kept, nor a future that nothing sets
        assert_stopped(compiler.submit(Regex("a")))
    compiler._work.shutdown()
    with pytest.raises(EngineStoppedError, match="takes nothing more"):
        compiler.run(lambda: None)


def test_a_call_that_was_left_tells_nobody() -> None:
    calls = LeavableCalls()
    assert calls.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0)
    began, end, ended = threading.Event(), threading.Event(), threading.Event()
    told: list[str] = []

    def call() -> None:
        began.set()
        end.wait(WAIT_S)
        ended.set()

    def wait_for_it() -> None:
        with pytest.raises(EngineStoppedError):
            calls.run(call)
        told.append("stopped")

    waiting = threading.Thread(target=wait_for_it)
    waiting.start()
    assert began.wait(WAIT_S)
    calls.close()
    waiting.join(WAIT_S)
    assert told == ["stopped"]
    end.set()
    assert ended.wait(WAIT_S)
    with pytest.raises(EngineStoppedError):
        calls.run(lambda: 7)
