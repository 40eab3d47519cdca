"""OpenAIBackend against our own server over real HTTP: it gives what the engine gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.graphs import GraphBuilder
from tests.support.hash_server import MODEL, HashServer, hash_server
from tests.support.recorder import Recorder
from tests.support.runs import start_run

import umbel as ub
from umbel.interpreter.backends.base import Backend
from umbel.interpreter.backends.openai import OpenAIBackend
from umbel.interpreter.backends.openai_features import UMBEL_SERVER, Endpoint
from umbel.lang.ir import Gen, RoleEnd, RoleStart, Select, SelectMethod, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams

# the seeds of the engine and those that travel differ, so what is compared is greedy


@pytest.fixture(scope="module")
def server() -> Iterator[HashServer]:
    with hash_server() as server:
        yield server


@contextmanager
def connected(
    server: HashServer, endpoint: Endpoint = "chat", **options: Any
) -> Iterator[OpenAIBackend]:
    options.setdefault("features", UMBEL_SERVER)
    with OpenAIBackend(MODEL, endpoint=endpoint, base_url=server.openai_url, **options) as backend:
        yield backend


@pytest.fixture(scope="module")
def chat(server: HashServer) -> Iterator[OpenAIBackend]:
    with connected(server) as backend:
        yield backend


@pytest.fixture(scope="module")
def completions(server: HashServer) -> Iterator[OpenAIBackend]:
    with connected(server, "completions") as backend:
        yield backend


def run(backend: Backend, build: GraphBuilder, *nodes: int) -> Recorder:
    recorder, session = start_run(backend, build, RunOptions(seed=7))
    session.close()
    recorder.wait(*nodes)
    return recorder


def turn(build: GraphBuilder, role: str, text: str, at: int | None = None) -> int:
    start = build.add(RoleStart(role), at)
    return build.add(RoleEnd(role), build.add(Text((text,)), start))


TEXTS = st.sampled_from(["a", "ab", "abc ", "xyxy", " a b", "é日"])


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[Literal["user", "assistant"], Any]]:
    turns: list[tuple[Literal["user", "assistant"], Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        turns.append(("user", draw(TEXTS)))
        inside = draw(st.lists(st.one_of(TEXTS, st.none()), min_size=1, max_size=3))
        turns.append(("assistant", inside))
    return turns


def build_conversation(turns: list[tuple[str, Any]], stop: str) -> tuple[GraphBuilder, list[int]]:
    build = GraphBuilder()
    at: int | None = None
    gens: list[int] = []
    for role, content in turns:
        if role == "user":
            at = turn(build, "user", content, at)
            continue
        at = build.add(RoleStart("assistant"), at)
        for part in content:
            if part is None:
                # a character cut in half can't be continued as text: sample whole characters only
                sampling = SamplingParams(
                    max_tokens=5, stop=(stop,), logit_bias=tuple((i, 50.0) for i in range(97, 123))
                )
                at = build.add(Gen(f"g{len(gens)}", sampling), at)
                gens.append(at)
            else:
                at = build.add(Text((part,)), at)
        at = build.add(RoleEnd("assistant"), at)
    return build, gens


@settings(max_examples=25, deadline=None)
@given(turns=conversations(), stop=st.sampled_from(["b", "ca", "zz"]))
def test_the_first_gen_of_a_conversation_gives_what_the_engine_gives(
    server: HashServer, chat: OpenAIBackend, turns: list[tuple[str, Any]], stop: str
) -> None:
    build, gens = build_conversation(turns, stop)
    again, _ = build_conversation(turns, stop)
    here, there = run(server.local, build, *gens), run(chat, again, *gens)
    if gens:  # what comes after it is encoded anew by the server (rule 9 binds token backends)
        expected, found = here.results[gens[0]], there.results[gens[0]]
        assert found.text == expected.text
        assert found.samples[0].finish_reason == expected.samples[0].finish_reason
        if isinstance(expected.samples[0].matched_stop, str):
            assert found.samples[0].matched_stop == expected.samples[0].matched_stop
        assert found.usage.completion_tokens == expected.usage.completion_tokens
    for gen in gens:
        assert there.text(gen) == there.results[gen].text


@settings(max_examples=20, deadline=None)
@given(text=TEXTS, n=st.integers(1, 3), logprobs=st.booleans())
def test_completions_give_what_the_engine_gives(
    server: HashServer, completions: OpenAIBackend, text: str, n: int, logprobs: bool
) -> None:
    sampling = SamplingParams(max_tokens=6, top_k=5, logprobs=logprobs, top_logprobs=2 * logprobs)
    results = []
    for backend in (server.local, completions):
        build = GraphBuilder()
        gen = build.add(Gen("a", sampling, n=n), build.text(text))
        results.append(run(backend, build, gen).results[gen])
    expected, found = results
    assert [s.text for s in found.samples] == [s.text for s in expected.samples]
    assert [s.finish_reason for s in found.samples] == [s.finish_reason for s in expected.samples]
    for ours, theirs in zip(found.samples, expected.samples, strict=True):
        assert [t.logprob for t in ours.logprobs] == [t.logprob for t in theirs.logprobs]


def test_a_seed_repeats_a_run_and_another_seed_does_not(completions: OpenAIBackend) -> None:
    def text_of(seed: int) -> str:
        build = GraphBuilder()
        sampling = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
        gen = build.add(Gen("a", sampling), build.text("abc"))
        recorder, session = start_run(completions, build, RunOptions(seed=seed))
        session.close()
        recorder.wait(gen)
        return recorder.results[gen].text

    assert text_of(1) == text_of(1)
    assert text_of(1) != text_of(2)


def start(endpoint: Endpoint) -> tuple[GraphBuilder, int]:
    """A graph up to where something may be generated."""
    build = GraphBuilder()
    if endpoint == "completions":
        return build, build.text("abc")
    return build, build.add(RoleStart("assistant"), turn(build, "user", "abc"))


def likely_letters(server: HashServer, endpoint: Endpoint) -> tuple[str, ...]:
    """Three letters that no merge touches, among the likeliest next tokens."""
    build, at = start(endpoint)
    gen = build.add(Gen("a", SamplingParams(max_tokens=1, logprobs=True, top_logprobs=100)), at)
    top = run(server.local, build, gen).results[gen].samples[0].logprobs[0].top
    letters = [chr(token_id) for token_id, _ in top if chr(token_id) in "defghijklmnopqrstuvw"]
    return tuple(sorted(letters[:3]))


@pytest.mark.parametrize("method", ["sum", "token_length_normalized", "greedy_token_selection"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_select_of_single_tokens_scores_as_the_engine_does(
    server: HashServer, endpoint: Endpoint, method: SelectMethod
) -> None:
    select = Select("s", likely_letters(server, endpoint), method=method)
    assert len(select.choices) == 3
    results = []
    with connected(server, endpoint) as backend:
        for used in (server.local, backend):
            build, at = start(endpoint)
            at = build.add(select, at)
            results.append(run(used, build, at).results[at])
    expected, found = results
    assert found.text == expected.text
    assert [row.sum for row in found.scores] == pytest.approx([row.sum for row in expected.scores])
    assert [row.score for row in found.scores] == pytest.approx(
        [row.score for row in expected.scores]
    )


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_choice_that_cant_be_scored_is_refused_or_emulated(
    server: HashServer, endpoint: Endpoint
) -> None:
    select = Select("s", ("several tokens", "other words"))
    with connected(server, endpoint) as backend:
        build, at = start(endpoint)
        at = build.add(select, at)
        error = run(backend, build, at).errors[at]
        assert isinstance(error, ub.UnsupportedFeatureError)
        assert "several tokens" in str(error)
    with connected(server, endpoint, emulate=True) as backend:
        build, at = start(endpoint)
        at = build.add(select, at)
        assert run(backend, build, at).results[at].text in select.choices


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_emulated_constraints_give_values_that_fit(server: HashServer, endpoint: Endpoint) -> None:
    features = replace(UMBEL_SERVER, select_by=None)
    with connected(server, endpoint, features=features, emulate=True) as backend:
        build, at = start(endpoint)
        sampling = SamplingParams(max_tokens=80, temperature=1.0)
        choice = build.add(Gen("c", sampling, ub.Choices(("yes", "no"))), at)
        regex = build.add(Gen("r", sampling, ub.Regex("[ab]{2,5}")), at)
        select = build.add(Select("s", ("left", "right")), at)
        results = run(backend, build, choice, regex, select).results
    assert results[choice].text in ("yes", "no")
    assert 2 <= len(results[regex].text) <= 5
    assert set(results[regex].text) <= {"a", "b"}
    assert results[select].text in ("left", "right")
    assert results[select].scores == ()


@dataclass
class Report:
    kind: Literal["ab", "xy"]
    ok: bool


def test_a_program_runs_with_typed_values_and_forks(chat: OpenAIBackend) -> None:
    @ub.function
    def program(s: ub.State) -> Any:
        s += ub.system("abc")
        forks = s.fork(3)
        for i, branch in enumerate(forks):
            branch += ub.user(f"a{i}")
            branch += ub.assistant(ub.gen("report", schema=Report, max_tokens=200))
        return forks.join()["report"]

    threads = threading.active_count()
    with ub.use_backend(chat):
        reports = program.run().value
    assert len(reports) == 3
    assert all(isinstance(report, Report) for report in reports)
    assert threading.active_count() <= threads


def test_a_cut_value_is_said_to_be_cut(chat: OpenAIBackend) -> None:
    @ub.function
    def program(s: ub.State) -> Any:
        s += ub.user("abc") + ub.assistant(ub.gen("report", schema=Report, max_tokens=3))
        return s["report"]

    with ub.use_backend(chat), pytest.raises(ub.TruncatedError) as caught:
        program.run()
    assert caught.value.partial
