"""Each typed form as mypy sees it, by handle; run too, so that the value is what the type says.

mypy tells the type of a class, a generic alias and an `Annotated` one; of `Literal` it has no type
to pass on, so that is `Any` until the handle is annotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, TypedDict, assert_type

from pydantic import BaseModel, Field

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend


class Report(BaseModel):
    title: str


@dataclass
class Point:
    x: int
    y: int


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Entry(TypedDict):
    name: str


Grade = Literal["good", "bad"]
Age = Annotated[int, Field(ge=0, le=120)]

SCRIPT = {
    "report": '{"title":"t"}',
    "point": '{"x":1,"y":2}',
    "color": "blue",
    "entry": '{"name":"n"}',
    "reports": '[{"title":"t"}]',
    "numbers": "[1,2]",
    "table": "[[1],[2]]",
    "yes": "true",
    "ratio": "0.5",
    "count": "3",
    "quote": '"q"',
    "grade": "good",
    "age": "40",
    "word": "left",
    "pick": "right",
    "samples": ["1", "2"],
    "texts": ["a", "b"],
    "note": "5",
}


@ub.function
def forms(s: ub.State) -> tuple[Report, list[int]]:
    report = ub.gen("report", schema=Report)
    point = ub.gen("point", schema=Point)
    color = ub.gen("color", schema=Color)
    entry = ub.gen("entry", schema=Entry)
    reports = ub.gen("reports", schema=list[Report])
    numbers = ub.gen("numbers", schema=list[int])
    table = ub.gen("table", schema=list[list[int]])
    yes = ub.gen("yes", dtype=bool)
    ratio = ub.gen("ratio", dtype=float)
    count = ub.gen_int("count")
    quote = ub.gen_string("quote")
    word = ub.gen("word", choices=["left", "right"])
    pick = ub.select("pick", ["left", "right"])
    for handle in (report, point, color, entry, reports, numbers, table, yes, ratio, count):
        s += handle
    s += quote + word + pick
    assert_type(s[report], Report)
    assert_type(s[point], Point)
    assert_type(s[color], Color)
    assert_type(s[entry], Entry)
    assert_type(s[reports], list[Report])
    assert_type(s[numbers], list[int])
    assert_type(s[table], list[list[int]])
    assert_type(s[yes], bool)
    assert_type(s[ratio], float)
    assert_type(s[count], int)
    assert_type(s[quote], str)
    assert_type(s[word], str)
    assert_type(s[pick], str)
    assert (s[point], s[color], s[entry]) == (Point(1, 2), Color.BLUE, {"name": "n"})
    assert (s[reports], s[table], s[quote]) == ([Report(title="t")], [[1], [2]], "q")
    assert (s[yes], s[ratio], s[count], s[word], s[pick]) == (True, 0.5, 3, "left", "right")
    return s[report], s[numbers]


@ub.function
def special_forms(s: ub.State) -> None:
    assert_type(ub.gen("grade", schema=Grade), ub.GenExpr[Any])
    grade: ub.GenExpr[Grade] = ub.gen("grade", schema=Grade)
    age = ub.gen("age", schema=Age)
    s += grade + age
    assert_type(s[grade], Grade)
    assert_type(s[age], int)
    assert (s[grade], s[age]) == ("good", 40)


@ub.function
def several(s: ub.State) -> list[int]:
    samples = ub.gen("samples", n=2, dtype=int)
    texts = ub.gen("texts", n=2)
    s += samples
    s.pick(samples, 0)
    s += texts
    assert_type(s[samples], list[int])
    assert_type(s[texts], list[str])
    assert s[texts] == ["a", "b"]
    return s[samples]


@ub.function
def joined(s: ub.State) -> list[Any]:
    note = ub.gen("note", dtype=int)
    forks = s.fork(2)
    assert_type(forks, ub.Forks)
    forks += note
    assert_type(forks[0][note], int)
    everything = forks.join(policy="collect")
    assert_type(everything["note"], list[Any])  # a value, MISSING or an error for each branch
    assert_type(everything[note], list[Any])
    assert_type(everything[0:1], list[Any])
    return everything[note]


@ub.function
async def awaited(s: ub.State) -> int:
    count = ub.gen_int("count")
    s += count
    assert_type(await s.get(count), int)
    return await s.get(count)


def test_values_are_what_their_handles_say() -> None:
    with ScriptedBackend(SCRIPT) as backend, ub.use_backend(backend):
        result = forms.run()
        assert_type(result, ub.Result[tuple[Report, list[int]]])
        assert_type(result.value[0], Report)
        assert result.value == (Report(title="t"), [1, 2])
        special_forms.run()
        assert several.run().value == [1, 2]
        assert joined.run().value == [5, 5]
        assert awaited.run().value == 3


def test_results_of_a_batch_have_the_bodys_type() -> None:
    with ScriptedBackend(SCRIPT) as backend:
        program = awaited.options(backend=backend)
        results = program.run_batch([{}, {}])
        assert_type(results, list[ub.Result[int]])
        assert [assert_type(result.value, int) for result in results] == [3, 3]
        lazily = program.iter_batch([{}])
        assert_type(lazily, Iterator[ub.Result[int]])
        assert [result.value for result in lazily] == [3]
