"""The compiler chooses, shares, caches, refuses and gives up as it says."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, get_args

import llguidance
import pytest

from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.lang.errors import ConstraintError, EngineStoppedError
from umbel.runtime.config import GrammarEngine
from umbel.runtime.grammar import ENGINES, GrammarCompiler
from umbel.runtime.grammar import compiler as compiler_module
from umbel.runtime.grammar.llguidance import compile_llguidance

from .vocabularies import byte_vocabulary
from .walks import accepts

WAIT_S = 120.0  # for what ends by itself much sooner
CLOSED = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
LIST = {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"}


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_vocabulary())
    yield compiler
    compiler.close()


@pytest.mark.parametrize(
    ("constraint", "engine"),
    [
        (Regex("[0-9]{4}"), "umbel-dfa"),
        (Choices(("yes", "no")), "umbel-dfa"),
        (JsonSchema(json.dumps(CLOSED)), "umbel-dfa"),
        (JsonSchema('{"type": "integer", "maximum": 100000000000000000000}'), "umbel-dfa"),
        (Grammar('root ::= "a" b\nb ::= "c" | "d"', "gbnf"), "umbel-dfa"),
        (Regex("[ab]*a[ab]{20}"), "llguidance"),
        (Regex("((a{1,90}){1,90}){1,9}"), "llguidance"),
        (JsonSchema(json.dumps(LIST)), "llguidance"),
        (JsonSchema('{"type": "object"}'), "llguidance"),
        (JsonSchema('{"type": "string", "maxLength": 20000}'), "llguidance"),
        (Grammar('root ::= "a" root? "b"', "gbnf"), "llguidance"),
        (Grammar('start: "a"+ /b[0-9]/'), "llguidance"),
    ],
)
def test_the_rule_picks_an_engine(
    constraint: Constraint, engine: str, json_compiler: GrammarCompiler
) -> None:
    assert json_compiler.compile(constraint).engine == engine


@pytest.mark.parametrize("engine", ["outlines-core", "umbel-dfa"])
@pytest.mark.parametrize(
    "constraint", [JsonSchema(json.dumps(LIST)), Grammar('root ::= "a" root? "b"', "gbnf")]
)
def test_a_named_engine_refuses_what_it_lacks(
    constraint: Constraint, engine: str, json_compiler: GrammarCompiler
) -> None:
    with pytest.raises(ConstraintError, match=engine):
        json_compiler.compile(constraint, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiler_takes_its_own_engine_where_none_is_named(engine: str) -> None:
    compiler = GrammarCompiler(byte_vocabulary(), engine=engine)
    try:
        compiler.warm_up().result()
        for constraint in (Regex("[0-9]{4}"), JsonSchema(json.dumps(CLOSED))):
            assert compiler.compile(constraint).engine == engine
        assert compiler.compile(Regex("[0-9]{4}"), "llguidance").engine == "llguidance"
        if engine != "llguidance":
            with pytest.raises(ConstraintError, match=rf"which {engine} needs; llguidance takes"):
                compiler.compile(JsonSchema(json.dumps(LIST)))
    finally:
        compiler.close()


def test_an_unknown_engine_is_refused_with_the_known_ones(json_compiler: GrammarCompiler) -> None:
    with pytest.raises(ConstraintError, match=r"xgrammar.*llguidance, outlines-core, umbel-dfa"):
        json_compiler.submit(Regex("a"), "xgrammar")
    with pytest.raises(ConstraintError, match=r"xgrammar.*llguidance, outlines-core, umbel-dfa"):
        GrammarCompiler(byte_vocabulary(), engine="xgrammar")
    assert sorted(get_args(GrammarEngine)) == ["auto", *ENGINES]


def test_an_automaton_too_large_is_an_error_only_by_name(json_compiler: GrammarCompiler) -> None:
    with pytest.raises(ConstraintError, match=r"too large for umbel-dfa.*use llguidance"):
        json_compiler.compile(Regex("[ab]*a[ab]{20}"), "umbel-dfa")


def test_identical_constraints_compile_once(compiler: GrammarCompiler) -> None:
    futures = [compiler.submit(Regex("[a-z]{1,30}")) for _ in range(20)]
    assert len({id(f.result()) for f in futures}) == 1
    assert compiler.compile(Regex("[a-z]{1,30}")) is futures[0].result()
    assert compiler.compile(Regex("[a-z]{1,30}"), "llguidance") is not futures[0].result()


def test_cancelling_one_wait_leaves_the_others(compiler: GrammarCompiler) -> None:
    first = compiler.submit(Regex(".{0,200}"))
    second = compiler.submit(Regex(".{0,200}"))
    assert first.cancel()
    assert second.result().engine == "umbel-dfa"
    assert first.cancelled()


def test_an_error_is_told_to_all_and_not_kept(compiler: GrammarCompiler) -> None:
    futures = [compiler.submit(Regex("(a")) for _ in range(3)]
    assert all(isinstance(f.exception(), ConstraintError) for f in futures)
    again = compiler.submit(Regex("(a"))
    assert again.exception() is not futures[0].exception()


def test_the_cache_keeps_to_its_bytes_and_drops_the_oldest_use() -> None:
    compiler = GrammarCompiler(byte_vocabulary(), cache_bytes=40_000)
    try:
        first = compiler.compile(Regex("first"))
        kept = compiler.compile(Regex("kept"))
        for i in range(20):
            assert compiler.compile(Regex("kept")) is kept
            compiler.compile(Regex(f"other{i}"))
            assert compiler.cached_bytes <= 40_000
        assert compiler.compile(Regex("kept")) is kept
        assert compiler.compile(Regex("first")) is not first
        # one that is larger than everything is made, and alone
        large = compiler.compile(Regex("[a-z]{200}"))
        assert large.num_bytes > 40_000
        assert compiler.cached_bytes == large.num_bytes
    finally:
        compiler.close()


def test_a_bomb_costs_its_own_request_the_configured_seconds_only() -> None:
    compiler = GrammarCompiler(byte_vocabulary(), timeout_s=2.0)
    try:
        compiler.compile(Regex("ready"), "outlines-core")
        bomb = compiler.submit(Regex("[ab]*a[ab]{25}"), "outlines-core")
        meanwhile = compiler.compile(Regex("[0-9]{3}"), "outlines-core")
        assert not bomb.done()
        assert accepts(meanwhile, compiler.vocabulary.encode("123"))
        with pytest.raises(ConstraintError, match=r"more than 2 s.*another engine"):
            bomb.result(WAIT_S)
        # and the next job finds a process that works
        assert accepts(
            compiler.compile(Regex("[a-f]{2}"), "outlines-core"), compiler.vocabulary.encode("af")
        )
    finally:
        compiler.close()


def test_a_build_out_of_memory_is_its_own_request_s_error() -> None:
    compiler = GrammarCompiler(byte_vocabulary(), memory_bytes=400 * 2**20)
    try:
        with pytest.raises(ConstraintError, match="400 MiB"):
            compiler.compile(Regex("[ab]*a[ab]{23}"), "outlines-core")
        assert compiler.compile(Regex("a"), "outlines-core").engine == "outlines-core"
    finally:
        compiler.close()


@pytest.mark.parametrize(
    "constraint",
    [
        JsonSchema(json.dumps({"enum": [f"value {i}" for i in range(5000)]})),
        Choices(tuple(f"choice number {i * 7919 % 5000}" for i in range(5000))),
        JsonSchema(json.dumps({"properties": {f"k{i}": {"type": "integer"} for i in range(1000)},
                               "type": "object", "additionalProperties": False})),
        Regex(r"(\w+ ){20,200}\w+"),
        Regex("((a{1,100}){1,100}){1,100}"),
        JsonSchema("[" * 20_000),
        JsonSchema('{"not": ' * 20_000),
        Regex("(" * 20_000),
        Grammar("root ::= " + "(" * 20_000, "gbnf"),
        JsonSchema('{"type": "array", "items": ' * 60 + "{}" + "}" * 60),
        JsonSchema(json.dumps({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"}
                                         for i in range(3000)}
                               | {"d3000": {"type": "null"}}, "$ref": "#/$defs/d0"})),
        Regex("(a|" * 99 + "b" + ")*c" * 99),
        Grammar("start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(6000))
                + 'r6000: "b"'),
        Grammar("root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(6000))
                + 'r6000 ::= "b" root', "gbnf"),
    ],
    ids=lambda c: str(c)[:40],
)  # fmt: skip
def test_constraint_bombs_compile_or_are_refused(
    constraint: Constraint, json_compiler: GrammarCompiler
) -> None:
    error = json_compiler.submit(constraint).exception(WAIT_S)
    assert error is None or isinstance(error, ConstraintError)


def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    compiler = GrammarCompiler(byte_vocabulary())
    compiler.compile(Regex("a"), "outlines-core")
    running = [compiler.submit(Regex(f"[ab]*a[ab]{{25}}{i}"), "outlines-core") for i in range(6)]
    while not compiler._processes._idle.empty():  # until every process has one to build
        time.sleep(0.001)
    compiler.close()
    assert all(future.done() for future in running)
    for future in running:  # none of them by its own limit
        error = future.exception()
        assert isinstance(error, ConstraintError | EngineStoppedError)
        assert "closed" in str(error)
    with pytest.raises(EngineStoppedError):
        compiler.submit(Regex("b"))
    compiler.close()  # twice does no harm


def test_after_warming_up_nothing_is_left_to_start(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.warm_up().result(WAIT_S)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the first constraint would wait for this")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(llguidance, "LLTokenizer", refuse)
    assert compiler.compile(Regex("[0-9]")).engine == "umbel-dfa"
    assert compiler.compile(JsonSchema('{"type": "object"}')).engine == "llguidance"


def test_many_threads_may_compile_at_once(compiler: GrammarCompiler) -> None:
    results: list[bool] = []

    def work(i: int) -> None:
        for engine in (None, "llguidance", "outlines-core"):
            grammar = compiler.compile(Regex(f"x{i % 5}y*"), engine)
            results.append(accepts(grammar, compiler.vocabulary.encode(f"x{i % 5}yy")))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 36


@pytest.mark.parametrize("ends", ["between", "inside"])
def test_looking_for_a_place_takes_no_longer_than_a_constraint_may(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Each try takes its time, and there are as many as there are places of the keyword."""
    goes_on = threading.Event()
    tries = 0

    def refuse(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        goes_on.wait(0.4 if ends == "between" or tries == 1 else WAIT_S)
        raise ConstraintError("`oneOf` is refused")

    compiler = GrammarCompiler(byte_vocabulary(), timeout_s=1.0)
    try:
        compiler._llguidance.for_kind("json_schema")
        monkeypatch.setattr(compiler_module, "compile_llguidance", refuse)
        schema = {"anyOf": [{"oneOf": [{"minimum": i}]} for i in range(40)]}
        started = time.monotonic()
        with pytest.raises(ConstraintError, match=r"^`oneOf` is refused; with strict") as caught:
            compiler.compile(JsonSchema(json.dumps(schema)))
        assert caught.value.where == ""
        assert time.monotonic() - started < 5  # 16 with a limit for each try
        assert 2 <= tries <= 3
    finally:
        goes_on.set()
        compiler.close()


def test_what_a_library_takes_too_long_for_costs_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can't be stopped; neither its thread of the pool nor `close` waits for it."""
    goes_on = threading.Event()

    def compile_slowly(*args: Any, **options: Any) -> Any:
        assert "slow" not in args[2] or goes_on.wait(WAIT_S)
        return compile_llguidance(*args, **options)

    monkeypatch.setattr(compiler_module, "compile_llguidance", compile_slowly)
    compiler = GrammarCompiler(byte_vocabulary(), timeout_s=1.0, num_threads=1)
    try:
        slow = compiler.submit(Regex("slow"), "llguidance")
        other = compiler.submit(Regex("other"), "llguidance")
        with pytest.raises(ConstraintError, match="took more than 1 s"):
            slow.result(30)
        assert other.result(30).engine == "llguidance"
    finally:
        compiler.close()
        assert not goes_on.is_set()
        goes_on.set()
