"""Programs in SGLang's style, none of which knows umbel: on a script, and on a real engine.

What is asserted holds for any model, so each runs on both: the scripted backend answers names, and
the engine's model is a hash of its tokens. On the engine, the same programs also run over HTTP,
through `RuntimeEndpoint` and `OpenAI`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=True

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.hash_server import MODEL, HashServer, hash_server

import umbel as ub
import umbel.interpreter.compat.sglang as sgl
from umbel.interpreter.backends.openai_features import UMBEL_SERVER
from umbel.interpreter.backends.scripted import ScriptedBackend


@pytest.fixture(scope="module")
def server() -> Iterator[HashServer]:
    with hash_server() as server:
        yield server


@pytest.fixture(params=["scripted", "engine"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "scripted":
        made: Any = ScriptedBackend()
    else:
        made = request.getfixturevalue("server").local
    sgl.set_default_backend(made)
    yield made
    ub.set_default_backend(None)
    if request.param == "scripted":
        made.close()


def is_engine(backend: Any) -> bool:
    return bool(backend.name == "local")


# 1. run and run_batch: rows as mappings and as sequences, options of the run


@sgl.function
def answer_briefly(s, question, style="short"):
    s += "Q: 1 + 1?\nA: 2\n"
    s += "Q: " + question + " (" + style + ")\n"
    s += "A:" + sgl.gen("answer", max_tokens=8, stop=["\n", "Q:"])


def test_a_batch_answers_what_single_runs_answer(backend: Any) -> None:
    questions = ["2 + 2?", "3 + 4?", "5 - 1?"]
    alone = [answer_briefly.run(question=q, temperature=0)["answer"] for q in questions]
    rows = [{"question": q} for q in questions]
    states = answer_briefly.run_batch(rows, temperature=0, num_threads=2, progress_bar=False)
    assert [s["answer"] for s in states] == alone
    pairs = [(q, "short") for q in questions]
    lazily = answer_briefly.run_batch(pairs, temperature=0, generator_style=True)
    assert [s["answer"] for s in lazily] == alone
    assert not any("\n" in answer or "Q:" in answer for answer in alone)
    assert rows == [{"question": q} for q in questions]


# 2. turns: as functions, as begin and end, as blocks


@sgl.function
def interview(s, first, second, third):
    s += sgl.system("You are brief.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("one", max_tokens=6))
    s += sgl.user_begin() + second + sgl.user_end()
    s += sgl.assistant_begin()
    s += sgl.gen("two", max_tokens=6)
    s += sgl.assistant_end()
    with s.user():
        s += third
    with s.assistant():
        s += "Well, " + sgl.gen("three", max_tokens=6)


def test_turns_are_told_however_they_were_written(backend: Any) -> None:
    state = interview.run("a?", "b?", "c?", temperature=0.5)
    assert state.messages() == [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": state["one"]},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": state["two"]},
        {"role": "user", "content": "c?"},
        {"role": "assistant", "content": "Well, " + state["three"]},
    ]


# 3. Python between gens, var_scope, variables of the program's own


@sgl.function
def sum_up(s, numbers):
    s["total"] = 0
    for i, number in enumerate(numbers):
        s += f"{number} is " + sgl.gen(f"word_{i}", choices=["small", "big"]) + ".\n"
        if s[f"word_{i}"] == "big":
            s["total"] += number
    with s.var_scope("conclusion"):
        s += "Together the big ones are " + str(s["total"]) + sgl.gen("end", max_tokens=4)
    s.set_var("count", len(numbers))
    return s["total"]


def test_python_goes_on_with_what_was_generated(backend: Any) -> None:
    state = sum_up.run([5, 70, 900])
    words = [state.get_var(f"word_{i}") for i in range(3)]
    total = sum(n for n, word in zip([5, 70, 900], words, strict=True) if word == "big")
    assert (state.ret_value, state["total"], state["count"]) == (total, total, 3)
    assert state["conclusion"] == f"Together the big ones are {total}" + state["end"]
    assert state.text().endswith(state["conclusion"])
    assert "word_1" in state
    assert "word_3" not in state


# 4. the three ways to choose, by select and by gen


@sgl.function
def choose(s, choices, method):
    s += "The best fruit is " + sgl.select("pick", choices, choices_method=method)
    s += " and then " + sgl.gen("again", choices=choices, choices_method=method)


@pytest.mark.parametrize(
    "method",
    [
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ],
)
def test_what_was_chosen_is_what_the_method_says_of_the_table(backend: Any, method) -> None:
    choices = ["apple", "fig", "a long banana"]
    state = choose.run(choices, method)
    for name in ("pick", "again"):
        assert state[name] in choices
        info = state.get_meta_info(name)
        if not is_engine(backend):
            continue  # a script without scores has no table to decide by
        decision = method(
            choices=choices,
            normalized_prompt_logprobs=info["normalized_prompt_logprobs"],
            input_token_logprobs=info["input_token_logprobs"],
            output_token_logprobs=info["output_token_logprobs"],
            unconditional_token_logprobs=info.get("unconditional_token_logprobs"),
        )
        assert decision.decision == state[name]


# 5. fork, position offsets, join that gathers


@sgl.function
def opinions(s, topic, n):
    s += "About " + topic + ".\n"
    forks = s.fork(n, position_ids_offset=[64] * n)
    forks += lambda i: f"Person {i} says:"
    forks += sgl.gen("opinion", max_tokens=5, stop="\n")
    forks += sgl.gen("mood", choices=["glad", "sad"])
    forks[0]["first"] = True
    forks.join()
    s += "The moods were " + ", ".join(s["mood"]) + "."


def test_branches_are_gathered_in_their_order(backend: Any) -> None:
    state = opinions.run("rain", 3)
    assert len(state["opinion"]) == len(state["mood"]) == 3
    assert state["first"] == [True, ub.MISSING, ub.MISSING]
    assert set(state["mood"]) <= {"glad", "sad"}
    assert state.text() == f"About rain.\nThe moods were {', '.join(state['mood'])}."


# 6. join that appends, copy


@sgl.function
def side_by_side(s, parts):
    s += "Parts: "
    forks = s.fork(len(parts))
    for fork, part in zip(forks, parts, strict=True):
        fork += part + "=" + sgl.gen("value", max_tokens=3) + ";"
    forks.join(mode="concate_and_append")
    with s.copy() as aside:
        aside += "never mind" + sgl.gen("thought", max_tokens=3)
    s += "Done" + sgl.gen("end", max_tokens=3)
    return [fork["value"] for fork in forks]


def test_branches_are_appended_in_their_order(backend: Any) -> None:
    state = side_by_side.run(["a", "b", "c"], temperature=0)
    a, b, c = state.ret_value
    assert state.text() == f"Parts: a={a};b={b};c={c};Done{state['end']}"
    assert len(state["thought"]) == 1
    assert "never mind" not in state.text()


# 7. values of a form: dtype, gen_int, gen_string, regex, json_schema


@sgl.function
def fill_in(s):
    s += "age: " + sgl.gen_int("age", max_tokens=32) + "\n"
    s += "height: " + sgl.gen("height", dtype=float, max_tokens=64) + "\n"
    s += "adult: " + sgl.gen("adult", dtype="bool", max_tokens=16) + "\n"
    s += "code: " + sgl.gen("code", regex=r"[A-F]{2}-[0-9]{3}", max_tokens=32) + "\n"
    s += "data: " + sgl.gen(
        "data",
        max_tokens=64,
        json_schema=json.dumps(
            {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
                "required": ["ok", "n"],
                "additionalProperties": False,
            }
        ),
    )


def test_values_of_a_form_are_text_that_parses(backend: Any) -> None:
    state = fill_in.run(temperature=1.0)
    int(state["age"])
    float(state["height"])
    assert state["adult"] in ("True", "False")
    assert re.fullmatch(r"[A-F]{2}-[0-9]{3}", state["code"])
    assert set(json.loads(state["data"])) == {"ok", "n"}


@sgl.function
def quote(s):
    s += 'She said "no". He said ' + sgl.gen_string("said", max_tokens=200, temperature=0)


def test_a_string_is_whole_or_says_that_it_was_cut(backend: Any) -> None:
    state = quote.run()
    state.sync()
    if state.get_meta_info("said")["finish_reason"]["type"] == "length":
        assert is_engine(backend)  # a hash of tokens seldom thinks of the closing quote
        with pytest.raises(ub.TruncatedError) as cut:
            state["said"]
        assert cut.value.partial.startswith('"')
    else:
        assert isinstance(json.loads(state["said"]), str)


# 8. streams, sync and async, whole and by variable, with metadata


@sgl.function
def tell(s, name):
    s += sgl.user("Tell of " + name)
    s += sgl.assistant(sgl.gen("story", max_tokens=12) + " " + sgl.gen("moral", max_tokens=6))


def test_chunks_are_the_value(backend: Any) -> None:
    for name in (None, "story", "moral"):
        state = tell.run("Ida", stream=True, temperature=0.8)
        whole = "".join(state.text_iter(name))
        assert whole == (state.text() if name is None else state[name])


def test_chunks_are_the_value_on_a_loop(backend: Any) -> None:
    async def follow(name: str | None) -> tuple[str, Any]:
        state = tell.run("Ida", stream=True)
        return "".join([chunk async for chunk in state.text_async_iter(name)]), state

    async def follow_meta() -> tuple[str, Any, Any]:
        state = tell.run("Ida", stream=True, return_logprob=True)
        pairs = [pair async for pair in state.text_async_iter("story", return_meta_data=True)]
        return "".join(chunk for chunk, _ in pairs), pairs[-1][1], state

    for name in (None, "story", "moral"):
        whole, state = asyncio.run(follow(name))
        assert whole == (state.text() if name is None else state[name])
    whole, info, state = asyncio.run(follow_meta())
    assert whole == state["story"]
    assert info == state.get_meta_info("story")
    assert len(info["output_token_logprobs"]) == info["completion_tokens"]


# 9. bind, trace, cache, and the options of a decorator


@sgl.function(num_api_spec_tokens=16)
def letter(s, to, subject, tone="kind"):
    s += f"Write to {to} about {subject}, {tone}.\n"
    s += sgl.gen("letter", max_tokens=8)


def test_a_bound_program_is_traced_cached_and_run(backend: Any) -> None:
    to_ann = letter.bind(to="Ann", tone="cold")
    to_ann.cache()
    graph = to_ann.trace(subject="tea")
    texts = [part for node in graph.nodes for part in getattr(node.op, "parts", ())]
    assert texts == ["Write to Ann about tea, cold.\n"]
    state = to_ann.run(subject="tea")
    assert state.text() == texts[0] + state["letter"]
    assert to_ann.run(subject="tea", to="Ben").text().startswith("Write to Ben")
    assert letter.bind_arguments == {}


# 10. programs that call programs


@sgl.function
def rate(s, text):
    s += text + " is " + sgl.gen("rating", choices=["good", "bad"])


@sgl.function
def improve(s, drafts):
    ratings = [rate(text=draft) for draft in drafts]  # all run at once
    for draft, rated in zip(drafts, ratings, strict=True):
        s += f"{draft}: {rated['rating']}\n"
    s += "The best is " + sgl.gen("best", choices=drafts)


def test_a_program_uses_another(backend: Any) -> None:
    drafts = ["one", "two", "three"]
    state = improve.run(drafts=drafts)
    assert state["best"] in drafts
    rated = [line.split(": ")[1] for line in state.text().splitlines()[:3]]
    assert set(rated) <= {"good", "bad"}


# 11. several samples, log-probabilities and their texts


@sgl.function
def spell(s):
    s += "Spell it:" + sgl.gen(
        "word",
        max_tokens=16,
        regex="[a-z]{5}",
        return_logprob=True,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    s += "." + sgl.gen("many", n=3, max_tokens=4) + "!"


def test_log_probabilities_come_with_the_texts_of_their_tokens(backend: Any) -> None:
    state = spell.run()
    info = state.get_meta_info("word")
    tokens = info["output_token_logprobs"]
    assert "".join(text or "" for _, _, text in tokens) == state["word"]
    assert all(logprob <= 0 and isinstance(i, int) for logprob, i, _ in tokens)
    if is_engine(backend):
        for (logprob, i, text), top in zip(tokens, info["output_top_logprobs"], strict=True):
            assert len(top) == 2
            assert all(t == text and lp == logprob for lp, other, t in top if other == i)
    assert len(state["many"]) == len(state.get_meta_info("many")) == 3
    assert state.text() == f"Spell it:{state['word']}.{state['many'][0]}!"


# 12. the default backend, its information, its cache


def test_the_cache_is_flushed_where_there_is_one(backend: Any) -> None:
    info = sgl.get_server_info()
    assert info is not None
    assert info["backend"] == backend.name
    assert sgl.global_config.default_backend is backend
    text = "the same words for everybody, which are cached when they come again"

    def cached(state) -> int:
        state.sync()
        return int(state.get_meta_info("answer")["cached_tokens"])

    answer_briefly.run(question=text).sync()
    again = cached(answer_briefly.run(question=text))
    if not is_engine(backend):
        with pytest.raises(ub.UnsupportedFeatureError, match="prefix_cache=False"):
            sgl.flush_cache()
        return
    assert again > len(text) // 2
    assert sgl.flush_cache(backend) is True
    assert cached(answer_briefly.run(question=text)) == 0


# 13. what fails says so, and the rest goes on


@sgl.function
def stumble(s, pattern):
    s += "a" + sgl.gen("good", max_tokens=2)
    s += sgl.gen("bad", regex=pattern)
    s += sgl.gen("after", max_tokens=2)


def test_what_cannot_be_done_is_told_on_its_line_and_by_the_state(backend: Any) -> None:
    with pytest.raises(ub.ConstraintError, match="look-ahead"):
        stumble.run(pattern="(?=a)")
    if is_engine(backend):
        cut = sgl.function(lambda s: s.__iadd__(sgl.gen("x", regex="a{50}", max_tokens=3))).run()
        with pytest.raises(ub.TruncatedError):
            cut["x"]


@sgl.function
def look_inside(s):
    s += "a"
    return s.stream_executor.get_var("a")


@sgl.function
def see(s, path):
    s += sgl.user(sgl.image(path) + "What is this?")


def test_what_is_not_there_is_refused_by_name(backend: Any) -> None:
    with pytest.raises(ub.ProgramError, match=r"stream_executor.*get_var"):
        look_inside.run()
    with pytest.raises(ub.ProgramError, match="not supported"):
        see.run("cat.png")


# 14. the same programs on a server, and through OpenAI's routes


def test_a_server_gives_what_the_engine_gives(server: HashServer) -> None:
    remote = sgl.RuntimeEndpoint(server.url)
    try:
        asked: list[tuple[sgl.SglFunction, dict[str, Any]]] = [
            (answer_briefly, {"question": "2 + 2?"}),
            (interview, {"first": "a?", "second": "b?", "third": "c?"}),
            (side_by_side, {"parts": ["a", "b"]}),
            (sum_up, {"numbers": [5, 70]}),
        ]
        for program, arguments in asked:
            here = program.run(**arguments, temperature=0, backend=server.local)
            there = program.run(**arguments, temperature=0, backend=remote)
            assert there.text() == here.text()
            assert there.names() == here.names()
        assert "steps" in remote.get_server_info()
        with pytest.raises(ub.UnsupportedFeatureError, match="process of the engine"):
            remote.flush_cache()
    finally:
        remote.shutdown()


def test_openai_routes_run_the_programs_that_they_can(server: HashServer) -> None:
    chat = sgl.OpenAI(MODEL, base_url=server.openai_url, api_key="EMPTY", features=UMBEL_SERVER)
    plain = sgl.OpenAI(MODEL, False, base_url=server.openai_url, features=UMBEL_SERVER)
    try:
        state = tell.run("Ida", backend=chat, temperature=0)
        here = tell.run("Ida", backend=server.local, temperature=0)
        assert state["story"] == here["story"]
        assert chat.token_usage.prompt_tokens > 0
        assert chat.token_usage.completion_tokens > 0
        chat.token_usage.reset()
        assert chat.token_usage.completion_tokens == 0
        here = answer_briefly.run("2 + 2?", backend=server.local, temperature=0)
        assert (
            answer_briefly.run("2 + 2?", backend=plain, temperature=0)["answer"] == here["answer"]
        )
        states = answer_briefly.run_batch([{"question": "a"}] * 3, backend=plain, temperature=0)
        assert len({s["answer"] for s in states}) == 1
        with pytest.raises(ub.UnsupportedFeatureError, match="regex"):
            fill_in.run(backend=plain).text()
        state = tell.run("Ida", backend=chat, stream=True)
        assert "".join(state.text_iter("story")) == state["story"]
    finally:
        chat.close()
        plain.close()
