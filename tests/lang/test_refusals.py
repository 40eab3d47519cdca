"""What a newcomer gets wrong is refused on its own line, with what to write instead."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.lang import primitives
from umbel.lang.runner import Settings

ANY: Any = ub  # the library as one who runs no type checker sees it


@ub.function
def program(s: ub.State, x: str = "") -> None:
    s += "a" + x


@ub.function
async def async_program(s: ub.State, x: str = "") -> None:
    s += "a" + x


LOOSE: Any = program


@pytest.mark.parametrize(
    "call",
    [
        lambda: ANY.select(["a", "b"]),
        lambda: ANY.gen(["a", "b"]),
        lambda: ANY.gen_int(["a", "b"]),
        lambda: ANY.gen_string(["a", "b"]),
        lambda: ANY.role(["a", "b"], "x"),
    ],
)
def test_a_name_that_is_a_list_is_said_to_be_one(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="is a string, not list"):
        call()


def test_a_captures_name_is_a_string() -> None:
    @ub.function
    def captures(s: Any) -> None:
        with s.capture(["a"]):
            s += "x"

    with pytest.raises(TypeError, match="a name is a string, not list"):
        captures.compile()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ANY.gen("a", max_token=1), "gen() has no option 'max_token': did you mean 'max_t"),
        (lambda: ANY.gen("a", scheme=int), "did you mean 'schema'?"),
        (lambda: ANY.gen_int("a", temprature=1), "did you mean 'temperature'?"),
        (lambda: ANY.select("a", ["b"], methode="sum"), "select() has no option 'methode': did yo"),
        (lambda: LOOSE.options(temperature=1), "sampling={'temperature': 1}"),
        (lambda: LOOSE.options(sed=1), "options() has no option 'sed': did you mean 'seed'?"),
        (lambda: LOOSE.options(sampling={"temprature": 1}), "did you mean 'temperature'?"),
        (lambda: LOOSE.options(temprature=1), "did you mean sampling={'temperature': 1}?"),
        (lambda: LOOSE.options(qqq=1), "it takes backend, sampling, seed, timeout"),
        (lambda: LOOSE.run_batch([], in_order=True), "did you mean 'ordered'?"),
        (lambda: LOOSE.iter_batch([], on_eror=True), "did you mean 'on_error'?"),
        (lambda: LOOSE.arun_batch([], on_eror=True), "did you mean 'on_error'?"),
        (lambda: LOOSE.aiter_batch([], on_eror=True), "did you mean 'on_error'?"),
    ],
)
def test_an_unknown_option_meets_the_nearest_one(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert words in str(caught.value)


def test_every_option_of_gen_can_be_suggested() -> None:
    for name in ub.SamplingParams.__struct_fields__:
        assert name in primitives._GEN_OPTIONS
        with pytest.raises(TypeError, match=f"did you mean '{name}'"):
            ANY.gen("a", **{name + "_": 1})


@pytest.mark.parametrize("program", [program, async_program])
@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [((), {}, "nothing"), ((), {"x": "a"}, "nothing"), (("a",), {}, "str")],
)
def test_a_program_called_like_a_function_is_told_how_to_run(
    program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: str
) -> None:
    name = program.__name__
    with pytest.raises(TypeError, match=rf"not {found}; to run it, call {name}\.run\(\.\.\.\)"):
        program(*args, **kwargs)


OPTIONS = [field.name for field in dataclasses.fields(Settings)]


@pytest.mark.parametrize("name", [*OPTIONS, *ub.SamplingParams.__struct_fields__])
@pytest.mark.parametrize("method", ["compile", "plan", "bind"])
def test_an_option_among_the_arguments_is_told_its_place(name: str, method: str) -> None:
    where = rf"options\({name}=" if name in OPTIONS else rf"options\(sampling={{'{name}'"
    for program in (LOOSE, ANY.function(lambda s: None)):
        with pytest.raises(TypeError, match=f"has no parameter '{name}': how .* {where}"):
            getattr(program, method)(**{name: 1})


def test_a_parameter_may_be_called_as_an_option_is() -> None:
    @ub.function
    def program(s: ub.State, seed: str, temperature: str) -> str:
        return seed + temperature

    assert program.bind(seed="a").compile(temperature="b").nodes == ()


FLAGS = [name for name, kind in get_type_hints(primitives.GenOptions).items() if kind is bool]


@pytest.mark.parametrize("wrong", ["no", "", 0, 3])
def test_a_flag_is_true_or_false_and_nothing_that_python_takes_for_it(wrong: object) -> None:
    assert {"logprobs", "ignore_eos", "heal", "thinking", "strict", "reask", "append"} <= set(FLAGS)
    for name in FLAGS:
        with pytest.raises(TypeError, match=f"{name} must be True or False, not {wrong!r}"):
            ANY.gen("a", **{name: wrong})
    with pytest.raises(TypeError, match="append must be True or False"):
        ANY.select("a", ["b"], append=wrong)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ANY.select("a", ["b"], temperature="1"), "temperature must be a number, not '1'"),
        (
            lambda: ANY.select("a", ["b"], temperature=True),
            "temperature must be a number, not True",
        ),
        (lambda: ANY.select("a", ["b"], terminator=3), "terminator is a string, not 3"),
        (lambda: ANY.gen("a", regex=re.compile("b")), "not re.compile('b'): give its .pattern"),
        (lambda: ANY.gen("a", dtype="int"), "dtype takes a type, such as int, not 'int'"),
        (lambda: LOOSE.options(sampling=3), "sampling is a dict of gen's options, not 3"),
        (lambda: LOOSE.run_batch(3), "rows are a list or another iterable, not 3"),
    ],
)
def test_an_argument_of_another_type_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert words in str(caught.value)


def test_rows_may_have_no_more_than_places() -> None:
    class Places:
        def __getitem__(self, place: int) -> str:
            return "ab"[place]  # the IndexError ends it

    rows: Any = Places()
    with ScriptedBackend() as backend:
        results = program.options(backend=backend).run_batch(rows)
    assert [result.text() for result in results] == ["aa", "ab"]


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("make", [ANY.gen, ANY.select])
def test_choices_have_an_order(make: Callable[..., object], kind: type) -> None:
    with pytest.raises(TypeError, match=f"not a {kind.__name__}, whose order differs .*: sort it"):
        make("a", choices=kind(["b", "c"]))
    make("a", choices={"b": 1, "c": 2}.keys())


@pytest.mark.parametrize("rows", ["ab", b"ab", bytearray(b"ab"), {"x": "a"}])
@pytest.mark.parametrize("method", ["run_batch", "iter_batch", "aiter_batch"])
def test_one_row_is_no_rows(method: str, rows: object) -> None:
    with pytest.raises(TypeError, match=f"not one {type(rows).__name__}"):
        getattr(LOOSE, method)(rows)


@pytest.mark.parametrize(
    "use",
    [
        lambda backend: ANY.set_default_backend(backend),
        lambda backend: ANY.use_backend(backend).__enter__(),
        lambda backend: LOOSE.options(backend=backend),
        lambda backend: ANY.Interpreter(backend),
    ],
)
def test_a_models_name_is_no_backend(use: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"open it with umbel\.connect\('smollm2'\)"):
        use("smollm2")
    with pytest.raises(TypeError, match="is no backend"):
        use(3)


@pytest.mark.parametrize("choices", [["no", "no idea"], ["b", ""], ["abc", "b", "ab"]])
def test_rule_1_choices_without_an_end_are_refused_where_they_are_appended(
    choices: list[str],
) -> None:
    append: list[Callable[[Any], Any]] = [
        lambda s: s.__iadd__(ub.select("x", choices)),
        lambda s: s.__iadd__("a" + ub.select("x", choices) + "b"),
        lambda s: s.__iadd__(ub.user("a") + ub.select("x", choices)),
    ]

    @ub.function
    def refused(s: ub.State, index: int) -> None:
        with pytest.raises(ub.ConstraintError, match="begins"):
            append[index](s)

    @ub.function
    def fine(s: ub.State) -> None:
        s += ub.select("x", choices, terminator="\n")
        s += ub.assistant(ub.select("x", choices))
        with s.assistant():
            s += ub.select("x", choices)
        s += ub.select("x", choices[:1])

    for index in range(len(append)):
        assert refused.compile(index).nodes == ()
    assert len(fine.compile().nodes) == 8


def test_plus_says_to_append_in_place() -> None:
    @ub.function
    def adds(s: Any) -> None:
        with pytest.raises(ub.ProgramError, match=r"write s \+= 'a'"):
            s = s + "a"
        with pytest.raises(ub.ProgramError, match=r"write s \+= \.\.\."):
            s = "a" + s
        with pytest.raises(ub.ProgramError, match=r"write s \+= gen\('a'\)"):
            s = s + ub.gen("a")
        with pytest.raises(ub.ProgramError, match=r"write s \+= \.\.\."):
            s = ub.gen("a") + s

    assert adds.compile().nodes == ()


@pytest.mark.parametrize(
    ("seed", "error"), [("a", TypeError), (1.5, TypeError), (True, TypeError), (2**64, ValueError)]
)
def test_a_seed_that_is_none_is_refused_on_its_line(seed: Any, error: type[Exception]) -> None:
    @ub.function
    def program(s: ub.State) -> None:
        pass

    with pytest.raises(error, match="seed must"):
        program.options(seed=seed)
    with pytest.raises(error, match="seed must"):
        ub.gen("x", seed=seed)
    program.options(seed=-1), program.options(seed=2**64 - 1)  # both are seeds


def test_an_argument_without_a_parameter_is_refused_where_it_is_bound() -> None:
    class Holder:
        @ub.function
        def method(self, s: ub.State, topic: str, /, text: str, **rest: str) -> None:
            pass

        @ub.function
        def plain(self, s: ub.State, topic: str) -> None:
            pass

    Holder().method.bind(text="a", anything="b")
    for wrong in ("topics", "s", "self"):
        with pytest.raises(TypeError, match=f"plain has no parameter '{wrong}'"):
            Holder().plain.bind(**{wrong: "x"})
