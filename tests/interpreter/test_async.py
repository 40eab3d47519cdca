"""`async def` programs, and `def` programs on an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall

from .conftest import MakeBackend


@ub.function
async def chain(s: ub.State) -> str:
    s += "x" + ub.gen("a")
    first = await s.get("a")
    s += f"({first})" + ub.gen("b")
    await s.wait()
    return str(s["b"])


def test_rule_4_async_programs_run_with_and_without_a_loop(scripted: MakeBackend) -> None:
    scripted({"a": "1", "b": "2"})
    assert chain.run().value == "2"
    assert asyncio.run(_arun(chain)).text() == "x1(1)2"
    assert [r.value for r in chain.run_batch([(), ()])] == ["2", "2"]


async def _arun(program: Any) -> Any:
    return await program.arun()


def test_rule_2_a_read_that_would_block_the_loop_is_refused(scripted: MakeBackend) -> None:
    scripted({"a": Reply(text="1", latency=0.02)})

    @ub.function
    async def program(s: ub.State) -> str:
        s += ub.gen("a")
        for read in (lambda: s["a"], s.text, lambda: s.messages):
            with pytest.raises(ub.ProgramError, match=r"use `await s.get\(...\)`"):
                read()
        await s.wait()
        return str(s["a"])

    assert program.run().value == "1"


def test_run_refuses_to_block_a_running_loop(scripted: MakeBackend) -> None:
    scripted({"a": "1", "b": "2"})

    async def main() -> None:
        chain.run()

    with pytest.raises(ub.ProgramError, match=r"use `await program.arun\(\)`"):
        asyncio.run(main())


def test_what_is_written_runs_while_the_body_awaits_something_else(scripted: MakeBackend) -> None:
    backend = scripted({"a": "1"})

    @ub.function
    async def program(s: ub.State) -> int:
        s += ub.gen("a")
        await asyncio.sleep(0.05)
        return backend.num_pieces

    assert program.run().value == 1


def test_rule_5_async_programs_hold_no_threads(scripted: MakeBackend) -> None:
    scripted(latency=0.05)
    num_begun = most = 0
    all_have = asyncio.Event()

    @ub.function
    async def program(s: ub.State) -> None:
        nonlocal num_begun, most
        s += ub.gen("a")
        num_begun += 1
        if num_begun == 500:
            all_have.set()
        await all_have.wait()
        await s.get("a")
        most = max(most, threading.active_count())

    before = threading.active_count()
    asyncio.run(program.arun_batch([()] * 500))
    assert most - before <= 1


def test_def_programs_run_on_a_loop_without_blocking_it(scripted: MakeBackend) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def answer(call: ScriptedCall) -> str:
        asked.set()
        assert goes_on.wait(10), "the loop was blocked"
        return "1"

    scripted(answer)

    @ub.function
    def program(s: ub.State) -> str:
        s += ub.gen("a")
        return str(s["a"])

    async def main() -> str:
        running = asyncio.create_task(program.arun())
        while not asked.is_set():
            await asyncio.sleep(0.001)
        goes_on.set()
        return (await running).value

    assert asyncio.run(main()) == "1"


@pytest.mark.parametrize("is_async", [True, False])
def test_rule_3_a_cancelled_task_cancels_its_run(scripted: MakeBackend, is_async: bool) -> None:
    asked = threading.Event()

    def answer(call: ScriptedCall) -> Reply:
        asked.set()
        return Reply(stalls=True)

    scripted(answer)
    seen: list[BaseException] = []

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        try:
            s["a"]
        except ub.GenerationError as error:
            seen.append(error)
            raise

    async def main() -> None:
        chosen: Any = chain if is_async else program
        task = asyncio.create_task(chosen.arun())
        while not asked.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    deadline = time.monotonic() + 10
    while not is_async and not seen and time.monotonic() < deadline:
        time.sleep(0.005)
    assert is_async or isinstance(seen[0].__cause__, ub.CancelledError)


def test_rule_3_an_async_runs_timeout_ends_its_waits(scripted: MakeBackend) -> None:
    scripted({"a": Reply(stalls=True)})
    with pytest.raises(ub.GenerationError, match=r"timeout of 0\.05 s"):
        chain.options(timeout=0.05).run()


def test_joins_are_awaited(scripted: MakeBackend) -> None:
    scripted({"a": "1"})

    @ub.function
    async def program(s: ub.State) -> Any:
        forks = s.fork(2)
        forks += ub.gen("a")
        joined = forks.join("collect")
        entries = await joined
        return [entry["a"] for entry in entries], joined["a"]

    assert program.run().value == (["1", "1"], ["1", "1"])


def test_branches_can_be_written_by_tasks(scripted: MakeBackend) -> None:
    scripted({"a": "1"})

    @ub.function
    async def program(s: ub.State) -> list[str]:
        async def one(branch: ub.State) -> str:
            branch += ub.gen("a")
            return str(await branch.get("a"))

        return list(await asyncio.gather(*map(one, s.fork(3))))

    assert program.run().value == ["1", "1", "1"]


def test_an_async_program_inside_an_async_program_is_awaited(scripted: MakeBackend) -> None:
    scripted({"a": "1", "b": "2"})

    @ub.function
    async def program(s: ub.State) -> str:
        s += "outer "
        return await chain(s)

    result = program.run()
    assert (result.value, result.text()) == ("2", "outer x1(1)2")


def test_an_async_body_reads_a_join_by_get_as_it_reads_a_state() -> None:
    @ub.function
    async def both(s: ub.State) -> tuple[object, object]:
        forks = s.fork(2)
        forks += ub.gen("note")
        joined = forks.join()
        found = await joined.get("note")
        return found, joined["note"]

    with ScriptedBackend({"note": ["one", "two"]}) as backend:
        assert both.options(backend=backend).run().value == (["one", "two"],) * 2


def test_reading_a_join_that_is_not_there_yet_says_how_a_join_is_awaited() -> None:
    @ub.function
    async def early(s: ub.State) -> object:
        forks = s.fork(2)
        forks += ub.gen("note")
        return forks.join()["note"]

    with (
        ScriptedBackend() as backend,
        pytest.raises(ub.ProgramError, match=r"the join is not there .* `await joined.get\(...\)`"),
    ):
        early.options(backend=backend).run()


def test_a_coroutine_that_a_body_returns_instead_of_its_value_is_refused() -> None:
    @ub.function
    async def forgot(s: ub.State) -> object:
        s += ub.gen("note")
        return s.get("note")

    @ub.function
    def cannot(s: ub.State) -> object:
        s += ub.gen("note")
        return s.get("note")

    with ScriptedBackend() as backend:
        for program in (forgot, cannot):
            with pytest.raises(ub.ProgramError, match=r"coroutine State.get\(\).*return await"):
                program.options(backend=backend).run()


def test_a_def_body_that_calls_an_async_program_is_told_on_that_line() -> None:
    @ub.function
    async def inner(s: ub.State) -> None:
        s += ub.gen("note")

    @ub.function
    def outer(s: ub.State) -> None:
        inner(s)  # type: ignore[unused-coroutine]  # what is tested

    with ScriptedBackend() as backend:
        with pytest.raises(ub.ProgramError, match=r"inner is an async program.*await inner"):
            outer.options(backend=backend).run()
        with pytest.raises(ub.ProgramError, match=r"inner is an async program.*await inner"):
            asyncio.run(outer.options(backend=backend).arun())
    assert [node.address for node in inner.compile().nodes] == ["0"]
