"""Rules 4 and 5: parameters, options, methods, programs in programs, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import ScriptedCall

from .conftest import MakeBackend

DOWN = ub.BackendError("the model is down", backend="scripted", retryable=True)


def test_case_4_any_parameter_names_work(scripted: MakeBackend) -> None:
    scripted()
    names = ("n", "stop", "temperature", "backend", "self", "args", "name", "rows", "kwargs")

    @ub.function
    def program(
        s: ub.State,
        n: int,
        stop: int,
        temperature: int,
        backend: int,
        self: int,
        args: int,
        name: int,
        rows: int,
        kwargs: int,
    ) -> tuple[int, ...]:
        return (n, stop, temperature, backend, self, args, name, rows, kwargs)

    values = dict(zip(names, range(9), strict=True))
    assert program.run(**values).value == tuple(range(9))
    assert program.bind(**values).run().value == tuple(range(9))
    assert program.run_batch([values])[0].value == tuple(range(9))


def test_case_5_arguments_of_a_call_win_over_bound_ones(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State, p: int, q: int = 0) -> tuple[int, int]:
        return p, q

    bound = program.bind(p=1)
    assert bound.run().value == (1, 0)
    assert bound.run(p=2).value == (2, 0)
    assert bound.run(2).value == (2, 0)
    assert bound.run(2, q=5).value == (2, 5)
    rows = [{"p": 3}, {"q": 4}]
    assert [r.value for r in bound.run_batch(rows)] == [(3, 0), (1, 4)]
    assert rows == [{"p": 3}, {"q": 4}]
    assert bound.bind(q=7).run().value == (1, 7)
    assert bound.run().value == (1, 0)


def test_rule_4_nothing_the_caller_passes_is_mutated(scripted: MakeBackend) -> None:
    scripted()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    sampling = {"stop": ["x"], "max_tokens": 5}
    choices = ["a", "b"]

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("v", schema=schema) + ub.select("c", choices)

    program.options(sampling=sampling).run()
    assert schema == {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    }
    assert (sampling, choices) == ({"stop": ["x"], "max_tokens": 5}, ["a", "b"])


def test_rule_4_sampling_defaults_reach_every_gen(scripted: MakeBackend) -> None:
    seen = []

    def answer(call: ScriptedCall) -> str:
        assert isinstance(call.op, ub.lang.ir.Gen)
        seen.append((call.name, call.op.sampling.max_tokens, call.op.sampling.temperature))
        return "x"

    scripted(answer)

    @ub.function
    def inner(s: ub.State) -> None:
        s += ub.gen("inner")

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a") + ub.gen("b", max_tokens=3)
        inner.options(sampling={"max_tokens": 9})(s)
        branch = s.copy()
        branch += ub.gen("c")

    program.options(sampling={"max_tokens": 7, "temperature": 0.5}).run()
    assert sorted(seen) == [("a", 7, 0.5), ("b", 3, 0.5), ("c", 7, 0.5), ("inner", 9, 0.0)]


def test_rule_4_methods_are_programs(scripted: MakeBackend) -> None:
    scripted({"a": "x"})

    class Bot:
        def __init__(self, name: str) -> None:
            self.name = name

        @ub.function
        def greet(self, s: ub.State, who: str) -> str:
            s += f"{self.name} greets {who}: " + ub.gen("a")
            return self.name

        @ub.function
        async def later(self, s: ub.State, who: str) -> str:
            s += who + ub.gen("a")
            return str(await s.get("a"))

    assert Bot("Bo").greet.run("Al").text() == "Bo greets Al: x"
    assert Bot("Bo").greet.bind(who="Al").run("Cy").text() == "Bo greets Cy: x"
    assert Bot("Bo").later.run("Al").value == "x"


def test_rule_4_programs_are_made_of_functions_that_do_not_yield() -> None:
    with pytest.raises(TypeError, match="takes a function"):
        ub.function(3)  # type: ignore[call-overload]

    with pytest.raises(ub.ProgramError, match="yields"):

        @ub.function
        def program(s: ub.State) -> Any:
            yield s

    with pytest.raises(ub.ProgramError, match="has no parameters"):
        ub.function(lambda: None)  # type: ignore[arg-type, misc]


def test_a_program_without_a_backend_says_what_to_do() -> None:
    @ub.function
    def program(s: ub.State) -> None:
        s += "x"

    with pytest.raises(ub.ProgramError, match=r"set_default_backend\(umbel.connect"):
        program.run()
    with pytest.raises(TypeError, match="is no backend"):
        program.options(backend=3).run()


def test_the_default_backend_serves_whoever_chose_none() -> None:
    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")

    with ScriptedBackend({"a": "default"}) as first, ScriptedBackend({"a": "chosen"}) as second:
        ub.set_default_backend(first)
        try:
            assert program.run().text() == "default"
            with ub.use_backend(second):
                assert program.run().text() == "chosen"
                assert program.options(backend=first).run().text() == "default"
            assert program.run().text() == "default"
        finally:
            ub.set_default_backend(None)


def test_rule_5_branches_have_no_threads(scripted: MakeBackend) -> None:
    scripted(latency=0.02)
    num_threads = []

    @ub.function
    def program(s: ub.State) -> None:
        forks = s.fork(8)
        forks += ub.gen("a")
        forks.join()
        num_threads.append(threading.active_count())

    before = threading.active_count()
    program.run_batch([()] * 64)
    assert len(num_threads) == 64
    # one for the batch, one for the backend; two more where the machine stalls a worker
    assert max(num_threads) - before <= 4


def test_rule_5_reads_hold_at_most_max_def_threads(scripted: MakeBackend) -> None:
    backend = scripted(latency=0.01)
    running, most = 0, 0
    lock = threading.Lock()

    @ub.function
    def program(s: ub.State) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        s += ub.gen("a")
        value = str(s["a"])
        with lock:
            running -= 1
        return value

    with ub.use_backend(backend, max_def_threads=5):
        results = program.run_batch([()] * 40)
    assert [r.value for r in results] == ["a"] * 40
    assert most <= 5


def test_a_program_inside_a_program_writes_into_its_state(scripted: MakeBackend) -> None:
    backend = scripted({"a": "1", "b": "2"})

    @ub.function
    def inner(s: ub.State, text: str) -> str:
        s += text + ub.gen("b")
        return "inner's"

    @ub.function
    def program(s: ub.State) -> str:
        s += ub.gen("a")
        value = inner(s, "then ")
        s += "!" + s.var("b")
        return value

    result = program.run()
    assert (result.text(), result.value, result["b"]) == ("1then 2!2", "inner's", "2")
    assert backend.num_pieces == 1
    with pytest.raises(TypeError, match=r"call inner.run\(...\)"):
        inner("then ")  # type: ignore[arg-type, call-arg]
