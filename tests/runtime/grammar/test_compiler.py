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
from umbel.runtime.grammar import ENGINES, GrammarCompiler, grammar_builder
from umbel.runtime.grammar import compiler as compiler_module
from umbel.runtime.grammar.compile_process import CompileProcesses

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
    while not compiler._quick._processes._idle.empty():  # until every process has one to build
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


def test_looking_for_a_place_takes_no_longer_than_a_constraint_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each try takes its time, and there are as many as there are places of the keyword."""
    tries = 0

    def refuse(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        time.sleep(0.4)
        raise ConstraintError("`oneOf` is refused")

    compiler = GrammarCompiler(byte_vocabulary(), timeout_s=1.0)
    try:
        monkeypatch.setattr(grammar_builder, "compile_llguidance", refuse)
        schema = {"anyOf": [{"oneOf": [{"minimum": i}]} for i in range(40)]}
        started = time.monotonic()
        with pytest.raises(ConstraintError, match=r"^`oneOf` is refused; with strict") as caught:
            compiler.compile(JsonSchema(json.dumps(schema)))
        assert caught.value.where == ""
        assert time.monotonic() - started < 5  # 16 with a limit for each try
        assert 2 <= tries <= 3
    finally:
        compiler.close()


def bomb(number: int) -> Regex:
    """A regex that llguidance takes minutes and gigabytes for; in this process nothing ends it."""
    return Regex(f"((x{{900}}){{900}}){number}")


def test_many_bombs_at_once_let_others_by_and_leave_nothing_behind() -> None:
    compiler = GrammarCompiler(byte_vocabulary(), timeout_s=1.5)
    try:
        compiler.warm_up().result(WAIT_S)
        own_s = time.process_time()
        bombs = [compiler.submit(bomb(i), "llguidance") for i in range(6)]
        others = [
            compiler.submit(constraint)
            for i in range(10)
            for constraint in (
                JsonSchema(json.dumps({"properties": {f"k{i}": {"type": "object"}}})),
                Regex(f"{i}[0-9]+"),
            )
        ]
        work = compiler.run(lambda: "done")
        assert work.result(WAIT_S) == "done"
        assert not any(other.exception(WAIT_S) for other in others)
        assert not all(late.done() for late in bombs), "those that take long wait for each other"
        for late in bombs:
            with pytest.raises(ConstraintError, match=r"more than 1\.5 s.*repetitions multiply"):
                late.result(WAIT_S)
        assert time.process_time() - own_s < 4, "nothing of it is done in this process"
        assert compiler.compile(JsonSchema("{}")).engine == "llguidance"
    finally:
        compiler.close()


def test_a_library_that_takes_too_much_memory_has_the_processs_limit() -> None:
    compiler = GrammarCompiler(byte_vocabulary(), memory_bytes=400 * 2**20, timeout_s=120.0)
    try:
        with pytest.raises(ConstraintError, match="more than 400 MiB of memory"):
            compiler.compile(bomb(0), "llguidance")
        assert compiler.compile(Regex("a"), "llguidance").engine == "llguidance"
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("constraint", "is_tried"),
    [
        (JsonSchema('{"type": "object", "properties": {"name": {"type": "object"}}}'), False),
        (JsonSchema('{"type": "array", "maxItems": 999, "items": {"maxLength": 999}}'), True),
        (JsonSchema('{"type": "object", "description": "%s"}' % ("9" * 5000)), True),
        (Regex("(a{9}b){9}c*"), False),
        (Regex("((a{900}){900})"), True),
        (Grammar('start: A start | A\nA: B B\nB: "x"'), True),
    ],
)
def test_what_may_multiply_is_tried_in_another_process(
    constraint: Constraint, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[str] = []
    run = CompileProcesses.run

    def noted(processes: CompileProcesses, job: str, *inputs: object, timeout_s: float) -> object:
        jobs.append(job)
        return run(processes, job, *inputs, timeout_s=timeout_s)

    monkeypatch.setattr(CompileProcesses, "run", noted)
    compiler = GrammarCompiler(byte_vocabulary())
    try:
        compiler.submit(constraint, "llguidance").exception(WAIT_S)
        assert ("probe" in jobs) is is_tried
    finally:
        compiler.close()


def test_what_takes_long_has_its_whole_time_once_it_was_late_beside_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "_QUICK_S", 1e-6)
    compiler = GrammarCompiler(byte_vocabulary())
    try:
        for engine in ENGINES:
            assert compiler.compile(Regex("[0-9]{4}"), engine).engine == engine
    finally:
        compiler.close()
