"""What SGLang's states tell of a run: metadata, choice tables, streams."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

import umbel as ub
import umbel.interpreter.compat.sglang as sgl
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply

from .conftest import run

MakeBackend = Callable[..., ScriptedBackend]
DOWN = ub.BackendError("down", backend="scripted")


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
