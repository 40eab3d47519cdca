"""Whatever the checks of a type raise is the failure of the value's own node (rule 3)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, field_validator

import umbel as ub
from umbel.interpreter.backends.scripted_replies import ScriptedCall

from .conftest import MakeBackend


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError("not even text")


ERRORS: dict[int, tuple[Exception, str]] = {
    1: (KeyError("k"), "KeyError: 'k'"),
    2: (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
    3: (RecursionError("deep"), "RecursionError: deep"),
    4: (Mute(), "Mute: .its message can't be shown"),
    5: (RuntimeError(), "RuntimeError; "),
    6: (AssertionError("no five"), "no five"),
    7: (TypeError("not so"), "not so"),
    8: (ValueError("not eight"), "not eight"),
}


def check(x: int) -> int:
    if x in ERRORS:
        raise ERRORS[x][0]
    return x


class Model(BaseModel):
    x: int

    @field_validator("x")
    @classmethod
    def be_checked(cls, value: int) -> int:
        return check(value)


@dataclasses.dataclass
class Data:
    x: int

    def __post_init__(self) -> None:
        check(self.x)


class Struct(msgspec.Struct):
    x: int

    def __post_init__(self) -> None:
        check(self.x)


TYPES = pytest.mark.parametrize("tp", [Model, Data, Struct])


def echo(call: ScriptedCall) -> str:
    return f'{{"x": {call.prompt.split()[0]}}}'


def reader(tp: type) -> Any:
    @ub.function
    def program(s: ub.State, x: int) -> Any:
        s += f"{x} " + ub.gen("v", schema=tp) + "."
        return s["v"].x

    return program


@TYPES
@pytest.mark.parametrize("x", ERRORS)
def test_rule_3_whatever_a_check_raises_names_the_node(
    scripted: MakeBackend, tp: type, x: int
) -> None:
    scripted(echo)
    says = rf"^'v' \(1\): the value is no valid {tp.__name__}: (?s:.*){ERRORS[x][1]}"
    with pytest.raises(ub.GenerationError, match=says) as caught:
        reader(tp).run(x)
    assert caught.value.address == "1"
    assert caught.value.__cause__ is not None


@TYPES
def test_rule_3_a_batch_keeps_its_other_rows(
    scripted: MakeBackend, tp: type, tmp_path: Path
) -> None:
    scripted(echo)
    rows = range(12)
    for options in ({}, {"results_file": tmp_path / "rows"}):
        results = reader(tp).run_batch([(x,) for x in rows], on_error="collect", **options)
        assert [r.error is None for r in results] == [x not in ERRORS for x in rows]
        assert [r.value for r in results if r.error is None] == [0, 9, 10, 11]
        for result in results:
            if result.error is not None:
                assert isinstance(result.error, ub.GenerationError)


@TYPES
@pytest.mark.parametrize("x", ERRORS)
def test_rule_3_a_value_nobody_read_fails_where_it_is_read_also_from_a_file(
    scripted: MakeBackend, tp: type, x: int, tmp_path: Path
) -> None:
    scripted(echo)

    @ub.function
    def program(s: ub.State, x: int) -> int:
        s += f"{x} " + ub.gen("v", schema=tp) + "."
        return x

    texts = []
    for _ in range(2):  # the second time it is read back
        (result,) = program.run_batch([(x,)], results_file=tmp_path / "rows")
        with pytest.raises(ub.GenerationError, match="the value is no valid") as caught:
            result["v"]
        texts.append(str(caught.value))
        assert result.value == x
    assert texts[0] == texts[1]


@TYPES
@pytest.mark.parametrize("x", ERRORS)
def test_a_value_whose_check_raised_is_asked_for_again_and_streams_tell(
    scripted: MakeBackend, tp: type, x: int
) -> None:
    asked: list[ScriptedCall] = []

    def answer(call: ScriptedCall) -> str:
        asked.append(call)
        return f'{{"x": {x if len(asked) == 1 else 9}}}'

    @ub.function
    def program(s: ub.State) -> int:
        s += "" + ub.gen("v", schema=tp, retries=1, reask=True)
        return s["v"].x  # type: ignore[no-any-return]

    scripted(answer)
    assert program.run().value == 9
    assert len(asked) == 2
    asked.clear()
    events = list(program.stream().events())
    assert [e.kind for e in events if e.kind in ("failed", "value")] == ["failed", "value"]
