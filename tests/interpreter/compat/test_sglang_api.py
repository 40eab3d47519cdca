"""The names of SGLang's frontend: what they take and give, and where umbel is right instead."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

import umbel as ub
import umbel.interpreter.compat.sglang as sgl
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall

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


def run(body: Callable[[sgl.ProgramState], Any], **options: Any) -> sgl.ProgramState:
    state: sgl.ProgramState = sgl.function(body).run(**options)
    return state


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


# --- metadata and choices ----------------------------------------------------------------------


def test_meta_info_has_sglangs_form(scripted: MakeBackend) -> None:
    scripted({"a": "one two\nthree", "b": "one two three", "c": ["x", "y z"]})

    def body(s: sgl.ProgramState) -> None:
        s["set"] = 1
        with s.var_scope("scope"):
            s += sgl.gen("a", stop="\n", return_logprob=True, top_logprobs_num=1)
        s += sgl.gen("b", max_tokens=2) + sgl.gen("c", n=2)

    state = run(body)
    a, b, c = (state.get_meta_info(name) for name in "abc")
    assert a["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert (
        len(a["output_token_logprobs"]) == len(a["output_top_logprobs"]) == a["completion_tokens"]
    )
    assert [token[::2] for token in a["output_token_logprobs"]] == [
        (0.0, "one"),
        (0.0, " two"),
        (0.0, "\nthree"),
    ]
    assert b["finish_reason"] == {"type": "length", "length": 2}
    assert "output_token_logprobs" not in b
    assert [info["completion_tokens"] for info in c] == [1, 2]
    assert state.get_meta_info("set") is None
    assert state.get_meta_info("scope") is None


SCORES: dict[str, list[float]] = {
    "A": [-0.10],
    "B": [-0.10, -0.30],
    "C": [-0.40, -0.10, -0.03, -0.01, -0.01, -0.01, -0.01, -0.01],
}
WITHOUT: list[list[float | None]] = [
    [None],
    [None, -1.40],
    [None, -0.10, -0.03, -0.01, -0.01, -0.01, -0.01, -0.01],
]
METHODS: list[tuple[sgl.ChoicesSamplingMethod, str]] = [
    (sgl.token_length_normalized, "C"),
    (sgl.greedy_token_selection, "A"),
    (sgl.unconditional_likelihood_normalized, "B"),
]


@pytest.mark.parametrize(("method", "winner"), METHODS)
def test_case_19_each_method_scores_a_table_it_is_given(
    method: sgl.ChoicesSamplingMethod, winner: str
) -> None:
    decision = method(
        choices=list(SCORES),
        normalized_prompt_logprobs=[0.0, 0.0, 0.0],
        input_token_logprobs=[[(x, 1, None) for x in row] for row in SCORES.values()],
        output_token_logprobs=[[], [], []],
        unconditional_token_logprobs=[[(x, 1, None) for x in row] for row in WITHOUT],
    )
    assert decision.decision == winner
    means = decision.meta_info["normalized_prompt_logprobs"]
    assert means == pytest.approx([-0.1, -0.2, -0.0725])
    if method.requires_unconditional_logprobs:
        scores = decision.meta_info["normalized_unconditional_prompt_logprobs"]
        assert scores == pytest.approx([-0.1, 0.5, -0.05])


def test_a_table_without_what_its_method_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="without context"):
        sgl.unconditional_likelihood_normalized(
            choices=["a"], input_token_logprobs=[[(-1.0, 1, "a")]]
        )


@pytest.mark.parametrize(("method", "winner"), METHODS[:2])
@pytest.mark.parametrize("by_gen", [True, False])
def test_a_select_uses_its_method_and_tells_its_table(
    scripted: MakeBackend, method: sgl.ChoicesSamplingMethod, winner: str, by_gen: bool
) -> None:
    scripted({"pick": Reply(scores=SCORES)})

    def body(s: sgl.ProgramState) -> None:
        if by_gen:
            s += sgl.gen("pick", choices=list(SCORES), choices_method=method)
        else:
            s += sgl.select("pick", list(SCORES), 0.0, method)

    state = run(body, temperature=0.7)
    info = state.get_meta_info("pick")
    assert state["pick"] == winner
    assert [[token[0] for token in row] for row in info["input_token_logprobs"]] == list(
        SCORES.values()
    )
    assert info["normalized_prompt_logprobs"] == [
        math.fsum(row) / len(row) for row in SCORES.values()
    ]


# --- streams -----------------------------------------------------------------------------------


def test_a_streamed_state_is_read_when_its_run_has_ended(scripted: MakeBackend) -> None:
    scripted({"a": Reply(tokens=("x", "y"), token_latency=0.01), "b": "z"})

    def body(s: sgl.ProgramState) -> Any:
        s["own"] = 1
        with s.var_scope("all"):
            s += sgl.gen("a")
            s += s["a"] + sgl.gen("b")
        return "done"

    state = run(body, stream=True)
    assert (state["a"], state["b"], state["own"], state.text()) == ("xy", "z", 1, "xyxyz")
    assert (state.ret_value, state.error(), "b" in state) == ("done", None, True)
    assert list(state.text_iter("all")) == ["xyxyz"]
    with pytest.raises(ub.UnknownNameError):
        list(state.text_iter("nothing"))


def test_a_run_without_a_stream_iterates_in_one_piece(scripted: MakeBackend) -> None:
    scripted({"a": "one two"})

    def body(s: sgl.ProgramState) -> None:
        s += "T:" + sgl.gen("a")

    async def follow(name: str | None) -> list[str]:
        return [chunk async for chunk in run(body).text_async_iter(name)]

    assert (list(run(body).text_iter()), list(run(body).text_iter("a"))) == (
        ["T:one two"],
        ["one two"],
    )
    assert (asyncio.run(follow(None)), asyncio.run(follow("a"))) == (["T:one two"], ["one two"])


def test_metadata_come_complete_at_the_end_of_a_stream(scripted: MakeBackend) -> None:
    scripted({"a": Reply(tokens=("x", "y"))})

    def body(s: sgl.ProgramState) -> None:
        s += sgl.gen("a", return_logprob=True)

    async def follow() -> list[Any]:
        state = run(body, stream=True)
        return [pair async for pair in state.text_async_iter("a", return_meta_data=True)]

    *chunks, (tail, info) = asyncio.run(follow())
    assert ([text for text, _ in chunks], tail) == (["x", "y"], "")
    assert {meta["finish_reason"] for _, meta in chunks} == {None}
    assert len(info["output_token_logprobs"]) == 2


def test_an_async_reader_blocks_no_loop(scripted: MakeBackend) -> None:
    scripted({"a": Reply(text="x", latency=0.2)})

    def body(s: sgl.ProgramState) -> None:
        s += sgl.gen("a")

    async def follow() -> int:
        state = run(body, stream=True)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(tick())
        assert [chunk async for chunk in state.text_async_iter("a")] == ["x"]
        ticker.cancel()
        return ticks

    assert asyncio.run(follow()) >= 5


def test_a_stream_tells_failures_after_the_text_before_them(scripted: MakeBackend) -> None:
    scripted({"a": Reply(tokens=("x", "y"), error=DOWN)})

    def fails(s: sgl.ProgramState) -> None:
        s += "T:" + sgl.gen("a")

    def raises(s: sgl.ProgramState) -> None:
        s += "T:"
        raise KeyError("mine")

    state = run(fails, stream=True)
    chunks: list[str] = []
    with pytest.raises(ub.GenerationError, match="down"):
        chunks.extend(state.text_iter())
    assert "".join(chunks) == "T:xy"
    assert isinstance(state.error(), ub.GenerationError)

    state = run(raises, stream=True)
    with pytest.raises(KeyError, match="mine"):
        list(state.text_iter())
    with pytest.raises(KeyError, match="mine"):
        state.text()
    assert isinstance(state.error(), KeyError)


# --- backends ----------------------------------------------------------------------------------


def test_the_default_backend_is_set_and_tells_about_itself() -> None:
    with ScriptedBackend({"a": "x"}) as backend:
        ub.set_default_backend(None)
        assert sgl.get_server_info() is None
        assert sgl.flush_cache() is False
        sgl.set_default_backend(backend)
        try:
            assert sgl.get_server_info() == {"backend": "scripted"}
            with pytest.raises(ub.UnsupportedFeatureError, match="prefix_cache=False"):
                sgl.flush_cache()
            assert run(lambda s: s.__iadd__(sgl.gen("a")))["a"] == "x"
        finally:
            ub.set_default_backend(None)


@pytest.mark.parametrize("make", [sgl.Anthropic, sgl.LiteLLM, sgl.VertexAI])
def test_services_without_a_backend_are_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ub.UnsupportedFeatureError, match="can't honour programs"):
        make("model")


def test_sglangs_engine_is_no_backend() -> None:
    runtime = object.__new__(sgl.Runtime)
    refused: list[Any] = [
        lambda: sgl.Engine(model_path="m"),
        lambda: sgl.ServerArgs(model_path="m"),
        lambda: runtime.generate("text"),
        lambda: runtime.async_generate("text"),
        lambda: runtime.encode("text"),
    ]
    for make in refused:
        with pytest.raises(ub.ProgramError, match=r"no part of the language.*Runtime"):
            make()


def test_the_global_settings_are_one() -> None:
    with ScriptedBackend() as backend:
        sgl.global_config.default_backend = backend
        try:
            assert sgl.global_config.default_backend is backend
            assert sgl.get_server_info() == {"backend": "scripted"}
        finally:
            sgl.global_config.default_backend = None
    with pytest.raises(ub.ProgramError, match=r"verbosity = 2: .*Runtime"):
        sgl.global_config.verbosity = 2
    with pytest.raises(AttributeError, match="enable_parallel_encoding"):
        sgl.global_config.enable_parallel_encoding  # noqa: B018


@pytest.mark.parametrize(
    ("model", "options", "endpoint"),
    [
        ("gpt-4.1-mini", {}, "chat"),
        ("gpt-3.5-turbo-instruct", {}, "completions"),
        ("gpt-3.5-turbo-instruct", {"is_chat_model": True}, "chat"),
        ("mine", {"is_chat_model": False, "base_url": "http://127.0.0.1:9/v1"}, "completions"),
    ],
)
def test_openai_asks_the_endpoint_that_sglang_asks(
    model: str, options: dict[str, Any], endpoint: str
) -> None:
    backend = sgl.OpenAI(model, api_key="sk-secret-0123456789", timeout=1.0, **options)
    try:
        assert backend.is_chat_model == (endpoint == "chat")
        assert f"endpoint={endpoint!r}" in repr(backend)
        assert "secret" not in repr(backend)
        assert backend.capabilities.regex is False
        assert backend.get_server_info()["backend"] == "openai"
        with pytest.raises(ub.UnsupportedFeatureError, match="flush_cache"):
            sgl.flush_cache(backend)
    finally:
        backend.shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_azure": True}, "is_azure.*base_url"),
        ({"chat_template": object()}, "chat_template.*leave it out"),
        ({"organization": "org"}, "organization.*api_key, base_url"),
        ({"default_headers": {"x": "y"}}, "default_headers"),
    ],
)
def test_openai_refuses_what_would_be_ignored(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ub.UnsupportedFeatureError, match=words):
        sgl.OpenAI("gpt-4.1-mini", api_key="k", **options)


def test_openai_wants_a_key_and_an_address_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ub.ProgramError, match="OPENAI_API_KEY"):
        sgl.OpenAI("gpt-4.1-mini")
    with pytest.raises(ub.ProgramError, match="api_key"):
        sgl.OpenAI("m", base_url="https://user:hunter2@example.org/v1")


def test_an_endpoint_takes_nothing_that_it_would_ignore() -> None:
    with pytest.raises(ub.UnsupportedFeatureError, match="verify"):
        sgl.RuntimeEndpoint("http://127.0.0.1:1", verify="ca.pem")
    with pytest.raises(ub.UnsupportedFeatureError, match="chat_template_name"):
        sgl.RuntimeEndpoint("http://127.0.0.1:1", chat_template_name="chatml")
    with pytest.raises(ub.BackendConnectionError):
        sgl.RuntimeEndpoint("http://127.0.0.1:1", api_key="secret")


def test_a_runtime_takes_the_server_arguments_that_an_engine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    backend = ScriptedBackend({"a": "x"})

    def connect(ref: str, **options: Any) -> ScriptedBackend:
        asked.append((ref, options))
        return backend

    monkeypatch.setattr("umbel.interpreter.compat.sglang.backends.connect", connect)
    runtime = sgl.Runtime(
        model_path="m", context_length=64, disable_radix_cache=True, tp_size=1, log_level="error"
    )
    assert asked == [("m", {"max_seq_len": 64, "prefix_cache": False})]
    assert run(lambda s: s.__iadd__(sgl.gen("a")), backend=runtime.endpoint)["a"] == "x"
    assert sgl.get_server_info(runtime) == {"backend": "scripted"}
    runtime.shutdown()
    with pytest.raises(ub.GenerationError, match="closed"):
        run(lambda s: s.__iadd__(sgl.gen("a")), backend=runtime).text()
    with pytest.raises(ub.ProgramError, match="tp_size"):
        sgl.Runtime("m", tp_size=2)


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
