"""OpenAI's routes, asked by the official client over real HTTP, against the engine itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.support.engine_harness import TOKENIZER, make_runner
from tests.support.fake_engine import FakeEngine
from tests.support.graphs import GraphBuilder
from tests.support.hash_server import MAX_SEQ_LEN, MODEL, HashServer, hash_server
from tests.support.recorder import Recorder

from umbel.interpreter.backends.openai import OpenAIBackend
from umbel.interpreter.backends.openai_features import EndpointFeatures
from umbel.lang.ir import Gen, RoleEnd, RoleStart, Select, Text
from umbel.lang.results import NodeResult, RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.server import BackgroundServer, create_app

MESSAGES: list[Any] = [
    {"role": "system", "content": "abc"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]


@pytest.fixture(scope="module")
def server() -> Iterator[HashServer]:
    with hash_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: HashServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=server.openai_url, max_retries=0) as client:
        yield client


def direct(server: HashServer, build: GraphBuilder, gen: Gen, at: int) -> NodeResult:
    recorder = Recorder()
    node = build.add(gen, at)
    session = server.local.open(RunOptions(), recorder)
    session.extend(build.piece())
    session.close()
    recorder.wait(node)
    return recorder.results[node]


def greedy(max_tokens: int, **options: Any) -> Gen:
    return Gen("", SamplingParams(max_tokens=max_tokens, **options))


def chat_graph() -> tuple[GraphBuilder, int]:
    build = GraphBuilder()
    at: int | None = None
    for role, text in (("system", "abc"), ("user", "ab")):
        at = build.add(RoleStart(role), at)
        at = build.add(RoleEnd(role), build.add(Text((text,)), at))
    return build, build.add(RoleStart("assistant"), at)


def test_a_chat_gives_what_its_graph_gives(server: HashServer, client: openai.OpenAI) -> None:
    build, at = chat_graph()
    result = direct(server, build, greedy(9), at)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=9, temperature=0
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content == result.text
    assert choice.finish_reason == result.samples[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == result.usage.prompt_tokens
    assert answer.usage.completion_tokens == result.usage.completion_tokens
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_last_assistant_message_is_continued(
    server: HashServer, client: openai.OpenAI, stream: bool
) -> None:
    build, at = chat_graph()
    result = direct(server, build, greedy(9), build.text("bca", at))
    messages = [*MESSAGES, {"role": "assistant", "content": "bca"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    arguments: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "extra_body": extra}
    if stream:
        chunks = client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, **arguments
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
    else:
        answer = client.chat.completions.create(model=MODEL, messages=messages, **arguments)
        text = answer.choices[0].message.content or ""
    assert text == result.text


def test_completions_answer_each_prompt_with_its_samples(
    server: HashServer, client: openai.OpenAI
) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "seed": 3, "n": 2}
    answer = client.completions.create(prompt=["abc", "xy"], echo=True, **arguments)
    again = client.completions.create(prompt=["abc", "xy"], echo=True, **arguments)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [text[:2] for text in texts] == ["ab", "ab", "xy", "xy"]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 4
    assert answer.usage is not None
    # a prompt counts once, not once for each of its samples
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode_text("abc")) + len(
        TOKENIZER.encode_text("xy")
    )


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_its_log_probabilities(
    client: openai.OpenAI, max_tokens: int, stream: bool
) -> None:
    prompts = ["abc xyé", "0"]
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": max_tokens, "seed": 3, "n": 2}
    arguments |= {"prompt": prompts, "echo": True, "logprobs": 2}
    texts = [""] * 4
    ends: dict[int, Any] = {}
    if stream:
        for chunk in client.completions.create(stream=True, **arguments):
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                ends[choice.index] = choice.logprobs
    else:
        answer = client.completions.create(**arguments)
        texts = [choice.text for choice in answer.choices]
        ends = {choice.index: choice.logprobs for choice in answer.choices}
        assert answer.usage is not None
        assert bool(answer.usage.completion_tokens) == bool(max_tokens)
    for i, text in enumerate(texts):
        assert_echoed(prompts[i // 2], text, ends[i], max_tokens)


def assert_echoed(prompt: str, text: str, found: Any, max_tokens: int) -> None:
    ids = TOKENIZER.encode_text(prompt)
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    for i in range(1, len(ids)):
        logits = make_runner().logits_of(ids[:i]).astype(np.float64)
        wanted = logits[ids[i]] - np.log(np.exp(logits).sum())
        assert found.token_logprobs[i] == pytest.approx(wanted, abs=1e-5)
        assert 1 <= len(found.top_logprobs[i]) <= 2
    num_made = len(found.tokens) - len(ids)
    assert num_made == 0 if max_tokens == 0 else 1 <= num_made <= max_tokens
    assert len(found.text_offset) == len(found.top_logprobs) == len(found.tokens)
    assert text.startswith(prompt)
    assert (text == prompt) == (max_tokens == 0)
    if "\ufffd" not in "".join(found.tokens):  # a token may end inside a character
        assert "".join(found.tokens) == text
        offsets = [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
        assert found.text_offset == offsets


def test_choices_are_scored_by_the_echoes_of_this_server(server: HashServer) -> None:
    """What its own backend asks of an endpoint for a select."""
    features = EndpointFeatures(select_by="echo", json_schema=False)
    select = Select("s", ("ab", "xy", "0123"), method="sum")
    builder = GraphBuilder()
    node = builder.add(select, builder.add(Text(("5",)), None))
    graph = builder.piece()
    backend = OpenAIBackend(
        MODEL, base_url=server.openai_url, endpoint="completions", features=features
    )
    tables = []
    with backend:
        for one in (backend, server.local):
            recorder = Recorder()
            session = one.open(RunOptions(), recorder)
            session.extend(graph)
            session.close()
            recorder.wait(node)
            tables.append(recorder.results[node])
    assert tables[0].text == tables[1].text
    for echoed, own in zip(tables[0].scores, tables[1].scores, strict=True):
        assert echoed.token_logprobs == pytest.approx(own.token_logprobs, abs=1e-5)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, endpoint: str) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "seed": 5, "n": 3}
    options: Any = {"include_usage": True}
    texts = {0: "", 1: "", 2: ""}
    reasons = {}
    usage: Any = None
    if endpoint == "chat":
        arguments["messages"] = MESSAGES
        whole: Any = client.chat.completions.create(**arguments)
        expected = [c.message.content for c in whole.choices]
        stream: Any = client.chat.completions.create(
            stream=True, stream_options=options, **arguments
        )
    else:
        arguments |= {"prompt": "abc", "echo": True}
        whole = client.completions.create(**arguments)
        expected = [c.text for c in whole.choices]
        stream = client.completions.create(stream=True, stream_options=options, **arguments)
    for chunk in stream:
        assert usage is None
        usage = chunk.usage
        for choice in chunk.choices:
            assert choice.index not in reasons, "a chunk after the end"
            texts[choice.index] += (
                (choice.delta.content or "") if endpoint == "chat" else choice.text
            )
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert list(texts.values()) == expected
    assert [reasons[c.index] for c in whole.choices] == [c.finish_reason for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_stop_ends_the_text_before_it(server: HashServer, client: openai.OpenAI) -> None:
    build = GraphBuilder()
    free = direct(server, build, greedy(12, ignore_eos=True), build.text("abc")).text
    stop = free[3:5]
    assert len(stop) == 2
    answer = client.completions.create(
        model=MODEL,
        prompt="abc",
        max_tokens=12,
        temperature=0,
        stop=[stop, "never there"],
        extra_body={"ignore_eos": True},
    )
    choice = answer.choices[0]
    assert choice.text == free[: free.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_dump()["stop_reason"] == stop


def test_logprobs_name_the_tokens_that_make_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    spelled = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert spelled.decode("utf-8", "replace").startswith(answer.choices[0].message.content or "")
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob  # greedy takes the likeliest
    completion = client.completions.create(
        model=MODEL, prompt="abc", max_tokens=4, temperature=0, logprobs=2
    )
    written = completion.choices[0].logprobs
    assert written is not None
    assert written.tokens is not None
    assert written.text_offset == [
        sum(map(len, written.tokens[:i])) for i in range(len(written.tokens))
    ]
    assert written.token_logprobs == [max(top.values()) for top in written.top_logprobs or ()]


def test_a_schema_holds(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["ab", "xy"]}, "ok": {"type": "boolean"}},
        "required": ["kind", "ok"],
        "additionalProperties": False,
    }
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "kind", "schema": schema, "strict": True},
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=200, seed=1, response_format=form
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value["kind"] in ("ab", "xy")
    assert isinstance(value["ok"], bool)
    assert answer.choices[0].finish_reason == "stop"


def test_the_model_is_listed_and_described(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "umbel"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


@pytest.mark.parametrize(
    ("path", "change", "status", "code", "words"),
    [
        ("chat/completions", {"model": "other"}, 404, "model_not_found", "'hash'"),
        ("chat/completions", {"messages": []}, 400, None, "messages is empty"),
        ("chat/completions", {"messages": "x"}, 400, None, "messages"),
        ("chat/completions", {"invented": 1}, 400, None, "invented"),
        ("chat/completions", {"tools": [{"type": "function"}]}, 400, None, "tools"),
        ("chat/completions", {"temperature": -1}, 400, None, "temperature"),
        ("chat/completions", {"n": 0}, 400, None, "n must be"),
        ("chat/completions", {"top_logprobs": 2}, 400, None, "logprobs=true"),
        ("chat/completions", {"continue_final_message": True}, 400, None, "assistant"),
        ("completions", {"prompt": [1, 2]}, 400, None, "prompt"),
        ("completions", {"prompt": []}, 400, None, "empty"),
        ("completions", {"suffix": "x"}, 400, None, "suffix"),
        ("completions", {"best_of": 4}, 400, None, "best_of"),
        ("completions", {"max_tokens": 0}, 400, None, "max_tokens"),
        (
            "completions",
            {"prompt": "0" * MAX_SEQ_LEN},
            422,
            "context_length_exceeded",
            "max_seq_len",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cant_be_done_is_refused_in_openais_form(
    server: HashServer,
    path: str,
    change: dict[str, Any],
    status: int,
    code: str | None,
    words: str,
    stream: bool,
) -> None:
    body: dict[str, Any] = {"model": MODEL, "stream": stream}
    body |= {"messages": MESSAGES} if path.startswith("chat") else {"prompt": "abc"}
    response = httpx.post(f"{server.openai_url}/{path}", json=body | change, trust_env=False)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert words in error["message"]


def test_a_stream_ends_with_done(server: HashServer) -> None:
    body = {"model": MODEL, "prompt": "abc", "stream": True, "max_tokens": 3}
    response = httpx.post(f"{server.openai_url}/completions", json=body, trust_env=False)
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"]


def test_a_failure_within_a_stream_is_its_last_event() -> None:
    body = {"model": MODEL, "prompt": "0123", "max_tokens": 50, "temperature": 0}
    body |= {"ignore_eos": True, "logit_bias": {"100": 50}}
    with hash_server(poison=lambda prefix: len(prefix) > 8) as server:
        url = f"{server.openai_url}/completions"
        whole = httpx.post(url, json=body, trust_env=False)
        stream = httpx.post(url, json=body | {"stream": True}, trust_env=False)
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "server_error"
    lines = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert stream.status_code == 200
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "d" * 5
    assert events[-1]["error"] == whole.json()["error"]
    assert "[DONE]" not in stream.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_run(stream: bool) -> None:
    engine = FakeEngine(held=[""])  # no sample's gen has a name
    body = {"model": MODEL, "prompt": "abc", "stream": stream}
    app = create_app(engine, model_name=MODEL, capabilities={})
    with BackgroundServer(app) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3, trust_env=False)
        assert engine.cancelled.wait(10)
    engine.close()
