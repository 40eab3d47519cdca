"""OpenAIBackend against an endpoint that misbehaves: every node ends, and says why."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import AsyncGeneratorType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fake_endpoint import (
    DONE,
    Answer,
    FakeEndpoint,
    Sent,
    chunk,
    failure,
    line,
    text,
    usage,
    whole,
)
from tests.support.graphs import GraphBuilder
from tests.support.recorder import Recorder
from tests.support.runs import start_run

import umbel as ub
from umbel.interpreter.backends.openai import MAX_HELPER_THREADS, OpenAIBackend
from umbel.interpreter.backends.openai_features import EndpointFeatures
from umbel.lang.ir import Branch, Gen, RoleEnd, RoleStart, Select, Text
from umbel.lang.results import NodeFailed, RunOptions, TextDelta, Usage
from umbel.lang.sampling_params import SamplingParams

KEY = "sk-secret-0123456789abcdef"


class Asked:
    """A backend on a fake endpoint."""

    def __init__(self, answer: Answer | Sequence[Sent], **options: Any) -> None:
        self.endpoint = FakeEndpoint(answer)
        defaults: dict[str, Any] = {"api_key": KEY, "backoff_s": 0.01, "timeout": 10.0}
        self.backend = OpenAIBackend("m", base_url=self.endpoint.url, **(defaults | options))

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        self.endpoint.close()

    def start(self, op: Gen | Select, **run_options: Any) -> tuple[Recorder, int, Any]:
        build = GraphBuilder()
        at: int | None = None
        if self.backend.endpoint == "completions":
            at = build.text("ctx")
        else:
            user = build.add(RoleStart("user"))
            at = build.add(RoleEnd("user"), build.add(Text(("hi",)), user))
            at = build.add(RoleStart("assistant"), at)
        node = build.add(op, at)
        recorder, session = start_run(self.backend, build, RunOptions(**run_options))
        session.close()
        return recorder, node, session

    def run(self, op: Gen | Select, **run_options: Any) -> tuple[Recorder, int]:
        recorder, node, _ = self.start(op, **run_options)
        recorder.wait(node)
        return recorder, node

    def error(self, op: Gen | Select, **run_options: Any) -> Exception:
        recorder, node = self.run(op, **run_options)
        return recorder.errors[node]


GEN = Gen("a")


def status_of(error: Exception) -> tuple[int, bool]:
    assert isinstance(error, ub.BackendStatusError)
    return error.status_code, error.retryable


# --- what is sent ---------------------------------------------------------------------------------


def test_a_gen_is_one_streamed_call_with_its_options() -> None:
    sampling = SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, stop=("x",), seed=3, logit_bias=((7, 1.5),)
    )
    with Asked([text("a", "b")]) as asked:
        asked.run(Gen("a", sampling, n=1))
        (body,) = asked.endpoint.requests
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "seed": 3,
        "logit_bias": {"7": 1.5},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_branches_are_answered_side_by_side_without_threads() -> None:
    num = 40
    build = GraphBuilder()
    user = build.add(RoleStart("user"))
    at = build.add(RoleEnd("user"), build.add(Text(("hi",)), user))
    gens = []
    for i in range(num):
        branch = build.add(Branch(i, num, "g"), at)
        gens.append(build.add(Gen(f"g{i}"), build.add(RoleStart("assistant"), branch)))

    def answer(_: dict[str, Any]) -> Sent:
        # long enough for all to be asked on a busy machine before the first is answered
        return Sent([chunk("a"), chunk(end="stop"), DONE], delay=3.0)

    with Asked(answer) as asked:
        threads = threading.active_count()
        recorder = Recorder()
        asked.backend.open(RunOptions(), recorder).extend(build.piece())
        recorder.wait(*gens)
        assert asked.endpoint.max_open == num
        assert threading.active_count() <= threads + MAX_HELPER_THREADS


# --- what comes back ------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), deltas=st.lists(st.text(max_size=4), max_size=4))
def test_a_stream_may_be_cut_anywhere(
    shared: tuple[Asked, list[Sent]], data: st.DataObject, deltas: list[str]
) -> None:
    asked, answers = shared
    deltas = [d.encode("utf-8", "ignore").decode() for d in deltas]
    body = b"".join([*map(chunk, deltas), chunk(end="stop"), usage(3, 2), DONE])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    answers.append(Sent([piece for piece in pieces if piece]))
    recorder, node = asked.run(GEN)
    result = recorder.results[node]
    assert result.text == "".join(deltas)
    assert recorder.text(node) == result.text
    assert result.usage == Usage(prompt_tokens=3, completion_tokens=2)


@pytest.fixture(scope="module")
def shared() -> Any:
    answers: list[Sent] = []
    with Asked(lambda _: answers.pop()) as asked:
        yield asked, answers


def test_a_stop_the_endpoint_went_past_ends_the_text_and_the_call() -> None:
    gen = Gen("a", SamplingParams(stop=("1", "2", "3", "4", "en"), max_tokens=100))
    with Asked([Sent([chunk("op"), chunk("e"), chunk("n and on")], stalls=True)]) as asked:
        recorder, node = asked.run(gen)
        assert asked.endpoint.requests[0]["stop"] == ["1", "2", "3", "4"]
        assert asked.endpoint.closed_early.wait(10)
    sample = recorder.results[node].samples[0]
    assert (sample.text, sample.finish_reason, sample.matched_stop) == ("op", "stop", "en")
    assert recorder.text(node) == "op"


def test_samples_come_back_in_order() -> None:
    pieces = [
        chunk("x", index=1),
        chunk("a"),
        chunk(index=1, end="length"),
        chunk("b"),
        chunk(end="stop"),
    ]
    with Asked([Sent([*pieces, DONE])]) as asked:
        recorder, node = asked.run(Gen("a", n=2))
        assert asked.endpoint.requests[0]["n"] == 2
    samples = recorder.results[node].samples
    assert [(s.text, s.finish_reason) for s in samples] == [("ab", "stop"), ("x", "length")]


@pytest.mark.parametrize("reason", ["content_filter", "tool_calls", "invented"])
def test_an_end_that_is_no_value_fails_the_node(reason: str) -> None:
    with Asked([text("a", end=reason)]) as asked:
        assert reason in str(asked.error(GEN))


def test_a_refusal_fails_the_node() -> None:
    refusal = line(
        {"choices": [{"index": 0, "delta": {"refusal": "I won't"}, "finish_reason": None}]}
    )
    with Asked([Sent([refusal, chunk(end="stop"), DONE])]) as asked:
        assert "I won't" in str(asked.error(GEN))


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_a_failure_that_may_pass_is_tried_again(status: int) -> None:
    with Asked([failure(status), failure(status), text("ok")]) as asked:
        recorder, node = asked.run(GEN)
        assert recorder.results[node].text == "ok"
        assert asked.backend.stats() == {"requests": 3, "retries": 2, "failures": 0}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_failure_that_stays_is_not_tried_again(status: int) -> None:
    with Asked([failure(status, "because", **{"x-request-id": "r1"})]) as asked:
        error = asked.error(GEN)
        assert status_of(error) == (status, False)
        assert "because" in str(error)
        assert isinstance(error, ub.BackendStatusError)
        assert error.request_id == "r1"
        assert asked.backend.stats() == {"requests": 1, "retries": 0, "failures": 1}


def test_an_empty_account_is_not_tried_again() -> None:
    with Asked([failure(429, code="insufficient_quota")]) as asked:
        assert status_of(asked.error(GEN)) == (429, False)


def test_retries_end() -> None:
    with Asked([failure(503)] * 3) as asked:
        assert status_of(asked.error(GEN)) == (503, True)
        assert len(asked.endpoint.requests) == 3


def test_an_endpoint_that_says_when_is_waited_for() -> None:
    with Asked([failure(429, **{"retry-after": "0.4"}), text("ok")]) as asked:
        start = time.monotonic()
        asked.run(GEN)
        assert time.monotonic() - start >= 0.4


def test_a_stream_that_breaks_before_its_text_is_tried_again() -> None:
    with Asked([Sent(drops=True), Sent([b": hello\n\n"]), text("ok")]) as asked:
        recorder, node = asked.run(GEN)
        assert recorder.results[node].text == "ok"


@pytest.mark.parametrize("sent", [Sent([chunk("a")], drops=True), Sent([chunk("a")])])
def test_a_stream_that_breaks_within_its_text_is_not_told_twice(sent: Sent) -> None:
    with Asked([sent, text("ok")]) as asked:
        recorder, node = asked.run(GEN)
        error = recorder.errors[node]
        assert isinstance(error, ub.BackendConnectionError)
        assert error.retryable
        assert recorder.text(node) == "a"
        assert len(asked.endpoint.requests) == 1


@pytest.mark.parametrize(
    "piece",
    [
        b"data: {broken\n\n",
        line({"choices": 5}),
        line({"choices": [{"index": 9, "delta": {}, "finish_reason": None}]}),
        line({"choices": [{"index": 0, "delta": {"content": 5}, "finish_reason": None}]}),
        line([1]),
        line(None),
        b"data: \xff\xfe\n\n",
    ],
)
def test_garbage_fails_the_node(piece: bytes) -> None:
    with Asked([Sent([piece, DONE])] * 3) as asked:
        assert isinstance(asked.error(GEN), ub.BackendError)


def test_an_error_in_a_stream_fails_the_node() -> None:
    body = {"error": {"message": "out of memory", "type": "server_error"}}
    with Asked([Sent([chunk("a"), line(body)])]) as asked:
        error = asked.error(GEN)
        assert isinstance(error, ub.BackendError)
        assert "out of memory" in str(error)
        assert error.retryable


FAULTS = st.sampled_from(
    [
        Sent(drops=True),
        Sent([chunk("a")], drops=True),
        Sent([chunk("a")]),
        Sent([chunk("a")], stalls=True),
        Sent([b"data: {"]),
        Sent([b"<html>"], media_type="text/html"),
        Sent([line({"choices": 5})]),
        failure(500),
        failure(400),
        text("a", end="content_filter"),
        text("a", end="length"),
    ]
)


@settings(max_examples=60, deadline=None)
@given(faults=st.lists(FAULTS, min_size=3, max_size=3), gens=st.integers(1, 3))
def test_whatever_goes_wrong_every_node_ends(
    hasty: tuple[Asked, list[Sent]], faults: list[Sent], gens: int
) -> None:
    asked, answers = hasty
    answers[:] = faults * gens
    runs = [asked.start(GEN) for _ in range(gens)]
    for recorder, node, _ in runs:
        recorder.wait(node)
        if node in recorder.errors:
            assert isinstance(recorder.errors[node], ub.BackendError)
        else:
            assert recorder.text(node) == recorder.results[node].text == "a"


@pytest.fixture(scope="module")
def hasty() -> Any:
    answers: list[Sent] = []
    with Asked(lambda _: answers.pop(), timeout=0.1, backoff_s=0.001) as asked:
        yield asked, answers


def test_nobody_there_is_said_so() -> None:
    with OpenAIBackend("m", base_url="http://127.0.0.1:9/v1", backoff_s=0.0) as backend:
        asked = object.__new__(Asked)
        asked.backend = backend
        error = asked.error(GEN)
    assert isinstance(error, ub.BackendConnectionError)
    assert "127.0.0.1:9" in str(error)


def test_a_stall_ends_in_time() -> None:
    stall = Sent([chunk("a")], stalls=True)
    with Asked([stall, stall, stall], timeout=0.2) as asked:
        assert isinstance(asked.error(GEN), ub.BackendTimeoutError)
    with Asked([stall]) as asked:
        error = asked.error(Gen("a", timeout=0.2))
        assert isinstance(error, ub.NodeTimeoutError)
        assert str(error) == "'a' (4): timeout of 0.2 s passed"
    with Asked([stall]) as asked:
        error = asked.error(Gen("b"), timeout=0.2)
        assert isinstance(error, ub.NodeTimeoutError)
        assert str(error) == "'b' (4): the run's timeout of 0.2 s passed"


def test_a_cancelled_node_drops_its_connection() -> None:
    with Asked([Sent([chunk("a")], stalls=True)]) as asked:
        recorder, node, session = asked.start(GEN)
        recorder.wait_text(node)
        session.cancel([node])
        recorder.wait(node)
        assert isinstance(recorder.errors[node], ub.CancelledError)
        assert asked.endpoint.closed_early.wait(10)


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def waiting_generators() -> list[str]:
    """The client's generators that stand in the middle of a stream."""
    found = [one for one in gc.get_objects() if type(one) is AsyncGeneratorType]
    names = [one.__qualname__ for one in found if one.ag_frame is not None]
    return [name for name in names if name.startswith(("AsyncStream.__stream", "BoundAsync"))]


def test_a_stream_that_is_left_early_leaves_nothing_to_the_garbage_collector() -> None:
    more = [chunk("more")] * 3
    cut = Sent([chunk("a|"), *more], stalls=True)
    odd = Sent([chunk("a"), chunk("b", index=7), *more], stalls=True)
    with Asked([cut, odd]) as asked, no_collection():
        recorder, node = asked.run(Gen("a", SamplingParams(stop=("|",))))
        assert recorder.results[node].text == "a"
        assert waiting_generators() == []
        assert "sample 7" in str(asked.error(GEN))
        assert waiting_generators() == []


def test_closing_the_backend_ends_what_runs() -> None:
    with Asked([Sent([chunk("a")], stalls=True)]) as asked:
        recorder, node, session = asked.start(GEN)
        recorder.wait_text(node)
        asked.backend.close()
        asked.backend.close()
        recorder.wait(node)
        assert "closed" in str(recorder.errors[node])
        session.cancel()
        with pytest.raises(ub.BackendError, match="closed"):
            asked.backend.open(RunOptions(), recorder)


def test_a_sink_that_fails_stops_its_run_only(caplog: pytest.LogCaptureFixture) -> None:
    with Asked(lambda _: text("ok")) as asked:

        def sink(events: object) -> None:
            raise ValueError("the user's")

        build = GraphBuilder()
        build.add(Gen("a"), build.add(RoleStart("assistant")))
        session = asked.backend.open(RunOptions(), sink)
        session.extend(build.piece())
        recorder, node = asked.run(GEN)
        assert recorder.results[node].text == "ok"
    assert "the run is cancelled" in caplog.text


# --- constraints ----------------------------------------------------------------------------------

SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}})


def test_a_schema_is_asked_for_and_checked() -> None:
    gen = Gen("a", constraint=ub.JsonSchema(SCHEMA))
    with Asked([text('{"n"', ": 1}"), text('{"n": "one"}'), text('{"n', end="length")]) as asked:
        good, node = asked.run(gen)
        assert good.results[node].text == '{"n": 1}'
        assert good.text(node) == '{"n": 1}'
        error = asked.error(gen)
        assert isinstance(error, ub.BackendError)
        assert "does not fit" in str(error)
        cut, node = asked.run(gen)
        assert not cut.results[node].samples[0].accepting
        form = asked.endpoint.requests[0]["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["strict"] is True
    assert form["json_schema"]["schema"] == json.loads(SCHEMA)


def test_an_emulated_choice_is_tried_again_a_bounded_number_of_times() -> None:
    gen = Gen("a", constraint=ub.Choices(("yes", "no")))
    answers = [text('{"value": "maybe"}'), text("what?"), text('{"value": "no"}')]
    with Asked(answers, emulate=True) as asked:
        recorder, node = asked.run(gen)
        assert recorder.results[node].text == "no"
        assert not any(isinstance(event, TextDelta) for event in recorder.events)
        seeds = {body["seed"] for body in asked.endpoint.requests}
        assert len(seeds) == 3
    with Asked([text("maybe")] * 4, emulate=True) as asked:
        assert "in 3 attempts" in str(asked.error(gen))
        assert len(asked.endpoint.requests) == 3


def test_choices_are_scored_by_the_echoed_prompt() -> None:
    def echoed(i: int, tokens: list[str], logprobs: list[float | None]) -> dict[str, Any]:
        written = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None}
        return {"index": i, "text": "".join(tokens), "finish_reason": "length", "logprobs": written}

    choices = [
        echoed(1, ["ctx", "b", "c"], [None, -1.0, -3.0]),
        echoed(0, ["ctx", "a"], [None, -2.5]),
    ]
    usage_counts = {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    features = EndpointFeatures(select_by="echo", json_schema=False)
    with Asked(
        [whole({"choices": choices, "usage": usage_counts})] * 2,
        endpoint="completions",
        features=features,
    ) as asked:
        mean, node = asked.run(Select("s", ("a", "bc")))
        total, _ = asked.run(Select("s", ("a", "bc"), method="sum"))
        body = asked.endpoint.requests[0]
    assert mean.results[node].text == "bc"
    assert [row.mean for row in mean.results[node].scores] == [-2.5, -2.0]
    assert total.results[node].text == "a"
    assert [row.sum for row in total.results[node].scores] == [-2.5, -4.0]
    assert body["prompt"] == ["ctxa", "ctxbc"]
    assert (body["echo"], body["max_tokens"]) == (True, 0)


# --- refusals: nothing is sent --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (Gen("a", constraint=ub.Regex("a")), "regex"),
        (Gen("a", constraint=ub.Choices(("a", "b"))), "choices"),
        (Gen("a", constraint=ub.Grammar("start: /a/")), "grammar"),
        (Gen("a", heal=True), "heal"),
        (Gen("a", thinking=True), "thinking"),
        (Gen("a", SamplingParams(prompt_logprobs=True)), "prompt_logprobs"),
        (Gen("a", SamplingParams(stop_regex=("a",))), "stop_regex"),
        (Gen("a", SamplingParams(top_k=4)), "top_k"),
        (Gen("a", SamplingParams(min_p=0.1)), "min_p"),
        (Gen("a", SamplingParams(repetition_penalty=1.1)), "repetition_penalty"),
        (Gen("a", SamplingParams(min_tokens=2)), "min_tokens"),
        (Gen("a", SamplingParams(ignore_eos=True)), "ignore_eos"),
        (Gen("a", SamplingParams(stop_token_ids=(1,))), "stop_token_ids"),
        (Gen("a", SamplingParams(logprobs=True, top_logprobs=50)), "top_logprobs=50"),
        (Gen("a", SamplingParams(stop=("a",)), ub.JsonSchema(SCHEMA)), "stop"),
        (Select("s", ("a", "b"), method="unconditional_likelihood_normalized"), "unconditional"),
    ],
)
def test_what_the_endpoint_cant_honour_is_refused_before_anything_is_sent(
    op: Gen | Select, words: str
) -> None:
    with Asked([]) as asked:
        with pytest.raises(ub.UnsupportedFeatureError, match=words):
            asked.start(op)
        assert asked.endpoint.requests == []


def test_where_a_chat_endpoint_cant_write_is_refused() -> None:
    def refuse(build: GraphBuilder, words: str) -> None:
        session = asked.backend.open(RunOptions(), Recorder())
        with pytest.raises(ub.UnsupportedFeatureError, match=words):
            session.extend(build.piece())

    with Asked([]) as asked:
        build = GraphBuilder()
        build.gen("a")
        refuse(build, "outside of turns")
        build = GraphBuilder()
        build.text("stray")
        refuse(build, "text outside of turns")
        build = GraphBuilder()
        build.gen("a", build.add(RoleStart("user")))
        refuse(build, "in a user turn")
        build = GraphBuilder()
        build.gen("a", build.text("I", build.add(RoleStart("assistant"))))
        refuse(build, "continues a started assistant turn")
        build = GraphBuilder()
        build.gen("b", build.gen("a", build.add(RoleStart("assistant"))))
        refuse(build, "continues a started assistant turn")
        assert asked.endpoint.requests == []


def test_a_completions_endpoint_knows_no_turns() -> None:
    with Asked([], endpoint="completions") as asked:
        build = GraphBuilder()
        build.add(RoleStart("user"))
        with pytest.raises(ub.UnsupportedFeatureError, match="user turn"):
            asked.backend.open(RunOptions(), Recorder()).extend(build.piece())


# --- credentials ----------------------------------------------------------------------------------


def test_the_key_is_sent_and_told_to_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = f"Incorrect API key provided: {KEY}, sk-secre************cdef"
    stream = Sent([line({"error": {"message": told, "type": "auth"}})])
    with Asked([failure(401, told), stream], max_retries=0) as asked:
        recorder, node = asked.run(GEN)
        again, _ = asked.run(GEN)
        assert asked.endpoint.headers[0]["authorization"] == f"Bearer {KEY}"
        seen = [repr(asked.backend), repr(recorder.events), repr(again.events), caplog.text]
        seen.append(repr(asked.backend.features))
    for found in seen:
        assert KEY not in found
        assert "sk-secre***" not in found
    failed = [e for e in recorder.events if isinstance(e, NodeFailed) and e.node == node]
    assert failed[0].error.cause is None


def test_the_variables_of_openai_are_for_openai_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_ADMIN_KEY", KEY)
    monkeypatch.setenv("OPENAI_ORG_ID", KEY)
    monkeypatch.setenv("OPENAI_PROJECT_ID", KEY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"x-more: {KEY}\nauthorization: Bearer {KEY}")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with Asked([text("ok")] * 2, api_key=None) as asked:
        asked.run(GEN)
        assert KEY not in str(asked.endpoint.headers)
        assert "authorization" not in asked.endpoint.headers[0]
    with Asked([text("ok")], api_key="mine") as asked:
        asked.run(GEN)
        assert asked.endpoint.headers[0]["authorization"] == "Bearer mine"
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ub.ProgramError, match="OPENAI_API_KEY"):
        OpenAIBackend("m")


@pytest.mark.parametrize("url", ["http://me:secret@host/v1", "http://h/v1?key=secret", "host/v1"])
def test_an_address_holds_no_credentials(url: str) -> None:
    with pytest.raises(ub.ProgramError, match="base_url") as caught:
        OpenAIBackend("m", base_url=url)
    assert "secret" not in str(caught.value)
