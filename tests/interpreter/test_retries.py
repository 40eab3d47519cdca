"""Gens with `retries`: what does not fit its type is asked for again, and nothing follows it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, field_validator

import umbel as ub
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall
from umbel.lang.errors import InvalidValueError
from umbel.lang.graph import node_seed

from .conftest import MakeBackend


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def be_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


ODD, EVEN, OTHER_ODD = '{"number": 1}', '{"number": 2}', '{"number": 3}'


def answers(*replies: str | Reply) -> Any:
    """Answer with one reply after the other, and note what was asked."""
    left = list(replies)

    def answer(call: ScriptedCall) -> str | Reply:
        calls.append(call)
        return left.pop(0)

    calls: list[ScriptedCall] = []
    answer.calls = calls  # type: ignore[attr-defined]
    return answer


@ub.function
def plain(s: ub.State) -> Even:
    s += "Even: " + ub.gen("even", schema=Even, retries=2, temperature=1.0) + "!"
    return s["even"]  # type: ignore[no-any-return]


@ub.function
def asked(s: ub.State) -> Even:
    s += ub.user("An even number.")
    s += ub.assistant(ub.gen("even", schema=Even, retries=2, reask=True))
    s += ub.user("Thanks.")
    return s["even"]  # type: ignore[no-any-return]


def test_a_value_that_fails_its_validators_is_drawn_again_with_another_seed(
    scripted: MakeBackend,
) -> None:
    answer = answers(ODD, OTHER_ODD, EVEN)
    scripted({"even": answer})
    result = plain.run()
    assert result.value == result["even"] == Even(number=2)
    assert result.text() == f"Even: {EVEN}!"
    assert result.meta("even").attempts == 3
    assert [call.address for call in answer.calls] == ["1", "1.retry1", "1.retry2"]
    assert len({node_seed(call.seed, call.row, call.address) for call in answer.calls}) == 3


def test_a_value_that_fits_is_asked_for_once(scripted: MakeBackend) -> None:
    answer = answers(EVEN)
    scripted({"even": answer})
    assert plain.run().meta("even").attempts == 1


def test_the_last_value_is_read_as_what_it_is(scripted: MakeBackend) -> None:
    answer = answers(ODD, ODD, ODD)
    scripted({"even": answer})
    with pytest.raises(
        ub.GenerationError, match=r"(?s)no valid Even after 3 attempts: .*must be even"
    ):
        plain.run()
    assert len(answer.calls) == 3


@pytest.mark.parametrize("reask", [False, True])
def test_what_a_schema_forbids_afterwards_says_that_all_attempts_failed(
    scripted: MakeBackend, reask: bool
) -> None:
    wrong = InvalidValueError("value does not fit the schema", where="/0", text="[1,1]")
    scripted({"list": Reply(text="[1,1]", error=wrong)})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("list", schema=list[int], retries=3, reask=reask, temperature=1.0)

    with pytest.raises(ub.GenerationError, match="failed after 4 attempts: "):
        program.run()["list"]


def test_with_reask_the_model_is_told_what_was_wrong(scripted: MakeBackend) -> None:
    answer = answers(ODD, OTHER_ODD, EVEN)
    scripted({"even": answer})
    result = asked.run()
    assert result.value == Even(number=2)
    assert result.meta("even").attempts == 3
    told = answer.calls[2].messages
    assert [turn["role"] for turn in told] == [*["user", "assistant"] * 2, "user", "assistant"]
    assert told[1]["content"] == ODD
    assert told[3]["content"] == OTHER_ODD
    assert "must be even" in told[2]["content"]
    assert "errors.pydantic.dev" not in told[2]["content"]


def test_the_text_shows_nothing_of_what_was_wrong(scripted: MakeBackend) -> None:
    scripted({"even": answers(ODD, EVEN)})
    assert asked.run().messages == [
        {"role": "user", "content": "An even number."},
        {"role": "assistant", "content": EVEN},
        {"role": "user", "content": "Thanks."},
    ]


def test_outside_turns_the_question_is_text(scripted: MakeBackend) -> None:
    answer = answers(ODD, EVEN)
    scripted({"even": answer})

    @ub.function
    def program(s: ub.State) -> None:
        s += "Even: " + ub.gen("even", schema=Even, retries=1, reask=True)

    result = program.run()
    assert result["even"] == Even(number=2)
    assert result.text() == f"Even: {EVEN}"
    assert answer.calls[1].prompt.startswith(f"Even: {ODD}\nThis is not valid: ")


@pytest.mark.parametrize("reask", [False, True])
def test_what_a_schema_forbids_afterwards_is_asked_for_again(
    scripted: MakeBackend, reask: bool
) -> None:
    wrong = InvalidValueError("value does not fit the schema", where="/0", text="[1,1]")
    answer = answers(Reply(text="[1,1]", error=wrong), "[1,2]")
    scripted({"list": answer})
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}

    @ub.function
    def program(s: ub.State) -> Any:
        s += ub.user("A list.")
        s += ub.assistant(
            ub.gen("list", schema=schema, strict=False, retries=1, reask=reask, temperature=1.0)
        )
        return s["list"]

    result = program.run()
    assert result.value == [1, 2]
    assert result.messages[-1]["content"] == "[1,2]"
    if reask:
        assert [turn["content"] for turn in answer.calls[1].messages][1] == "[1,1]"


def test_other_failures_are_not_asked_for_again(scripted: MakeBackend) -> None:
    answer = answers(Reply(error=ub.ConstraintError("no such schema")))
    scripted({"even": answer})
    with pytest.raises(ub.GenerationError, match="no such schema"):
        plain.run()
    assert len(answer.calls) == 1


def test_a_value_that_was_cut_is_not_asked_for_again(scripted: MakeBackend) -> None:
    answer = answers(Reply(text='{"num', accepting=False))
    scripted({"even": answer})
    with pytest.raises(ub.TruncatedError):
        plain.run()
    assert len(answer.calls) == 1


@pytest.mark.parametrize("reask", [False, True])
def test_an_async_program_waits_before_it_goes_on(scripted: MakeBackend, reask: bool) -> None:
    scripted({"even": answers(ODD, EVEN)})

    @ub.function
    async def program(s: ub.State) -> Even:
        s += ub.user("An even number.")
        s += ub.assistant(ub.gen("even", schema=Even, retries=1, reask=reask, temperature=1.0))
        with pytest.raises(ub.ProgramError, match=r"await s\.get"):
            s += ub.user("Too early.")
        found = await s.get("even")
        s += ub.user("Thanks.")
        return found  # type: ignore[no-any-return]

    result = asyncio.run(program.arun())
    assert result.value == Even(number=2)
    assert [turn["content"] for turn in result.messages] == ["An even number.", EVEN, "Thanks."]


def test_a_body_that_reads_nothing_ends_with_the_value_that_fits(scripted: MakeBackend) -> None:
    scripted({"even": answers(ODD, EVEN, ODD, EVEN)})

    @ub.function
    def unread(s: ub.State) -> None:
        s += ub.gen("even", schema=Even, retries=1, temperature=1.0)

    @ub.function
    async def unread_async(s: ub.State) -> None:
        s += ub.gen("even", schema=Even, retries=1, temperature=1.0)

    assert unread.run()["even"] == Even(number=2)
    assert unread_async.run()["even"] == Even(number=2)


@pytest.mark.parametrize("reask", [False, True])
def test_branches_are_asked_again_each_by_itself(scripted: MakeBackend, reask: bool) -> None:
    wrong = {"1.fork0[1].0"}
    scripted({"even": lambda call: ODD if call.address in wrong else EVEN})

    @ub.function
    def program(s: ub.State) -> Any:
        s += "Even: "
        with s.fork(3) as branches:
            branches += ub.gen("even", schema=Even, retries=1, reask=reask, temperature=1.0)
            joined = branches.join()
        return [value.number for value in joined["even"]], joined.texts()

    numbers, texts = program.run().value
    assert numbers == [2, 2, 2]
    assert texts == [EVEN] * 3


def test_names_that_collect_hold_the_value_that_fits(scripted: MakeBackend) -> None:
    scripted({"even": answers(EVEN, ODD, EVEN)})

    @ub.function
    def program(s: ub.State) -> Any:
        for _ in range(2):
            s += ub.gen("even", schema=Even, retries=1, temperature=1.0, append=True)
        return [value.number for value in s["even"]]

    result = program.run()
    assert result.value == [2, 2]
    assert [meta.attempts for meta in result.meta("even")] == [1, 2]


def test_a_capture_holds_the_value_that_fits(scripted: MakeBackend) -> None:
    scripted({"even": answers(ODD, EVEN)})

    @ub.function
    def program(s: ub.State) -> Any:
        with s.capture("all"):
            s += "a" + ub.gen("even", schema=Even, retries=1, reask=True)
        return s["all"]

    assert program.run().value == "a" + EVEN


@pytest.mark.parametrize("program", [plain, asked])
def test_streams_show_only_what_stays(scripted: MakeBackend, program: Any) -> None:
    scripted({"even": answers(ODD, EVEN)})
    stream = program.stream()
    assert "".join(stream) == stream.result().text()
    scripted({"even": answers(ODD, EVEN)})
    assert "".join(program.stream().text("even")) == EVEN
    scripted({"even": answers(ODD, EVEN)})
    assert list(program.stream().partial("even")) == [Even(number=2)]


def test_the_count_of_attempts_is_read_back_from_a_file(
    scripted: MakeBackend, tmp_path: Path
) -> None:
    scripted({"even": answers(ODD, EVEN)})
    path = tmp_path / "results.jsonl"
    plain.run_batch([{}], results_file=path)
    scripted({})
    (result,) = plain.run_batch([{}], results_file=path)
    assert result["even"] == Even(number=2)
    assert result.meta("even").attempts == 2


def test_a_trace_ends_at_a_gen_with_retries(scripted: MakeBackend) -> None:
    assert len(plain.compile().nodes) == 2


def test_a_type_with_a_validator_of_its_own_is_asked_for_again(scripted: MakeBackend) -> None:
    def small(value: int) -> int:
        assert value < 10, "must be small"
        return value

    scripted({"x": answers("12", "3")})

    @ub.function
    def program(s: ub.State) -> Any:
        checked: Any = Annotated[int, AfterValidator(small)]
        s += ub.gen("x", dtype=checked, retries=1, temperature=1.0)
        return s["x"]

    assert program.run().value == 3


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"retries": -1}, "0 or more"),
        ({"retries": 1, "n": 2}, "can't be combined"),
        ({"reask": True}, "needs retries"),
        ({"retries": 1, "schema": None}, "needs a type"),
        ({"strict": False, "schema": None}, "needs a schema"),
        ({"strict": False, "schema": None, "regex": "a"}, "needs a schema"),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ub.gen("even", **{"schema": Even, **options})


def test_retries_without_a_temperature_are_refused_where_they_are_appended(
    scripted: MakeBackend,
) -> None:
    scripted({"even": EVEN})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("even", schema=Even, retries=1)

    with pytest.raises(ValueError, match="reask=True"):
        program.run()
    assert program.options(sampling={"temperature": 0.5}).run()["even"] == Even(number=2)
