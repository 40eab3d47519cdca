"""Constraint bombs beside requests that decode: the others' tokens come all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.support.engine_harness import TOKENIZER, make_runner

import umbel as ub
from umbel.interpreter.backends.local import LocalBackend
from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.grammar import GrammarCompiler

BOMBS: dict[str, Constraint] = {
    "nested counters": Regex(r"((a{1,100}){1,100}){1,100}"),
    "five thousand values": JsonSchema(json.dumps({"enum": [f"value {i}" for i in range(5000)]})),
    "five thousand choices": Choices(tuple(f"choice {i * 7919 % 5000}" for i in range(5000))),
    "a thousand optional keys": JsonSchema(
        json.dumps(
            {
                "type": "object",
                "properties": {f"k{i}": {"type": "integer"} for i in range(1000)},
                "additionalProperties": False,
            }
        )
    ),
    "arrays twenty thousand deep": JsonSchema('{"type":"array","items":' * 20_000),
    "a catastrophic regex": Regex(r"[ab]*a[ab]{25}"),
    "an ambiguous grammar": Grammar('start: start start | "a"'),
    "a long string": JsonSchema('{"type": "string", "maxLength": 100000}'),
}


@pytest.fixture(scope="module")
def grammar() -> Iterator[GrammarCompiler]:
    grammar = GrammarCompiler(TOKENIZER.vocabulary(), timeout_s=10.0)
    yield grammar
    grammar.close()


@pytest.fixture(scope="module")
def backend(grammar: GrammarCompiler) -> Iterator[LocalBackend]:
    config = EngineConfig(max_running=16, max_step_tokens=64)
    runner = make_runner(num_slots=8192)
    engine = Engine(runner, TOKENIZER, config, max_seq_len=1024, grammar=grammar)
    with LocalBackend(engine) as backend:
        yield backend


@ub.function
def short(s: ub.State, number: int) -> str:
    s += f"Request {number}: " + ub.gen("out", max_tokens=20, temperature=1.0)
    return str(s["out"])


@ub.function
def bombed(s: ub.State, constraint: Constraint) -> str:
    options: Any = {"temperature": 1.0, "max_tokens": 40}
    match constraint:
        case Regex(pattern):
            s += ub.gen("out", regex=pattern, **options)
        case JsonSchema(schema):
            s += ub.gen("out", schema=schema, **options)
        case Choices(choices):
            s += ub.gen("out", choices=choices, **options)
        case Grammar():
            s += ub.gen("out", grammar=constraint, **options)
    return str(s.meta("out").finish_reason)


@pytest.mark.parametrize("name", BOMBS)
def test_what_runs_beside_a_bomb_gets_the_tokens_it_gets_alone(
    name: str, backend: LocalBackend
) -> None:
    alone = [r.value for r in short.options(backend=backend, seed=1).run_batch(list(range(8)))]
    stream = bombed.options(backend=backend).stream(BOMBS[name])
    beside = [r.value for r in short.options(backend=backend, seed=1).run_batch(list(range(8)))]
    assert beside == alone
    with suppress(ub.ConstraintError, ub.GenerationError):  # refused, or given up while it ran
        assert stream.result().value in ("stop", "length")


def test_requests_go_on_while_a_constraint_compiles(
    backend: LocalBackend, grammar: GrammarCompiler
) -> None:
    """The bomb takes its ten seconds in a process of its own; the others end meanwhile."""
    bomb = grammar.submit(Regex(r"[ab]*a[ab]{24}"), "outlines-core")
    results = short.options(backend=backend).run_batch(list(range(16)))
    assert not bomb.done()
    assert all(result.error is None for result in results)
    with pytest.raises(ub.ConstraintError, match="more than"):
        bomb.result()
