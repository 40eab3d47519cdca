"""The server's wire form, spoken by hand over real HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from tests.support.fake_engine import FakeEngine, FakeSession
from tests.support.graphs import GraphBuilder

from umbel.lang.errors import EngineError, EngineStoppedError, ProgramError, from_wire
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Select
from umbel.lang.results import NodeFailed, NodeFinished, NodeResult, TextDelta
from umbel.lang.wire import (
    MSGPACK,
    PROGRAMS_PATH,
    ErrorResponse,
    RunRequest,
    decode_event,
    decode_response,
    encode_request,
)
from umbel.runtime.server import BackgroundServer, create_app

MAX_BODY_BYTES = 4096


class Served:
    def __init__(self, *held: str) -> None:
        self.engine = FakeEngine(held)
        app = create_app(
            self.engine,
            model_name="fake",
            capabilities={"regex": True},
            max_body_bytes=MAX_BODY_BYTES,
            keep_alive_s=0.05,
        )
        self.server = BackgroundServer(app)
        self.http = httpx.Client(base_url=self.server.url, timeout=20, trust_env=False)

    def close(self) -> None:
        self.http.close()
        self.server.close(force=True)
        self.engine.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served("held")
    yield served
    served.close()


def post(served: Served, request: RunRequest) -> httpx.Response:
    return served.http.post(
        PROGRAMS_PATH, content=encode_request(request), headers={"content-type": MSGPACK}
    )


def error_of(response: httpx.Response) -> Exception:
    return from_wire(msgspec.json.decode(response.content, type=ErrorResponse).error)


def hello(name: str = "a") -> RunRequest:
    build = GraphBuilder()
    build.gen(name, build.text("hello"))
    return RunRequest(build.piece())


def metric(served: Served, name: str) -> float:
    lines = served.http.get("/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def wait_for_metric(served: Served, name: str, value: float) -> None:
    deadline = time.monotonic() + 10
    while metric(served, name) != value:
        assert time.monotonic() < deadline, f"{name} never became {value}"
        time.sleep(0.01)


def test_a_program_in_plain_json_is_answered_in_plain_json(served: Served) -> None:
    graph = {
        "nodes": [
            {"id": 0, "address": "0", "op": {"type": "text", "parts": ["hello"]}},
            {"id": 1, "address": "1", "op": {"type": "gen", "name": "a"}, "parent": 0},
            {"id": 2, "address": "2", "op": {"type": "gen", "name": "broken"}},
        ]
    }
    response = served.http.post(PROGRAMS_PATH, json={"graph": graph})
    assert response.status_code == 200
    body: dict[str, Any] = response.json()
    assert body["results"]["0"]["text"] == "hello"
    assert body["results"]["1"]["text"] == body["results"]["1"]["samples"][0]["text"]
    assert body["errors"]["2"]["type"] == "EngineError"


def test_an_engine_that_is_busy_with_a_long_text_holds_up_no_other_client(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_busy, may_go_on = threading.Event(), threading.Event()
    extend = FakeSession.extend

    def busy(session: FakeSession, piece: RequestGraph, *failed: Any) -> None:
        is_busy.set()
        may_go_on.wait()
        extend(session, piece, *failed)

    monkeypatch.setattr(FakeSession, "extend", busy)
    with ThreadPoolExecutor(1) as pool:
        build = GraphBuilder()
        build.gen("a", build.text("x" * 2000))
        answer = pool.submit(post, served, RunRequest(build.piece()))
        try:
            is_busy.wait()
            assert served.http.get("/health").status_code == 200
        finally:
            may_go_on.set()
        assert decode_response(answer.result().content).results.keys() == {0, 1}


def test_json_and_msgpack_and_events_tell_the_same(served: Served) -> None:
    request = hello()
    whole = decode_response(post(served, request).content)
    as_json = served.http.post(PROGRAMS_PATH, content=msgspec.json.encode(request))
    assert decode_response(as_json.content) == whole
    streamed = served.http.post(
        PROGRAMS_PATH,
        content=encode_request(request),
        headers={"content-type": MSGPACK, "accept": "text/event-stream"},
    )
    assert streamed.headers["content-type"].startswith("text/event-stream")
    messages = streamed.content.split(b"\n\n")[:-1]
    events = [decode_event(m.removeprefix(b"data: ")) for m in messages]
    ends = {e.node: e.result for e in events if isinstance(e, NodeFinished)}
    assert ends == whole.results
    deltas = "".join(e.text for e in events if isinstance(e, TextDelta))
    assert deltas == whole.results[1].text


def test_infinite_log_probabilities_are_json_strings(served: Served) -> None:
    build = GraphBuilder()
    build.add(Select("s", ("yes", "no")))
    response = post(served, RunRequest(build.piece()))
    assert response.json()["results"]["0"]["scores"][0]["sum"] == "-inf"
    assert decode_response(response.content).results[0].scores[0].sum == float("-inf")


def test_resolved_and_failed_nodes_are_not_run_again(served: Served) -> None:
    build = GraphBuilder()
    known = build.gen("known", build.text("ignored"))
    lost = build.gen("lost")
    after, victim = build.gen("after", known), build.text("victim", lost)
    first = RunRequest(build.piece())
    alone = decode_response(post(served, first).content)
    error = msgspec.json.decode(
        served.http.post(PROGRAMS_PATH, content=b"{}").content, type=ErrorResponse
    ).error
    again = decode_response(
        post(
            served,
            RunRequest(
                first.graph,
                resolved={0: alone.results[0], known: alone.results[known]},
                failed={lost: error},
            ),
        ).content
    )
    assert served.engine.runs[-1].ran == [str(after)]
    assert again.results == {after: alone.results[after]}
    assert set(again.errors) == {victim}
    assert again.errors[victim].cause == error


def test_an_empty_program_is_answered_at_once(served: Served) -> None:
    body = decode_response(post(served, RunRequest(GraphBuilder().piece())).content)
    assert (body.results, body.errors) == ({}, {})


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_client_that_goes_away_cancels_its_run(served: Served, accept: str) -> None:
    headers = {"content-type": MSGPACK, "accept": accept}
    body = encode_request(hello("held"))
    # shorter than the time between two comments, which would keep the client waiting
    with pytest.raises(httpx.ReadTimeout):
        served.http.post(PROGRAMS_PATH, content=body, headers=headers, timeout=0.04)
    assert served.engine.cancelled.wait(10)
    wait_for_metric(served, "umbel_runs_active", 0)
    assert metric(served, 'umbel_runs_total{outcome="cancelled"}') == 1


def test_single_nodes_can_be_cancelled_by_name_of_the_run(served: Served) -> None:
    build = GraphBuilder()
    build.gen("held")
    build.gen("held")
    request = RunRequest(build.piece(), run_id="mine")
    with served.http.stream(
        "POST",
        PROGRAMS_PATH,
        content=encode_request(request),
        headers={"content-type": MSGPACK, "accept": "text/event-stream"},
    ) as response:
        chunks = response.iter_bytes()
        next(chunks)
        # one that is in no run, one that is not in this run, and one that is
        other = served.http.post(PROGRAMS_PATH + "/other/cancel", json={"nodes": [1]})
        mine = served.http.post(PROGRAMS_PATH + "/mine/cancel", json={"nodes": [1, 99]})
        assert (other.status_code, mine.status_code) == (204, 204)
        while not any(b'"failed"' in chunk for chunk in chunks):
            pass
        served.engine.release("held")
        rest = b"".join(chunks)
    assert b'"finished"' in rest
    bad = served.http.post(PROGRAMS_PATH + "/mine/cancel", json={"nodes": "all"})
    assert bad.status_code == 400


def test_a_long_wait_sends_comments(served: Served) -> None:
    with served.http.stream(
        "POST",
        PROGRAMS_PATH,
        content=encode_request(hello("held")),
        headers={"content-type": MSGPACK, "accept": "text/event-stream"},
    ) as response:
        assert any(chunk.startswith(b": ") for chunk in response.iter_bytes())


@pytest.mark.parametrize(
    ("request_body", "status", "words"),
    [
        (b"", 400, "not a run"),
        (b'{"graph": 3}', 400, "not a run"),
        (b'{"graph": {"nodes": [], "base": 4}}', 400, "starts at node 4"),
        (b'{"graph": {"nodes": []}, "resolved": {"0": {}}}', 400, "node 0 has ended"),
        (b'"' + b"x" * MAX_BODY_BYTES + b'"', 413, "4,096 bytes"),
    ],
)
def test_a_bad_body_is_refused_in_words(
    served: Served, request_body: bytes, status: int, words: str
) -> None:
    response = served.http.post(PROGRAMS_PATH, content=request_body)
    assert response.status_code == status
    error = error_of(response)
    assert isinstance(error, ProgramError) or status == 413
    assert words in str(error)


def test_a_resolved_node_needs_what_it_builds_on(served: Served) -> None:
    build = GraphBuilder()
    build.text("b", build.text("a"))
    graph = build.piece()
    orphan = post(served, RunRequest(graph, resolved={1: NodeResult("b")}))
    assert orphan.status_code == 400
    assert "node 0, which it builds on, is not" in str(error_of(orphan))
    failed = NodeFailed(0, msgspec.json.decode(orphan.content, type=ErrorResponse).error).error
    both = post(served, RunRequest(graph, resolved={0: NodeResult("a")}, failed={0: failed}))
    assert "both resolved and failed" in str(error_of(both))


def test_a_form_that_is_not_known_is_refused(served: Served) -> None:
    response = served.http.post(
        PROGRAMS_PATH, content=b"a: 1", headers={"content-type": "application/yaml"}
    )
    assert response.status_code == 415
    assert "application/yaml" in str(error_of(response))


def test_a_stopped_engine_is_not_healthy(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "ok"}
    served.engine.close()
    for response in (served.http.get("/health"), post(served, hello())):
        assert response.status_code == 503
        assert isinstance(error_of(response), EngineStoppedError)


def test_the_model_is_named_with_what_it_honours(served: Served) -> None:
    assert served.http.get("/v1/model").json() == {
        "name": "fake",
        "capabilities": {"regex": True},
        "version": "0.1.0",
        "socket_versions": [1],
        "max_body_bytes": MAX_BODY_BYTES,
    }


def test_metrics_show_the_engine_and_the_runs(served: Served) -> None:
    post(served, hello())
    post(served, hello("broken"))
    wait_for_metric(served, "umbel_runs_active", 0)
    assert metric(served, 'umbel_runs_total{outcome="completed"}') == 2
    assert metric(served, 'umbel_nodes_total{outcome="finished"}') == 3
    assert metric(served, 'umbel_nodes_total{outcome="failed"}') == 1
    assert metric(served, "umbel_time_to_first_token_seconds_count") == 1
    assert metric(served, "umbel_run_seconds_count") == 2
    assert metric(served, "umbel_engine_steps_total") == 7
    assert metric(served, "umbel_engine_forward_seconds_total") == 1.5
    assert metric(served, "umbel_engine_kv_slots") == 64
    assert "unknown" not in served.http.get("/metrics").text


def test_stopping_lets_running_streams_end(served: Served) -> None:
    with served.http.stream(
        "POST",
        PROGRAMS_PATH,
        content=encode_request(hello("held")),
        headers={"content-type": MSGPACK, "accept": "text/event-stream"},
    ) as response:
        chunks = response.iter_bytes()
        next(chunks)
        served.server.stop()
        served.engine.release("held")
        assert b'"finished"' in b"".join(chunks)
    served.server.close()
    with pytest.raises(httpx.ConnectError):
        served.http.get("/health")


def test_an_address_in_use_is_one_clear_error(served: Served) -> None:
    port = int(served.server.url.rsplit(":", 1)[1])
    app = create_app(served.engine, model_name="fake", capabilities={})
    with pytest.raises(EngineError, match=f"can't listen on 127.0.0.1:{port}"):
        BackgroundServer(app, port=port)


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/nothing", 404, "GET /v1/nothing: there is no such route"),
        (
            "GET",
            "/v1/v1/model",
            404,
            "GET /v1/v1/model: there is no such route; "
            "the address that was given has a /v1 too many at its end",
        ),
        ("GET", PROGRAMS_PATH, 405, f"GET {PROGRAMS_PATH}: this route takes POST"),
        ("DELETE", "/health", 405, "DELETE /health: this route takes GET"),
    ],
)
def test_a_request_that_no_route_takes_is_an_error_like_others(
    served: Served, method: str, path: str, status: int, words: str
) -> None:
    response = served.http.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    error = from_wire(msgspec.json.decode(response.content, type=ErrorResponse).error)
    assert isinstance(error, ProgramError)
    assert str(error) == words
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", [PROGRAMS_PATH, f"{PROGRAMS_PATH}/x/cancel", "/v1/completions"])
def test_a_client_that_hangs_up_while_its_body_is_read_is_no_error(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = served.http.base_url.host, served.http.base_url.port
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with (
        caplog.at_level("INFO"),
        socket.create_connection((host, port or 80)) as connection,
    ):
        connection.sendall(f"{head}content-length: 1000\r\n\r\n{{".encode())
        served.http.get("/health")  # the route has begun to read
    served.http.close()
    served.server.close()  # once every route has ended
    assert [r.getMessage() for r in caplog.records if r.name.startswith("uvicorn")] == []
