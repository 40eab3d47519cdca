"""Programs of the shapes that SGLang's users write, unchanged but for the import."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

import umbel.interpreter.compat.sglang as sgl
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall

MakeBackend = Callable[..., ScriptedBackend]


@sgl.function
def few_shot(s, question):  # type: ignore[no-untyped-def]  # as SGLang's users write them
    s += "Q: What is two plus two?\nA: four\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0)


@sgl.function
def chat(s, first, second):  # type: ignore[no-untyped-def]
    s += sgl.system("Be brief.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=32))
    with s.user():
        s += second
    with s.assistant():
        s += sgl.gen("answer_2", max_tokens=32)


@sgl.function
def use_tool(s, lhs, rhs):  # type: ignore[no-untyped-def]
    s += "calculate(1+2)=3\n"
    s += "The product is calculate(" + sgl.gen("expression", stop=")") + ") = "
    with s.var_scope("answer"):
        left, right = s["expression"].split("*")
        s += str(int(left) * int(right))


@sgl.function
def choose_tool(s, question):  # type: ignore[no-untyped-def]
    s += "To answer " + question + " I need a "
    s += sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
    if s["tool"] == "calculator":
        s += "The expression is" + sgl.gen("expression")
    elif s["tool"] == "search engine":
        s += "The key word is" + sgl.gen("word")


@sgl.function
def sample_in_parallel(s, question, n):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    forks = s.fork(n)
    forks += "Reasoning:" + sgl.gen("reasoning", stop="\n") + "\n"
    forks += "Tool:" + sgl.gen("tool", choices=["calculator", "browser"]) + "\n"
    forks.join()


@sgl.function
def suggest_tips(s):  # type: ignore[no-untyped-def]
    s += "Two tips: 1. Eat well. 2. Move.\n"
    forks = s.fork(2)
    for i, f in enumerate(forks):
        f += f"Tip {i + 1} in full:\n"
        f += sgl.gen("tip", max_tokens=64, stop="\n\n")
    s += "Tip 1:" + forks[0]["tip"] + "\n"
    s += "Tip 2:" + forks[1]["tip"] + "\n"
    s += "In summary" + sgl.gen("summary")


@sgl.function
def ask_an_expert(s, question):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    s += "One to ask is" + sgl.gen("expert", stop=[".", "\n"]) + ".\n"
    s += "For example," + s["expert"] + " would say" + sgl.gen("answer", stop=".") + "."


@sgl.function
def react(s, question):  # type: ignore[no-untyped-def]
    s += "Question: " + question + "\n"
    for i in range(1, 5):
        s += f"Thought {i}:" + sgl.gen(stop=[".", "\n"]) + ".\n"
        s += f"Action {i}: " + sgl.select(f"action_{i}", ["Search", "Finish"])
        if s[f"action_{i}"] == "Search":
            s += " [" + sgl.gen(stop="]") + "].\n"
        else:
            s += " [" + sgl.gen("answer", stop="]") + "].\n"
            break


@sgl.function
def read_statements(s, statements, question):  # type: ignore[no-untyped-def]
    s += "Please memorize these.\n"
    forks = s.fork(len(statements))
    forks += lambda i: f"Statement {i}: " + statements[i] + "\n"
    forks.join(mode="concate_and_append")
    s += question + sgl.gen("answer")


@sgl.function
def describe_city(s):  # type: ignore[no-untyped-def]
    with s.var_scope("city"):
        s += "{\n"
        s += '  "name": ' + sgl.gen_string() + ",\n"
        s += '  "people": ' + sgl.gen_int() + ",\n"
        s += '  "area": ' + sgl.gen(dtype=int) + ",\n"
        s += '  "latitude": ' + sgl.gen(dtype="float") + "\n"
        s += "}"


CHARACTER = (
    r"\{\n"
    r'  "name": "[\w\s]{1,16}",\n'
    r'  "house": "(Elm|Oak)",\n'
    r'  "age": [0-9]{1,2}\n'
    r"\}"
)


@sgl.function
def make_character(s, name):  # type: ignore[no-untyped-def]
    s += name + " is a character. As JSON:\n"
    s += sgl.gen("json_output", max_tokens=256, regex=CHARACTER)


@sgl.function
def expand(s, tip):  # type: ignore[no-untyped-def]
    s += "Expand " + tip + ":" + sgl.gen("detail")


@sgl.function
def expand_two(s):  # type: ignore[no-untyped-def]
    s += "1." + sgl.gen("tip_1") + "\n2." + sgl.gen("tip_2") + "\n"
    one = expand(tip=s["tip_1"])
    two = expand(tip=s["tip_2"])
    s += one["detail"] + two["detail"]


def branch_of(call: ScriptedCall) -> int:
    return int(call.address.split("[")[1].split("]")[0])


def test_few_shot_answers_one_question_and_many(scripted: MakeBackend) -> None:
    answers = {"Japan": " Tokyo", "France": " Paris"}
    scripted(
        lambda call: next(a for q, a in answers.items() if q in call.prompt.splitlines()[2]) + "\nQ"
    )
    assert few_shot.run(question="Japan?")["answer"] == " Tokyo"
    states = few_shot.run_batch(
        [{"question": "France?"}, {"question": "Japan?"}], temperature=0.1, progress_bar=False
    )
    assert [s["answer"] for s in states] == [" Paris", " Tokyo"]
    assert states[0].text().endswith("Q: France?\nA: Paris")


def test_chat_of_two_turns_tells_its_messages(scripted: MakeBackend) -> None:
    scripted({"answer_1": "One.", "answer_2": "Two."})
    state = chat.run(first="A?", second="B?", temperature=0.7, max_new_tokens=64)
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "B?"},
        {"role": "assistant", "content": "Two."},
    ]


def test_a_tool_is_called_with_what_was_generated(scripted: MakeBackend) -> None:
    scripted({"expression": "257*983) and so on"})
    state = use_tool(lhs=257, rhs=983, temperature=0)
    assert int(state["answer"]) == 257 * 983
    assert state.text().endswith("calculate(257*983) = 252631")


@pytest.mark.parametrize(
    ("tool", "wrote", "other"),
    [("calculator", "expression", "word"), ("search engine", "word", "expression")],
)
def test_the_program_follows_what_was_selected(
    scripted: MakeBackend, tool: str, wrote: str, other: str
) -> None:
    scripted({"tool": tool, wrote: " value"})
    state = choose_tool.run("this")
    assert state["tool"] == tool
    assert state[wrote] == " value"
    assert wrote in state
    assert other not in state


def test_a_join_gathers_one_value_for_each_branch(scripted: MakeBackend) -> None:
    scripted(
        lambda call: (
            ["calculator", "browser"][branch_of(call) % 2]
            if call.name == "tool"
            else f" because {branch_of(call)}\n"
        )
    )
    state = sample_in_parallel.run(question="Compute.", n=3, temperature=1.0)
    assert state["reasoning"] == [" because 0", " because 1", " because 2"]
    assert state["tool"] == ["calculator", "browser", "calculator"]


def test_branches_are_read_without_a_join(scripted: MakeBackend) -> None:
    backend = scripted(
        lambda call: " all" if call.name == "summary" else f"long {branch_of(call)}\n\nmore"
    )
    state = suggest_tips.run()
    assert state.text() == (
        "Two tips: 1. Eat well. 2. Move.\nTip 1:long 0\nTip 2:long 1\nIn summary all"
    )
    assert backend.num_runs == 1


def test_an_expert_is_named_and_then_asked(scripted: MakeBackend) -> None:
    scripted({"expert": " Ann. She", "answer": " yes. No"})
    state = ask_an_expert.run(question="Really?")
    assert state.text().endswith("One to ask is Ann.\nFor example, Ann would say yes.")


def test_react_goes_round_until_it_finishes(scripted: MakeBackend) -> None:
    names = iter(["Search", "Finish"])
    scripted(
        lambda call: (
            next(names)
            if call.name.startswith("action")
            else ("Finland]" if call.name == "answer" else " thinking]. ")
        )
    )
    state = react.run(question="Where?")
    assert state["answer"] == "Finland"
    assert "action_2" in state
    assert "action_3" not in state


def test_branches_are_appended_in_their_order(scripted: MakeBackend) -> None:
    scripted({"answer": "Noah"})
    state = read_statements.run(["a", "b", "c"], "Who?")
    assert state.text() == (
        "Please memorize these.\nStatement 0: a\nStatement 1: b\nStatement 2: c\nWho?Noah"
    )


def test_values_of_a_dtype_are_text_that_parses(scripted: MakeBackend) -> None:
    replies = iter(['"Paris"', "2000000\n", "105 ", "48.85"])
    scripted(lambda call: next(replies))
    city = describe_city.run(max_new_tokens=64)["city"]
    assert json.loads(city) == {
        "name": "Paris",
        "people": 2000000,
        "area": 105,
        "latitude": 48.85,
    }


def test_a_regex_shapes_the_whole_value(scripted: MakeBackend) -> None:
    text = '{\n  "name": "Rowan",\n  "house": "Oak",\n  "age": 17\n}'
    scripted({"json_output": text})
    state = make_character.run(name="Rowan")
    assert re.fullmatch(CHARACTER, state["json_output"])
    assert json.loads(state["json_output"])["house"] == "Oak"


def test_a_program_calls_another(scripted: MakeBackend) -> None:
    scripted(
        {"tip_1": "walk", "tip_2": "rest", "detail": lambda call: call.prompt.split()[1] + "!"}
    )
    state = expand_two.run()
    assert state.text() == "1.walk\n2.rest\nwalk:!rest:!"


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("name", [None, "answer_2"])
def test_a_stream_concatenates_to_the_value(
    scripted: MakeBackend, how: str, name: str | None
) -> None:
    tokens = ("Two", " towers", ".")
    scripted({"answer_1": "One.", "answer_2": Reply(tokens=tokens, token_latency=0.001)})

    def start() -> Any:
        return chat.run(first="A?", second="B?", stream=True)

    async def follow(state: Any) -> list[str]:
        return [chunk async for chunk in state.text_async_iter(name)]

    if how == "sync":
        state = start()
        chunks = list(state.text_iter(name))
    else:
        state = start()
        chunks = asyncio.run(follow(state))
    assert "".join(chunks) == (state.text() if name is None else state[name])
    if name is not None:
        assert chunks == list(tokens)


def test_a_bound_program_is_run_and_traced(scripted: MakeBackend) -> None:
    scripted({"answer": "4"})
    asks_one = few_shot.bind(question="one?")
    assert asks_one.run()["answer"] == "4"
    asks_one.cache()
    literals = [node.op for node in asks_one.trace().nodes]
    assert [type(op).__name__ for op in literals] == ["Text", "Text", "Text", "Gen"]


def test_several_samples_go_on_with_the_first(scripted: MakeBackend) -> None:
    @sgl.function
    def program(s):  # type: ignore[no-untyped-def]
        s += sgl.user("?")
        s += sgl.assistant(sgl.gen("a", n=2))
        s += sgl.user("and?")
        s += sgl.assistant("x" + sgl.gen("b", n=2) + "y")

    scripted({"a": ["one", "two"], "b": ["three", "four"]})
    state = program.run()
    assert state["a"] == ["one", "two"]
    assert state["b"] == ["three", "four"]
    assert [m["content"] for m in state.messages()] == ["?", "one", "and?", "xthreey"]
