"""The names of SGLang's frontend: what they take and give, and where umbel is right instead."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

import umbel as ub
import umbel.interpreter.compat.sglang as sgl
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall

from .conftest import run

MakeBackend = Callable[..., ScriptedBackend]
DOWN = ub.BackendError("down", backend="scripted")


def op_of(expr: Any, **defaults: Any) -> Any:
    """Return the operation that an expression becomes in a run with these defaults."""

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += expr

    seen: list[ScriptedCall] = []

    def script(call: ScriptedCall) -> Reply:
        seen.append(call)
        return Reply(accepting=True)

    with ScriptedBackend(script) as backend:
        program.run(backend=backend, **defaults).sync()
    return seen[0].op


# --- names and arguments -----------------------------------------------------------------------


def test_gen_takes_its_arguments_in_sglangs_order() -> None:
    order = [
        "name",
        "max_tokens",
        "min_tokens",
        "n",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "ignore_eos",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "return_text_in_logprobs",
        "dtype",
        "choices",
        "choices_method",
        "regex",
        "json_schema",
    ]
    assert list(inspect.signature(sgl.gen).parameters) == order
    typed = [name for name in order[:18] if name != "min_tokens"]
    assert list(inspect.signature(sgl.gen_int).parameters) == typed
    assert list(inspect.signature(sgl.gen_string).parameters) == typed


def test_every_sampling_option_reaches_the_gen() -> None:
    op = op_of(
        sgl.gen(
            "a",
            9,
            2,
            stop=["x", "y"],
            stop_token_ids=[3],
            stop_regex="z+",
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            ignore_eos=True,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=4,
        )
    )
    assert op.sampling == ub.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        stop=("x", "y"),
        stop_token_ids=(3,),
        stop_regex=("z+",),
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        ignore_eos=True,
        logprobs=True,
        prompt_logprobs=True,
        top_logprobs=4,
    )


def test_a_run_has_sglangs_defaults_and_a_gen_overrides_them() -> None:
    assert op_of(sgl.gen("a")).sampling == ub.SamplingParams(max_tokens=128, temperature=1.0)
    run_options = {"max_new_tokens": 5, "temperature": 0.2, "top_k": -1, "stop": []}
    sampling = op_of(sgl.gen("a", temperature=0), **run_options).sampling
    assert sampling == ub.SamplingParams(max_tokens=5, temperature=0.0, top_k=0)


@pytest.mark.parametrize(
    ("dtype", "text"), [(int, "-12"), ("float", "1.5"), (bool, "True"), ("str", '"a \\" b"')]
)
def test_a_value_of_any_dtype_is_its_text(scripted: MakeBackend, dtype: Any, text: str) -> None:
    scripted({"a": text})

    def body(s: sgl.ProgramState) -> None:
        s += sgl.gen("a", dtype=dtype, stop="#")

    assert run(body)["a"] == text


def test_a_json_schema_keeps_the_value_as_text(scripted: MakeBackend) -> None:
    scripted({"a": '{"x": 1}'})

    def body(s: sgl.ProgramState) -> None:
        s += sgl.gen("a", json_schema='{"type": "object"}')

    assert run(body)["a"] == '{"x": 1}'


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: sgl.gen("a", choices=[]), ub.ConstraintError, "nothing to choose"),
        (lambda: sgl.select("a"), ub.ConstraintError, "nothing to choose"),
        (lambda: sgl.select("a", ["x", "x"]), ub.ConstraintError, "more than once"),
        (lambda: sgl.gen(regex="a", dtype=int), ub.ConstraintError, "dtype and regex"),
        (lambda: sgl.gen(regex="(?=a)"), ub.ConstraintError, "look-ahead"),
        (lambda: sgl.gen(dtype=list), TypeError, "int, float, bool or str"),
        (lambda: sgl.gen(max_tokens=0), ValueError, "max_tokens"),
        (lambda: sgl.gen(stop=""), ValueError, "stop"),
        (lambda: sgl.gen(logprob_start_len=3), ub.ProgramError, "slice"),
        (lambda: sgl.select("a", ["x"], choices_method=max), TypeError, "get_meta_info"),  # type: ignore[arg-type]
        (lambda: sgl.image("cat.png"), ub.ProgramError, "not supported"),
        (lambda: sgl.video("cat.mp4", 3), ub.ProgramError, "not supported"),
        (lambda: sgl.separate_reasoning(sgl.gen("a"), "qwen3"), ub.ProgramError, "think"),
    ],
)
def test_what_cannot_be_honoured_is_refused_on_its_line(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_roles_without_content_make_an_empty_turn(scripted: MakeBackend) -> None:
    scripted({})

    def body(s: sgl.ProgramState) -> None:
        s += sgl.system() + sgl.user_begin() + "hi" + sgl.user_end()
        s.assistant("there")

    assert run(body).messages() == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "there"},
    ]


def test_a_nested_turn_names_the_users_lines(scripted: MakeBackend) -> None:
    scripted({})

    def body(s: sgl.ProgramState) -> None:
        with s.user():
            s += sgl.system("no")

    with pytest.raises(ub.ProgramError, match=rf"system.*user.*{__file__}:\d+"):
        run(body)


# --- programs ----------------------------------------------------------------------------------


def test_a_functions_own_names_win_over_options(scripted: MakeBackend) -> None:
    scripted({})

    @sgl.function
    def program(s: sgl.ProgramState, temperature: str, stream: str, stop: str = "") -> Any:
        return temperature, stream, stop

    assert program.run("a", stream="b", stop="c").ret_value == ("a", "b", "c")


def test_call_arguments_win_over_bound_ones_and_rows_stay_as_they_are(
    scripted: MakeBackend,
) -> None:
    scripted({})

    @sgl.function
    def program(s: sgl.ProgramState, p: int, q: int = 0) -> Any:
        return p, q

    bound = program.bind(p=1, q=5)
    rows: list[Any] = [{"p": 2}, [3], (4, 6), {}]
    kept = [dict(row) if isinstance(row, dict) else row for row in rows]
    assert [s.ret_value for s in bound.run_batch(rows)] == [(2, 5), (3, 5), (4, 6), (1, 5)]
    assert rows == kept
    with pytest.raises(TypeError, match="no parameter 'r'"):
        program.bind(r=1)


def test_wrong_arguments_and_options_are_refused(scripted: MakeBackend) -> None:
    scripted({})
    program = sgl.function(lambda s, p: None, num_api_spec_tokens=8)
    with pytest.raises(TypeError, match="unexpected keyword"):
        program.run(p=1, nothing=2)
    with pytest.raises(TypeError, match="nothing"):
        program.run_batch([], nothing=2)
    with pytest.raises(TypeError, match="a row is"):
        program.run_batch(["text"])
    with pytest.raises(TypeError, match="missing 1 required"):
        program.trace()

    async def body(s: sgl.ProgramState) -> None: ...

    with pytest.raises(ub.ProgramError, match=r"umbel\.function"):
        sgl.function(body)


def test_the_decorator_takes_options() -> None:
    @sgl.function(num_api_spec_tokens=4)
    def program(s: sgl.ProgramState) -> None:
        """Say nothing."""

    assert isinstance(program, sgl.SglFunction)
    assert (program.num_api_spec_tokens, program.__doc__) == (4, "Say nothing.")


def test_runs_go_on_while_the_next_one_is_started(scripted: MakeBackend) -> None:
    asked: list[str] = []

    def answer(call: ScriptedCall) -> Reply:
        asked.append(call.address)
        return Reply(text="x", stalls=len(asked) < 5)

    scripted(answer)

    def body(s: sgl.ProgramState) -> None:
        s += sgl.gen("a")

    states = [run(body) for _ in range(5)]
    assert states[-1]["a"] == "x"  # which is asked while the other four wait


def test_a_batch_makes_no_thread_for_each_branch_or_row(scripted: MakeBackend) -> None:
    scripted({"a": Reply(text="x", latency=0.05)})

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        forks = s.fork(8)
        forks += sgl.gen("a")
        forks.join()

    before = threading.active_count()
    most = before
    for state in program.run_batch([{}] * 64, num_threads=64, generator_style=True):
        most = max(most, threading.active_count())
        assert state["a"] == ["x"] * 8
    assert most - before <= 4


def test_a_batch_keeps_what_succeeded_beside_what_failed(scripted: MakeBackend) -> None:
    scripted(lambda call: Reply(error=DOWN) if call.row == 1 else "x")

    @sgl.function
    def program(s: sgl.ProgramState, is_read: bool) -> None:
        s += sgl.gen("a")
        if is_read:
            s["a"].strip()

    for is_read in (False, True):
        good, bad, last = program.run_batch([{"is_read": is_read}] * 3)
        assert (good["a"], good.error(), last["a"]) == ("x", None, "x")
        assert isinstance(bad.error(), ub.GenerationError)
        with pytest.raises(ub.GenerationError, match="down"):
            bad["a"]


def test_a_bug_in_a_body_is_raised_from_run_and_batch(scripted: MakeBackend) -> None:
    scripted({})

    def body(s: sgl.ProgramState) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(body)
    with pytest.raises(KeyError, match="mine"):
        sgl.function(body).run_batch([{}, {}])


# --- states ------------------------------------------------------------------------------------


def test_variables_are_set_by_the_program_and_by_gens_in_order(scripted: MakeBackend) -> None:
    scripted({"a": "new", "c": "t"})

    def body(s: sgl.ProgramState) -> Any:
        s["a"] = 1
        s.set_var("b", [2])
        before = s.get_var("a")
        s += sgl.gen("a")
        with s.var_scope("b"):
            s += "<" + sgl.gen("c") + ">"
        return before, s["a"], s["b"], s.names()

    state = run(body)
    assert state.ret_value == (1, "new", "<t>", ["a", "c", "b"])
    assert repr(state) == "ProgramState(new<t>)"


def test_branches_inherit_variables_and_keep_their_own(scripted: MakeBackend) -> None:
    scripted({})

    def body(s: sgl.ProgramState) -> Any:
        s["x"] = "parent"
        s["list"] = [0]
        forks = s.fork(3, position_ids_offset=[0, 8, 16])
        forks[0]["list"].append(1)
        forks[1]["x"] = "branch"
        forks[2]["y"] = 7
        forks.join()
        assert [f["list"] for f in (*forks, s)] == [[0, 1], [0], [0], [0]]
        return [f["x"] for f in forks], s["x"], s["y"]

    assert run(body).ret_value == (
        ["parent", "branch", "parent"],
        "parent",
        [ub.MISSING, ub.MISSING, 7],
    )


def test_a_copy_is_joined_at_the_end_of_its_block(scripted: MakeBackend) -> None:
    scripted({"a": "x"})

    def body(s: sgl.ProgramState) -> None:
        s += "P"
        with s.copy() as branch:
            branch += sgl.gen("a")

    state = run(body)
    assert (state["a"], state.text()) == (["x"], "P")


def test_groups_take_text_expressions_lists_and_functions(scripted: MakeBackend) -> None:
    scripted({"a": "A"})

    def body(s: sgl.ProgramState) -> Any:
        forks = s.fork(2)
        forks += "t"
        forks += sgl.gen("a")
        forks += ["0", "1"]
        forks += lambda i: str(i + 5)
        forks[0] += "!"
        with pytest.raises(ValueError, match="3 parts for 2"):
            forks += ["", "", ""]
        with pytest.raises(TypeError, match="replaced"):
            forks[0] = forks[1]
        return [f.text() for f in forks], len(forks)

    assert run(body).ret_value == (["tA05!", "tA16"], 2)


def test_a_failed_branch_fails_the_parent_and_is_named(scripted: MakeBackend) -> None:
    scripted(lambda call: Reply(error=DOWN) if "[1]" in call.address else "x")

    def body(s: sgl.ProgramState) -> None:
        forks = s.fork(3)
        forks += sgl.gen("a")
        forks.join()

    state = run(body)
    with pytest.raises(ub.GenerationError, match=r"\[1\]"):
        state["a"]
    error = state.error()
    assert isinstance(error, ub.GenerationError)
    assert "down" in str(error)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda s: s.fork(0), ValueError),
        (lambda s: s.fork(-1), ValueError),
        (lambda s: s.fork(2, [0]), ValueError),
        (lambda s: s.fork(2).join("other"), ValueError),
        (lambda s: s.__iadd__(None), TypeError),
        (lambda s: s.__iadd__(5), TypeError),
        (lambda s: s["nothing"], KeyError),
        (lambda s: s.get_meta_info("nothing"), KeyError),
    ],
)
def test_misuse_is_refused_at_once(
    scripted: MakeBackend, make: Callable[[Any], Any], error: type[Exception]
) -> None:
    scripted({})
    with pytest.raises(error):
        run(make)


def test_reads_after_a_failure_raise_its_cause_and_nothing_hangs(scripted: MakeBackend) -> None:
    scripted({"a": Reply(error=DOWN), "b": "x"})

    def body(s: sgl.ProgramState) -> None:
        s += sgl.gen("a") + sgl.gen("b")
        s.sync()
        with pytest.raises(ub.GenerationError, match="down"):
            s += "more"

    state = run(body)
    for read in (lambda: state["a"], lambda: state["b"], state.text, state.messages):
        with pytest.raises(ub.GenerationError) as caught:
            read()
        assert isinstance(caught.value.__cause__, ub.BackendError)
    assert repr(state).startswith("ProgramState(error=GenerationError(")


def test_nothing_is_appended_to_a_run_that_has_ended(scripted: MakeBackend) -> None:
    scripted({})
    state = run(lambda s: None)
    with pytest.raises(ub.ProgramError, match="ended"):
        state += "more"


def test_the_names_of_sglangs_frontend_are_there() -> None:
    names = {
        *("Anthropic", "LiteLLM", "OpenAI", "Runtime", "RuntimeEndpoint", "VertexAI"),
        *("assistant", "assistant_begin", "assistant_end", "system", "system_begin", "system_end"),
        *("user", "user_begin", "user_end", "function", "gen", "gen_int", "gen_string", "select"),
        *("image", "video", "separate_reasoning", "set_default_backend", "flush_cache"),
        *("get_server_info", "greedy_token_selection", "token_length_normalized"),
        *("unconditional_likelihood_normalized", "Engine", "ServerArgs", "global_config"),
    }
    assert names <= set(sgl.__all__)
    assert [name for name in sgl.__all__ if not hasattr(sgl, name)] == []
