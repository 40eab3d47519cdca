"""Digests of programs and arguments: the same in every process, others for other things."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import umbel as ub
from umbel.interpreter.stable_digest import arguments_digest, program_digest
from umbel.lang.runner import Call

MODULE = '''
import enum, datetime, pathlib, decimal
from pydantic import BaseModel
import umbel as ub
from umbel.interpreter.stable_digest import arguments_digest, program_digest

PROMPT = "Say: "  # {comment}

class Kind(enum.Enum):
    A = 1

class Model(BaseModel):
    {field}: int

@ub.function
def inner(s):
    s += "{inner}"

def helper(x):
    """{doc}"""
    return x.strip() {helper}

@ub.function
def program(s, x, *rest, **more):
    """{doc}"""
    # {comment}
    inner(s)
    if x in {{"a", "b", "c", "d", {item}}}:
        s += PROMPT + helper(x) + ub.gen("y", schema=Model)
    return [helper(c) for c in x]

call = program._call(
    ("a",),
    {{"k": {{1, "z", (2, b"x")}}, "b": {{"q": [1.5, None, Kind.A, Model({field}=1), program]}},
     "h": helper, "d": datetime.date(2020, 1, 2),
     "p": pathlib.Path("x"), "n": decimal.Decimal("1.0")}},
)
'''
PLAIN = {
    "comment": "",
    "field": "x",
    "inner": "in",
    "doc": "Do.",
    "helper": "",
    "item": '"e"',
}


def load(**changes: str) -> Call:
    space: dict[str, Any] = {"__name__": "digested"}
    exec(compile(MODULE.format(**PLAIN | changes), "digested", "exec", dont_inherit=True), space)
    call: Call = space["call"]
    return call


def test_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    source = MODULE.format(**PLAIN) + "\nprint(program_digest(call), arguments_digest(call))\n"
    (tmp_path / "digested.py").write_text(source)
    found = {
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import digested",
            ],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert found == {f"{program_digest(load())} {arguments_digest(load())}\n"}


@pytest.mark.parametrize("change", [{"comment": "why"}, {"doc": "Do it well."}])
def test_comments_and_docstrings_have_no_part_in_a_program(change: dict[str, str]) -> None:
    assert program_digest(load(**change)) == program_digest(load())


@pytest.mark.parametrize(
    "change", [{"field": "y"}, {"inner": "out"}, {"helper": "+ '!'"}, {"item": '"f"'}]
)
def test_what_a_body_names_is_part_of_the_program(change: dict[str, str]) -> None:
    assert program_digest(load(**change)) != program_digest(load())


def digest(program: Any, *args: Any, **kwargs: Any) -> str:
    return arguments_digest(program._call(args, kwargs))


@ub.function
def two(s: ub.State, a: Any, b: Any = 0) -> None:
    """Write nothing."""


def test_arguments_are_the_same_however_they_are_given() -> None:
    same = {digest(two, 1, 2), digest(two, 1, b=2), digest(two, b=2, a=1), digest(two.bind(b=2), 1)}
    assert len(same) == 1


@dataclasses.dataclass
class Point:
    x: Any


class Model(BaseModel):
    x: Any


class Thing:
    def __init__(self, x: Any) -> None:
        self.x = x


DIFFERENT: list[Any] = [
    1,
    "1",
    1.0,
    True,
    None,
    b"1",
    [1],
    (1,),
    {1},
    {1: 1},
    {"1": 1},
    [[1]],
    Point(1),
    Point("1"),
    Model(x=1),
    Thing(1),
    Thing(2),
    [1, 2],
    [2, 1],
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    two,
    print,
    Point,
    ub.gen("x"),
    ub.gen("y"),
]


def test_different_arguments_have_different_digests() -> None:
    digests = [digest(two, value) for value in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert digest(two, 1, 2) != digest(two, 2, 1)


def test_numbers_of_other_libraries_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert digest(two, numpy.int64(3)) == digest(two, 3)
    assert digest(two, numpy.float64(0.5)) == digest(two, 0.5)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    @ub.function
    def ask(self, s: ub.State, x: int) -> None:
        """Write nothing."""


def test_the_object_of_a_method_is_part_of_its_program() -> None:
    def of(held: Any) -> str:
        return program_digest(Holder(held).ask._call((1,), {}))

    assert of("a") == of("a")
    assert of("a") != of("b")
    with pytest.raises(ub.ProgramError, match=r"the program's object, Holder\.held is a"):
        of(threading.Lock())


@pytest.mark.parametrize(
    "value", [object(), threading.Lock(), iter([]), sys.stdout, [{"k": threading.Lock()}]]
)
def test_what_has_no_stable_form_is_refused(value: Any) -> None:
    with pytest.raises(ub.ProgramError, match=r"argument 'a'.* has no form that stays the same"):
        digest(two, value)


def test_what_holds_itself_is_refused() -> None:
    items: list[Any] = []
    items.append(items)
    with pytest.raises(ub.ProgramError, match="argument 'a' holds itself"):
        digest(two, items)


def test_wrong_arguments_are_left_to_the_body() -> None:
    assert digest(two) != digest(two, 1, 2, 3)


def test_numbers_of_any_size_and_ranges_of_any_length_have_a_digest() -> None:
    def body(s: ub.State, x: Any) -> None: ...

    values = [10**5000, 10**5000 + 1, range(10**12), range(10**12 + 1), [0, 1], range(2)]
    digests = {arguments_digest(Call(body, False, args=(value,))) for value in values}
    assert len(digests) == len(values)


def test_text_that_is_not_unicode_is_refused() -> None:
    def body(s: ub.State, x: Any) -> None: ...

    with pytest.raises(ub.ProgramError, match="not Unicode"):
        arguments_digest(Call(body, False, args=(["\ud800"],)))
