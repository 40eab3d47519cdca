"""What mypy sees of the language; checked by mypy, and run so that it stays importable."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, assert_type

from pydantic import BaseModel

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend


class Report(BaseModel):
    title: str = ""


@ub.function
def program(s: ub.State, text: str, times: int = 1) -> int:
    report = ub.gen("report", schema=Report)
    number = ub.gen(dtype=int)
    plain = ub.gen("plain", max_tokens=4, stop="x")
    several = ub.gen("several", n=2, schema=Report)
    numbers = ub.gen(schema=list[int])
    free = ub.gen(schema={"type": "null"})
    pick = ub.select("pick", ["a", "b"])
    assert_type(report, ub.GenExpr[Report])
    assert_type(several, ub.GenExpr[list[Report]])
    assert_type(ub.gen_int("i"), ub.GenExpr[int])
    s += text + report + number + plain + numbers + free + pick
    assert_type(s[report], Report)
    assert_type(s[number], int)
    assert_type(s[plain], str)
    assert_type(s[numbers], list[int])
    assert_type(s[free], Any)
    assert_type(s[pick], str)
    assert_type(s["report"], Any)
    return times


@ub.function
async def later(s: ub.State, text: str) -> str:
    report = ub.gen("report", schema=Report)
    s += report
    assert_type(await s.get(report), Report)
    return text


@ub.function
async def outer(s: ub.State) -> str:
    inlined = program(s, "text")
    assert_type(inlined, int)
    awaited = await later(s, "text")
    assert_type(awaited, str)
    return awaited


class Bot:
    @ub.function
    def method(self, s: ub.State, text: str) -> bytes:
        s += text
        return b""


def test_results_have_the_bodys_type() -> None:
    with ScriptedBackend() as backend, ub.use_backend(backend) as same:
        assert_type(same, ScriptedBackend)
        assert_type(program.run("a", times=2), ub.Result[int])
        assert_type(program.run("a").value, int)
        assert_type(program.run_batch([{"text": "a"}]), list[ub.Result[int]])
        assert_type(program.options(seed=1).run("a").value, int)
        assert_type(program.bind(text="a").run().value, int)
        assert_type(later.run("a").value, str)
        assert_type(later.arun("a"), Coroutine[Any, Any, ub.Result[str]]).close()
        assert_type(Bot().method.run("a").value, bytes)
        assert_type(program.compile("a"), ub.RequestGraph)
        assert_type(program.plan("a"), ub.Plan)
        assert_type(program.run("a").plan(), ub.Plan)
        assert_type(program.stream("a"), ub.Stream[int])
        for chunk in program.stream("a"):
            assert_type(chunk, str)


def test_wrong_arguments_are_seen() -> None:
    for wrong in (
        lambda: program.run(3),  # type: ignore[arg-type]
        lambda: program.run(),  # type: ignore[call-arg]
        lambda: program.run("a", unknown=1),  # type: ignore[call-arg]
        lambda: program.plan(3),  # type: ignore[arg-type]
        lambda: ub.gen("x", max_token=3),  # type: ignore[call-overload]
        lambda: ub.select("x", ["a"], method="best"),  # type: ignore[arg-type]
    ):
        assert callable(wrong)
