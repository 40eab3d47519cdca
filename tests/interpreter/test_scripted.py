"""The scripted backend itself: scripts, refusals, and values nobody scripted."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from typing import Any

import jsonschema
import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall, split_tokens
from umbel.interpreter.minimal_instances import minimal_instance, minimal_match
from umbel.lang.constraints import Choices, Grammar, JsonSchema

from .conftest import MakeBackend


def one(item: Any) -> Any:
    @ub.function
    def program(s: ub.State) -> None:
        s += "The prompt " + item

    return program.run()


def test_a_script_answers_by_address_before_name(scripted: MakeBackend) -> None:
    scripted({"v": "by name", "1": "by address"})
    assert one(ub.gen("v"))["v"] == "by address"


def test_a_callable_is_told_of_its_node(scripted: MakeBackend) -> None:
    calls: list[ScriptedCall] = []

    def answer(call: ScriptedCall) -> Reply:
        calls.append(call)
        return Reply(text="x")

    scripted(answer)

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.system("sys") + ub.user_begin() + "hi" + ub.gen("v", n=2)

    program.options(seed=4).run()
    assert [(c.name, c.address, c.seed, c.row, c.sample) for c in calls] == [
        ("v", "5", 4, 0, 0),
        ("v", "5", 4, 0, 1),
    ]
    assert calls[0].prompt == "syshi"
    assert calls[0].messages == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "hi"},
    ]


def test_lists_start_again_in_every_run_and_end(scripted: MakeBackend) -> None:
    scripted({"v": ["1", Reply(text="2")]})

    @ub.function
    def program(s: ub.State, n: int) -> None:
        for _ in range(n):
            s += ub.gen("v")

    assert program.run(2).text() == program.run(2).text() == "12"
    with pytest.raises(ub.GenerationError, match="has 2 answers for 'v', and 2 asks for one more"):
        program.run(3)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (ub.gen("w"), r"no answer for 'w' \(1\); it has 'v'"),
        (ub.gen(), r"no answer for 'a node without a name' \(1\)"),
        (ub.gen("v", regex=r"\d+"), "does not satisfy Regex"),
        (ub.gen("v", choices=["a", "b"]), "does not satisfy Choices"),
        (ub.gen("v", schema={}), "does not satisfy JsonSchema"),
        (ub.select("v", ["a", "b"]), "'text' is not one of"),
        (ub.select("t", ["a", "b"]), "no scripted scores for \\['b'\\]"),
        (ub.gen("f"), "the script failed: ZeroDivisionError"),
    ],
)
def test_what_a_script_does_not_fit_fails_its_node(
    scripted: MakeBackend, item: Any, says: str
) -> None:
    script: dict[str, Any] = {"v": "text"}
    if "'w'" not in says:
        script |= {"t": Reply(scores={"a": [-1.0]}), "f": lambda _: 1 // 0}
    scripted(script)
    with pytest.raises(ub.GenerationError, match=says):
        one(item)


def test_tokens_concatenate_to_their_text() -> None:
    for text in ("", " ", "a b", "  two\nlines, ok!  ", "日本 語", "{}\n"):
        assert "".join(split_tokens(text)) == text


def test_an_unscripted_gen_answers_its_name_or_a_value_of_its_constraint(
    scripted: MakeBackend,
) -> None:
    scripted()
    assert one(ub.gen("v"))["v"] == "v"
    assert one(ub.gen("v", regex=r"[A-Z]{2}-\d{3}"))["v"] == "AA-000"
    assert one(ub.gen("v", choices=["b", "a"]))["v"] == "b"
    assert one(ub.gen("v", schema=bool))["v"] is True
    with pytest.raises(ub.GenerationError, match="v: a grammar needs a scripted answer"):
        one(ub.gen("v", grammar='start: "A"'))


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d+",
        r"",
        r"(foo|ba?r)\s[^abc]{2,}",
        r"[^\w]\S\D\W",
        r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
        r"(?P<x>.)\.\n?",
        r"((25[0-5]|2[0-4]\d|1?\d?\d)(\.(?!$)|$)){0}x",
    ],
)
def test_minimal_matches_match(pattern: str) -> None:
    assert re.fullmatch(pattern, minimal_match(pattern)) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"const": [1]},
        {"enum": ["b", "a"]},
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 3}},
            "required": ["a"],
        },
        {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 2},
        {
            "type": "array",
            "prefixItems": [{"type": "null"}],
            "minItems": 2,
            "items": {"type": "boolean"},
        },
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "minimum": 5, "multipleOf": 5},
        {"type": ["integer", "null"], "maximum": -1},
        {"anyOf": [False, {"type": "string", "pattern": "^a+$"}]},
        {"allOf": [{"type": "null"}]},
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                    "required": ["next"],
                }
            },
            "$ref": "#/$defs/node",
        },
    ],
)
def test_minimal_json_is_valid(schema: Any) -> None:
    value = json.loads(minimal_instance(JsonSchema(json.dumps(schema))))
    jsonschema.validate(value, schema)


def test_minimal_instances_say_where_they_give_up() -> None:
    endless = {"$defs": {"n": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/n"}}}}
    for schema in (
        {**endless, "$ref": "#/$defs/n"},
        {"type": "number", "minimum": 2, "maximum": 1},
    ):
        with pytest.raises(ValueError, match="needs a scripted answer"):
            minimal_instance(JsonSchema(json.dumps(schema)))
    with pytest.raises(ValueError, match="has no values"):
        minimal_instance(JsonSchema("false"))
    with pytest.raises(ValueError, match="needs a scripted answer"):
        minimal_instance(Grammar("start: A"))
    assert minimal_instance(Choices(("x", "y"))) == "x"


def test_latency_passes_and_counts_are_kept(scripted: MakeBackend) -> None:
    backend = scripted({"v": "x", "slow": Reply(text="y", latency=0.05)}, latency=0.01)
    started = time.monotonic()
    one(ub.gen("v") + ub.gen("slow"))
    assert time.monotonic() - started >= 0.06
    assert (backend.num_runs, backend.num_pieces) == (1, 1)


def test_a_backend_that_is_dropped_takes_its_thread_along() -> None:
    before = set(threading.enumerate())  # not their number: those of other tests may end meanwhile
    backend = ScriptedBackend()

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("v")

    program.options(backend=backend).run()
    (own,) = set(threading.enumerate()) - before
    del backend
    gc.collect()
    own.join(2)
    assert not own.is_alive()
