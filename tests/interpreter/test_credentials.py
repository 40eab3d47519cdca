"""A key shows up nowhere: in no error, repr, log, picture or record, however it was given."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_endpoint import FakeEndpoint, Sent, failure, text
from tests.support.hash_server import hash_server

import umbel as ub
import umbel.interpreter.compat.sglang as sgl
from umbel.interpreter.backends.base import Backend
from umbel.interpreter.backends.openai import OpenAIBackend
from umbel.interpreter.backends.remote import RemoteBackend
from umbel.interpreter.replay import Recorder

KEY = "kx7Sentinel0Zq9vWmP3"  # of a form that nothing could recognise as a key


@ub.function
def ask(s: ub.State) -> None:
    s += ub.user("hi") + ub.assistant(ub.gen("a", max_tokens=4))


def outputs_of(backend: Backend, record: Path) -> list[str]:
    """Run the program, recorded, and return all that can be seen of it."""
    with closing(Recorder(backend, record)) as recorder:
        (result,) = ask.options(backend=recorder).run_batch([{}], on_error="collect")
    seen = [repr(backend), repr(recorder), repr(result), repr(backend.stats()), record.read_text()]
    if result.error is not None:
        seen += [str(result.error), repr(result.error)]
        seen += traceback.format_exception(result.error)
    plan = result.plan()
    for name in ("run.html", "run.mmd"):
        picture = record.parent / name
        plan.draw(str(picture))
        seen.append(picture.read_text())
    return seen


ANSWERS: dict[str, Callable[[], Sent]] = {
    "fine": lambda: text("ok"),
    "quoted": lambda: failure(401, f"Incorrect API key provided: {KEY}"),
    "in a page": lambda: Sent([f"<p>{KEY}</p>".encode()], 403, {}, "text/html"),
    "broken": lambda: Sent([f"data: {{{KEY}\n\n".encode()]),
    "dropped": lambda: Sent(drops=True),
}
MAKERS: dict[str, Callable[[str], Any]] = {
    "api_key": lambda url: OpenAIBackend("m", base_url=url, api_key=KEY, max_retries=0),
    "sglang": lambda url: sgl.OpenAI("m", base_url=url, api_key=KEY, max_retries=0),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("make", MAKERS)
def test_an_endpoint_s_key_is_shown_nowhere(
    make: str, answer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeEndpoint(lambda _: ANSWERS[answer]()) as endpoint:
        with closing(MAKERS[make](endpoint.url)) as backend:
            seen = outputs_of(backend, tmp_path / "run.jsonl")
        assert endpoint.headers[0]["authorization"] == f"Bearer {KEY}", "it must be sent, though"
    assert not [output for output in [*seen, caplog.text] if KEY in output]


def test_a_server_s_key_is_shown_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with hash_server() as server, RemoteBackend(server.url, api_key=KEY) as backend:
        seen = outputs_of(backend, tmp_path / "run.jsonl")
    assert not [output for output in [*seen, caplog.text] if KEY in output]


def test_the_key_of_the_environment_is_shown_nowhere_and_sent_to_no_other_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_ORG_ID", KEY)
    with closing(OpenAIBackend("m")) as own:
        assert KEY not in repr(own)
        assert KEY not in repr(vars(own)["features"])
    with FakeEndpoint(lambda _: text("ok")) as endpoint:
        with closing(OpenAIBackend("m", base_url=endpoint.url)) as backend:
            seen = outputs_of(backend, tmp_path / "run.jsonl")
        assert KEY not in str(endpoint.headers)
    assert not [output for output in [*seen, caplog.text] if KEY in output]


@pytest.mark.parametrize(
    "url",
    [
        f"https://user:{KEY}@127.0.0.1:9",
        f"https://{KEY}@127.0.0.1:9",
        f"http://127.0.0.1:9/v1?key={KEY}",
        f"ftp://user:{KEY}@127.0.0.1:9",
    ],
)
@pytest.mark.parametrize("make", ["openai", "remote", "sglang"])
def test_an_address_with_a_key_is_refused_without_showing_it(url: str, make: str) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "openai": lambda: OpenAIBackend("m", base_url=url),
        "remote": lambda: RemoteBackend(url),
        "sglang": lambda: sgl.OpenAI("m", base_url=url),
    }
    with pytest.raises(ub.ProgramError) as refused:
        makers[make]()
    assert KEY not in "".join(traceback.format_exception(refused.value))
