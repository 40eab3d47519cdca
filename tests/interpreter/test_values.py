"""Rules 10a, 11, 12 and 14 as a program sees them: names, samples, captures, types, choices."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import umbel as ub
from umbel.interpreter.backends.scripted_replies import Reply

from .conftest import MakeBackend


class Report(BaseModel):
    title: str
    score: int


@dataclasses.dataclass
class Point:
    x: int


def test_rule_14_values_come_back_typed_by_name_and_by_handle(scripted: MakeBackend) -> None:
    scripted({"report": '{"title": "t", "score": 3}', "count": "12", "mood": "bad", "said": '"hi"'})

    @ub.function
    def program(s: ub.State) -> Any:
        report = ub.gen("report", schema=Report)
        s += report + ub.gen_int("count") + ub.gen("mood", schema=Literal["good", "bad"])
        s += ub.gen_string("said")
        return s[report]

    result = program.run()
    assert result.value == Report(title="t", score=3)
    assert result["report"] == Report(title="t", score=3)
    assert (result["count"], result["mood"], result["said"]) == (12, "bad", "hi")
    assert result.text() == '{"title": "t", "score": 3}12bad"hi"'


def test_a_handle_without_a_name_reads_what_it_wrote_last(scripted: MakeBackend) -> None:
    scripted({"0": "1", "1": "2"})

    @ub.function
    def program(s: ub.State) -> tuple[int, int]:
        number = ub.gen(schema=int)
        s += number
        first = s[number]
        s += number
        with pytest.raises(ub.UnknownNameError, match="was not appended to this state"):
            s[ub.gen(schema=int)]
        return first, s[number]

    assert program.run().value == (1, 2)


def test_case_29_a_value_cut_by_max_tokens_is_truncated_not_undecodable(
    scripted: MakeBackend,
) -> None:
    scripted({"report": '{"title": "a long one", "score": 3}', "number": "1 2 3"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("report", schema=Report, max_tokens=4)
        with pytest.raises(ub.TruncatedError, match="cut at max_tokens=4") as caught:
            s["report"]
        assert caught.value.partial == '{"title"'
        assert s.meta("report").finish_reason == "length"
        s += "goes on"

    assert program.run().text() == '{"title"goes on'


def test_rule_14_a_value_that_does_not_fit_its_type_says_so(scripted: MakeBackend) -> None:
    scripted({"report": Reply(text='{"title": "t", "score": "high"}')})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("report", schema=Report)
        s["report"]

    with pytest.raises(
        ub.GenerationError, match=r"'report' \(0\): the value is no valid Report"
    ) as e:
        program.run()
    assert "score" in str(e.value)


def test_case_8_names_are_exact_and_append_makes_a_list(scripted: MakeBackend) -> None:
    scripted({"MixedCase": ["a", "b"], "item": ["1", "2", "3"]})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("MixedCase")
        for _ in range(3):
            s += ub.gen("item", schema=int, append=True)
        s += ub.gen("MixedCase")

    result = program.run()
    assert result["item"] == [1, 2, 3]
    assert result["MixedCase"] == "b"
    assert [meta.address for meta in result.meta("item")] == ["1", "2", "3"]
    assert result.names() == ["MixedCase", "item"]
    with pytest.raises(ub.UnknownNameError, match="nothing is named 'mixedcase'") as caught:
        result["mixedcase"]
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize("append_first", [True, False])
def test_a_name_is_written_in_one_way(scripted: MakeBackend, append_first: bool) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("x", append=append_first)
        s += ub.gen("x", append=not append_first)

    with pytest.raises(ub.ProgramError, match="write it in one way"):
        program.run()


def test_a_capture_names_all_that_its_block_appends(scripted: MakeBackend) -> None:
    scripted({"a": "1", "b": "2", "c": "3"})

    @ub.function
    def program(s: ub.State) -> None:
        s += "before "
        with s.capture("outer"):
            with s.user():
                s += "x" + ub.gen("a")
            with s.capture("inner"):
                s += "y" + ub.gen("b")
            with s.capture("list", append=True):
                s += "z"
        with s.capture("empty"):
            pass
        s += " see " + s.var("outer") + ub.gen("c")

    result = program.run()
    assert result["outer"] == "x1y2z"
    assert (result["inner"], result["list"], result["empty"]) == ("y2", ["z"], "")
    assert result.text() == "before x1y2z see x1y2z3"
    with pytest.raises(ub.ProgramError, match="has no metadata"):
        result.meta("outer")


def test_case_7_a_capture_is_not_read_in_its_own_block(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        with s.capture("c"):
            s += "x"
            for read in (lambda: s["c"], lambda: s.var("c")):
                with pytest.raises(ub.ProgramError, match="still open: read it after its block"):
                    read()
            with pytest.raises(ub.ProgramError, match="already open"), s.capture("c"):
                pass

    assert program.run()["c"] == "x"


def test_rule_10a_several_samples_are_a_list_until_one_is_picked(scripted: MakeBackend) -> None:
    scripted({"v": ["a", "b", "c"], "w": lambda call: f"<{call.prompt}>"})

    @ub.function
    def program(s: ub.State) -> None:
        s += "x" + ub.gen("v", n=3)
        for use in (
            lambda: s.__iadd__("more"),
            lambda: s.fork(2),
            lambda: s.copy(),
        ):
            with pytest.raises(ub.ProgramError, match=r"choose one with s.pick\(name, i\)"):
                use()
        assert s["v"] == ["a", "b", "c"]
        assert s.text() == "x"
        with pytest.raises(ub.ProgramError, match="samples are 0 to 2"):
            s.pick("v", 3)
        s.pick("v", 1)
        s += ub.gen("w")
        with pytest.raises(ub.ProgramError, match="no gen with n > 1"):
            s.pick("v", 1)
        with pytest.raises(ub.ProgramError, match="several samples"):
            s.var("v")

    result = program.run()
    assert result.text() == "xb<xb>"
    assert len(result.meta("v").samples) == 3


def test_rule_10a_the_turn_around_several_samples_closes_when_one_is_picked(
    scripted: MakeBackend,
) -> None:
    scripted({"v": ["a", "b"], "w": ["c", "d"]})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.assistant(ub.gen("v", n=2))
        s.pick("v", 1)
        with s.assistant():
            handle = ub.gen("w", n=2)
            s += handle
        s.pick(handle, 0)
        s += ub.user("u")

    assert program.run().messages == [
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "u"},
    ]


def test_rule_10a_nothing_follows_several_samples_in_one_expression(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("v", n=2) + "more"

    with pytest.raises(ub.ProgramError, match="'v' has several samples"):
        program.run()


def test_rule_10b_turns_are_messages(scripted: MakeBackend) -> None:
    scripted({"a": "hello"})

    @ub.function
    def program(s: ub.State) -> Any:
        s += "loose" + ub.system("be kind")
        s.user("hi" + ub.select("c", ["!"]))
        with s.role("tool"):
            s += "result"
        s += ub.assistant_begin() + ub.gen("a")
        return s.messages

    result = program.run()
    assert result.value == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi!"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "hello"},
    ]
    assert result.text() == "loosebe kindhi!resulthello"


def test_rule_11_a_select_appends_its_winner_and_keeps_the_table(scripted: MakeBackend) -> None:
    scores = {"a": [-0.1], "b": [-0.1, -0.3], "c": [-0.4, 0.0, 0.0, 0.0, 0.0]}
    scripted({"s": Reply(scores=scores)})

    @ub.function
    def program(s: ub.State, method: Any) -> None:
        s += "x" + ub.select("s", ["a", "b", "c"], method=method)

    result = program.run("token_length_normalized")
    assert (result["s"], result.text()) == ("c", "xc")
    table = result.meta("s").scores
    assert [row.choice for row in table] == ["a", "b", "c"]
    assert [row.mean for row in table] == pytest.approx([-0.1, -0.2, -0.08])
    assert program.run("sum")["s"] == "a"
    assert program.run("greedy_token_selection")["s"] == "a"


def test_rule_11_temperature_draws_by_the_runs_seed(scripted: MakeBackend) -> None:
    scripted({"s": Reply(scores={"a": [-0.5], "b": [-0.6]})})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.select("s", ["a", "b"], temperature=1.0)

    def draws(seed: int) -> list[str]:
        return [r["s"] for r in program.options(seed=seed).run_batch([()] * 40)]

    assert set(draws(1)) == {"a", "b"}
    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


def test_case_23_one_choice_needs_no_model(scripted: MakeBackend) -> None:
    scripted({})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.select("s", ["only"])

    result = program.run()
    assert result["s"] == "only"
    assert result.meta("s").scores[0].probability == 1.0


def test_case_22_many_choices(scripted: MakeBackend) -> None:
    choices = [str(i) for i in range(2002)]
    scripted({"s": "1999"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.select("s", choices, terminator=".")

    assert program.run()["s"] == "1999"


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_case_24_the_earliest_stop_wins_in_any_order(
    scripted: MakeBackend, stops: list[str]
) -> None:
    scripted({"v": Reply(tokens=("x", "ab", "y"))})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("v", stop=stops)

    result = program.run()
    assert result["v"] == "x"
    assert result.meta("v").matched_stop == "ab"
    assert "".join(program.stream()) == "x"


def test_rule_12_stop_regexes_end_the_text(scripted: MakeBackend) -> None:
    scripted({"v": "one two 33 four"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("v", stop_regex=r" \d+")

    result = program.run()
    assert (result["v"], result.meta("v").matched_stop) == ("one two", " 33")
    assert "".join(program.stream()) == "one two"


def test_meta_says_how_a_value_came_about(scripted: MakeBackend) -> None:
    scripted({"v": "one two three"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("v", max_tokens=2, logprobs=True)

    meta = program.run().meta("v")
    assert (meta.address, meta.finish_reason) == ("0", "length")
    assert len(meta.token_ids) == meta.num_kept == len(meta.logprobs) == 2
    assert meta.usage.completion_tokens == 2
    assert meta.timings.finished >= meta.timings.ready > 0


def test_a_result_tells_what_is_in_it(scripted: MakeBackend) -> None:
    scripted({"v": "x"})

    @ub.function
    def program(s: ub.State) -> int:
        s += ub.gen("v")
        return 7

    result = program.options(seed=5).run()
    assert ("v" in result, "w" in result, result.seed, result.row) == (True, False, 5, 0)
    assert repr(result) == "Result(row=0, names=['v'], value=7)"
    assert program.run().seed != program.run().seed
