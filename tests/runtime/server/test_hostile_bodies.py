"""Bodies and messages that nobody should send: refused as the client's mistake, on every route."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import pytest
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.graphs import GraphBuilder
from tests.support.hash_server import HashServer, hash_server
from tests.support.recorder import Recorder
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import umbel as ub
from umbel.interpreter.backends.remote import RemoteBackend, SocketUse
from umbel.lang.errors import ProgramError
from umbel.lang.ir import Pick
from umbel.lang.results import RunOptions
from umbel.lang.wire import (
    JSON,
    MSGPACK,
    SOCKET_PATH,
    SOCKET_VERSION,
    OpenRun,
    RunRefused,
    decode_server_message,
    encode_message,
)

DEPTH = 100_000
DEEP_JSON = b"[" * DEPTH + b"]" * DEPTH
HUGE = b"9" * 5000  # digits


@pytest.fixture(scope="module")
def server() -> Iterator[HashServer]:
    with hash_server() as server:
        yield server


@pytest.mark.parametrize(
    ("path", "media_type", "body"),
    [
        (
            "/v1/chat/completions",
            JSON,
            b'{"model":"hash","messages":[],"tools":' + DEEP_JSON + b"}",
        ),
        ("/v1/completions", JSON, b'{"model":"hash","seed":' + HUGE + b',"n":' + HUGE + b"}"),
        ("/v1/completions", JSON, b'{"model":"hash","prompt":"a","max_tokens":' + HUGE + b"}"),
        ("/v1/completions", JSON, b'{"model":"hash","prompt":"a","top_k":' + HUGE + b"}"),
        ("/v1/programs", JSON, b'{"graph":{"nodes":' + DEEP_JSON + b"}}"),
        ("/v1/programs", MSGPACK, b"\x81\xa5graph" + b"\x91" * DEPTH),
        ("/v1/programs/some-run/cancel", JSON, DEEP_JSON),
    ],
)
def test_a_body_too_deep_or_too_large_to_read_is_the_clients_mistake(
    server: HashServer, path: str, media_type: str, body: bytes
) -> None:
    answer = httpx.post(
        server.url + path, content=body, headers={"content-type": media_type}, timeout=20
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_a_gen_with_more_samples_than_there_may_be_is_refused(server: HashServer) -> None:
    node = {"id": 0, "address": "0", "op": {"type": "gen", "name": "g", "n": 10**9}}
    answer = httpx.post(server.url + "/v1/programs", json={"graph": {"nodes": [node]}})
    assert answer.status_code == 400
    assert "n must be from 1 to" in answer.json()["error"]["message"]


def test_a_message_too_deep_to_read_is_refused_with_its_socket(server: HashServer) -> None:
    url = server.url.replace("http", "ws", 1) + SOCKET_PATH
    with connect(url, proxy=None, compression=None) as socket:
        socket.send(encode_message(OpenRun(SOCKET_VERSION)))
        socket.send(b"\x82\xa4type\xa6extend\xa6failed\x81\x00" + b"\x81\xa5cause" * 5000)
        assert isinstance(decode_server_message(socket.recv(20, decode=False)), RunRefused)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(20)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4400


@pytest.mark.parametrize("use", ["required", "never"])
def test_what_has_no_form_on_the_wire_fails_its_own_nodes(
    server: HashServer, use: SocketUse
) -> None:
    build, recorder = GraphBuilder(), Recorder()
    bad = build.add(Pick(2**70), build.text("a"))
    with RemoteBackend(server.url, socket=use) as backend:
        session = backend.open(RunOptions(), recorder)
        session.extend(build.piece())
        recorder.wait(bad)
        session.close()
    assert isinstance(recorder.errors[bad], ProgramError)
    assert "can't be sent" in str(recorder.errors[bad])


@pytest.mark.parametrize("kind", ["drop", "garbage"])
def test_a_handshake_that_breaks_is_no_reason_to_do_without_sockets_from_then_on(
    server: HashServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    @ub.function
    def program(s: ub.State) -> None:
        s += "abc" + ub.gen("a", max_tokens=3)
        s += s["a"] + ub.gen("b", max_tokens=3)

    with FaultyProxy(server.url) as proxy, RemoteBackend(proxy.url) as backend:
        expected = program.options(backend=backend).run().text()
        proxy.set(Fault(kind))  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING):
            assert program.options(backend=backend).run().text() == expected
        assert "has no socket" not in caplog.text
        proxy.set(None)
        assert program.options(backend=backend).run().text() == expected
