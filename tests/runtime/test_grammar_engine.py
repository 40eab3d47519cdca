"""The setting that names the engine of constraints, from its check to what results report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.engine_harness import TOKENIZER, make_runner

import umbel as ub
from umbel.cli import engine_options, make_parser
from umbel.interpreter.backends.local import LocalBackend
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine

LIST = {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"}


@ub.function
def program(s: ub.State, options: dict[str, Any]) -> str:
    s += ub.gen("out", max_tokens=40, temperature=1.0, **options)
    return str(s.meta("out").grammar_engine)


def make_backend(**settings: Any) -> LocalBackend:
    config = EngineConfig(max_running=4, max_step_tokens=64, **settings)
    return LocalBackend(Engine(make_runner(num_slots=1024), TOKENIZER, config, max_seq_len=256))


@pytest.mark.parametrize(
    ("named", "used"),
    [
        ("auto", "umbel-dfa"),
        ("umbel-dfa", "umbel-dfa"),
        ("outlines-core", "outlines-core"),
        ("llguidance", "llguidance"),
    ],
)
def test_results_say_which_engine_followed_them(named: str, used: str) -> None:
    with make_backend(grammar_engine=named) as backend:
        run = program.options(backend=backend, seed=1).run
        assert run({"regex": "[ab]{3}"}).value == used
        assert run({"choices": ["a", "b"]}).value == used
        assert run({}).value == ""


@pytest.mark.parametrize("named", ["umbel-dfa", "outlines-core"])
def test_a_named_engine_fails_what_it_lacks_and_nothing_else(named: str) -> None:
    with make_backend(grammar_engine=named) as backend:
        run = program.options(backend=backend, seed=1).run
        with pytest.raises(ub.GenerationError, match=f"which {named} needs; llguidance") as caught:
            run({"schema": json.dumps(LIST)})
        assert isinstance(caught.value.__cause__, ub.ConstraintError)
        assert run({"regex": "[ab]{3}"}).value == named


def test_an_unknown_engine_is_refused_when_the_model_is_loaded() -> None:
    with pytest.raises(ub.EngineConfigError, match="grammar_engine must be one of auto, umbel-dfa"):
        ub.connect("smollm2", grammar_engine="xgrammar")


@pytest.mark.parametrize("command", [["serve", "smollm2"], ["run", "file.py:program"]])
def test_commands_take_it_as_an_option(command: list[str]) -> None:
    parser = make_parser(with_engine=True)
    options = parser.parse_args([*command, "--grammar-engine", "llguidance"])
    assert engine_options(options) == {"grammar_engine": "llguidance"}
