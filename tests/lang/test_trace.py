"""Case 30 and section 3: compiling records the real run up to its first read, once."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import CAPABILITIES, ScriptedBackend
from umbel.lang.graph import decode, encode
from umbel.lang.ir import Branch, Gen, Join, Ref, RoleEnd, RoleStart, Select, Text

PRICES = {"tea": 3, "coffee": 4}


@ub.function
def order(s: ub.State, item: str, count: int, log: list[str]) -> str:
    log.append("began")
    s += ub.system(f"A shop that sells {item}.")
    if count == 1:
        s += "one"
    with s.user():
        s += "Price: " + str(PRICES[item] * count)
    forks = s.fork(2)
    for i, branch in enumerate(forks):
        branch += f"{i}: " + ub.gen("tip")
    forks.join()
    s += "First: " + forks[0].var("tip") + ub.select("ok", ["yes", "no"])
    log.append("before the read")
    answer = s["ok"]
    log.append("after the read")
    s += "never compiled" + ub.gen("rest")
    return str(answer)


def test_case_30_a_graph_ends_at_the_first_read_and_runs_the_body_once() -> None:
    log: list[str] = []
    graph = order.compile("tea", count=1, log=log)
    assert log == ["began", "before the read"]
    ops = [node.op for node in graph.nodes]
    assert ops[:4] == [
        RoleStart("system"),
        Text(("A shop that sells tea.",)),
        RoleEnd("system"),
        Text(("one",)),
    ]
    assert Text(("Price: 3",)) in ops
    tips = [node.id for node in graph.nodes if isinstance(node.op, Gen)]
    assert Text(("First: ", Ref(tips[0]))) in ops
    assert [type(op) for op in ops[-3:]] == [Join, Text, Select]
    assert [op.index for op in ops if isinstance(op, Branch)] == [0, 1]
    assert "object at 0x" not in repr(ops)
    assert decode(encode(graph)) == graph


def test_case_30_a_compiled_graph_is_the_first_piece_of_the_run() -> None:
    pieces: list[Any] = []

    class Recording(ScriptedBackend):
        def open(self, *args: Any) -> Any:
            session = super().open(*args)
            extend = session.extend

            def record(piece: ub.RequestGraph) -> None:
                pieces.append(piece)
                extend(piece)

            session.extend = record  # type: ignore[method-assign]
            return session

    as_written = dataclasses.replace(CAPABILITIES, verbatim=True)
    with Recording(capabilities=as_written) as backend:
        order.options(backend=backend).run("coffee", 2, [])
    assert pieces[0] == order.compile("coffee", 2, [])
    assert len(pieces) == 2
    assert pieces[1].base == len(pieces[0].nodes)
    assert pieces[0].digest() != order.compile("tea", 2, []).digest()


def test_case_30_what_a_body_raises_is_raised_where_it_is() -> None:
    with pytest.raises(KeyError, match="water"):
        order.compile("water", 1, [])


def test_async_bodies_compile_too() -> None:
    done: list[str] = []

    @ub.function
    async def program(s: ub.State) -> None:
        s += ub.gen("a")
        await asyncio.sleep(0)
        s += "b"
        try:
            await s.get("a")
        finally:
            done.append("cleaned up")
        done.append("went on")

    assert [type(node.op) for node in program.compile().nodes] == [Gen, Text]
    assert done == ["cleaned up"]


def test_no_handler_of_a_body_swallows_the_end_of_a_trace() -> None:
    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        try:
            s["a"]
        except Exception:
            s += "handled"

    assert len(program.compile().nodes) == 1


def test_sampling_defaults_are_in_the_graph() -> None:
    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")

    graph = program.options(sampling={"max_tokens": 3}).compile()
    assert graph.nodes[0].op == Gen("a", ub.SamplingParams(max_tokens=3))
