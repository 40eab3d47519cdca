"""The socket's wire form, spoken by hand over real WebSockets, rightly and wrongly."""

from __future__ import annotations

import asyncio
import re
import socket as sockets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fake_engine import FakeEngine
from tests.support.graphs import GraphBuilder
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from umbel.lang.errors import (
    BackendError,
    BodyTooLargeError,
    CancelledError,
    EngineConfigError,
    EngineStoppedError,
    GenerationError,
    ProgramError,
    from_wire,
    to_wire,
)
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Text
from umbel.lang.results import Event, NodeFailed, NodeFinished, RunOptions
from umbel.lang.wire import (
    SOCKET_PATH,
    SOCKET_VERSION,
    CancelNodes,
    ClientMessage,
    CloseRun,
    ErrorResponse,
    ExtendRun,
    OpenRun,
    RunEvents,
    RunRefused,
    ServerMessage,
    decode_server_message,
    encode_message,
)
from umbel.runtime.server import BackgroundServer, SocketLimits, bind, create_app

MAX_BYTES = 4096
MAY_BE_LATE = "the run may have ended before"
KEY = "a-key-that-must-not-be-seen"


class Served:
    def __init__(self, *, limits: SocketLimits | None = None, **options: Any) -> None:
        self.engine = FakeEngine(("held",))
        ping_s = options.pop("ping_s", 20.0)
        read_bytes = options.pop("read_bytes", 16 << 20)
        app = create_app(
            self.engine,
            model_name="fake",
            capabilities={},
            max_body_bytes=options.pop("max_body_bytes", MAX_BYTES),
            keep_alive_s=options.pop("keep_alive_s", 5.0),
            socket_limits=limits or SocketLimits(),
            **options,
        )
        self.server = BackgroundServer(app, ping_s=ping_s, max_body_bytes=read_bytes)
        self.http = httpx.Client(base_url=self.server.url, timeout=20, trust_env=False)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.server.close(force=True)
        self.engine.close()

    @contextmanager
    def connect(self, **options: Any) -> Iterator[ClientConnection]:
        url = "ws" + self.server.url.removeprefix("http") + SOCKET_PATH
        with connect(url, proxy=None, compression=None, **options) as socket:
            yield socket

    def num_active(self) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(x.split()[1]) for x in lines if x.startswith("umbel_runs_active "))

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 10
        while self.num_active():
            assert time.monotonic() < deadline, "a run was left over"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as served:
        yield served


def send(socket: ClientConnection, *messages: ClientMessage) -> None:
    for message in messages:
        socket.send(encode_message(message))


def opening(**options: Any) -> OpenRun:
    return OpenRun(SOCKET_VERSION, RunOptions(**options))


def read(socket: ClientConnection) -> tuple[list[ServerMessage], int]:
    """Return all messages to the end, and the code that the server closed with."""
    messages: list[ServerMessage] = []
    with pytest.raises(ConnectionClosed) as closed:
        read_into(messages, socket)
    assert closed.value.rcvd is not None
    return messages, closed.value.rcvd.code


def read_into(messages: list[ServerMessage], socket: ClientConnection) -> None:
    while True:
        data = socket.recv(timeout=20)
        assert isinstance(data, bytes)
        messages.append(decode_server_message(data))


def events(messages: list[ServerMessage]) -> list[Event]:
    return [e for message in messages if isinstance(message, RunEvents) for e in message.events]


def refusal(socket: ClientConnection) -> tuple[Exception, int]:
    messages, code = read(socket)
    assert isinstance(messages[-1], RunRefused)
    return from_wire(messages[-1].error), code


def one_run(served: Served) -> None:
    """See that the server still runs what it is given."""
    build = GraphBuilder()
    gen = build.gen("a", build.text("hello"))
    with served.connect() as socket:
        send(socket, opening(), ExtendRun(build.piece()), CloseRun())
        messages, code = read(socket)
    assert code == 1000
    assert {e.node for e in events(messages) if isinstance(e, NodeFinished)} == {0, gen}


def test_a_run_grows_by_pieces_and_ends_when_it_is_closed(served: Served) -> None:
    build = GraphBuilder()
    first = build.gen("a", build.text("hello"))
    with served.connect() as socket:
        send(socket, opening(seed=3), ExtendRun(build.piece()))
        seen: list[Event] = []
        while not any(isinstance(e, NodeFinished) and e.node == first for e in seen):
            data = socket.recv(timeout=20)
            assert isinstance(data, bytes)
            seen += events([decode_server_message(data)])
        second = build.gen("b", first)
        send(socket, ExtendRun(build.piece()), CloseRun())
        messages, code = read(socket)
    seen += events(messages)
    assert code == 1000
    ends = [e.node for e in seen if isinstance(e, NodeFinished)]
    assert ends == [0, first, second]
    run = served.engine.runs[-1]
    assert run.options == RunOptions(seed=3)
    assert run.ran == ["0", "1", "2"]
    served.wait_until_idle()


def test_single_nodes_and_all_nodes_are_cancelled(served: Served) -> None:
    build = GraphBuilder()
    one, other = build.gen("held"), build.gen("held")
    with served.connect() as socket:
        send(socket, opening(), ExtendRun(build.piece()), CancelNodes((one, 77)))
        seen: list[Event] = []
        while not any(isinstance(e, NodeFailed) for e in seen):
            data = socket.recv(timeout=20)
            assert isinstance(data, bytes)
            seen += events([decode_server_message(data)])
        send(socket, CancelNodes(), CloseRun())
        messages, code = read(socket)
    failed = [e for e in seen + events(messages) if isinstance(e, NodeFailed)]
    assert code == 1000
    assert [e.node for e in failed] == [one, other]
    assert all(isinstance(from_wire(e.error), CancelledError) for e in failed)


def test_nodes_that_ended_at_the_client_fail_without_an_event(served: Served) -> None:
    stub = GraphNode(0, "lost", Text(("",)))
    after = GraphNode(1, "1", Gen("after"), 0)
    error = to_wire(ProgramError("it could not be sent"))
    with served.connect() as socket:
        send(
            socket,
            opening(),
            ExtendRun(RequestGraph((stub,)), {0: error}),
            ExtendRun(RequestGraph((after,), 1)),
            CloseRun(),
        )
        messages, code = read(socket)
    assert code == 1000
    (failed,) = events(messages)
    assert isinstance(failed, NodeFailed)
    assert failed.node == 1
    victim = from_wire(failed.error)
    assert isinstance(victim, GenerationError)
    assert isinstance(victim.__cause__, ProgramError)


def piece(base: int = 0) -> ExtendRun:
    return ExtendRun(RequestGraph((GraphNode(base, str(base), Gen("a")),), base))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([piece()], "first message is 'open'"),
        ([CloseRun()], "first message is 'open'"),
        ([OpenRun(99)], "speaks version 1 .* and not 99"),
        ([opening(), opening()], "'open' came twice"),
        ([opening(), piece(5)], "starts at"),
        ([opening(), piece(), piece()], "starts at"),
        ([opening(), piece(), CloseRun(), piece(1)], MAY_BE_LATE),
        ([opening(), b""], "no message of a run"),
        ([opening(), b"\xc1" * 100], "no message of a run"),
        ([opening(), b"\x91" * 4000], "no message of a run"),  # lists in lists, far too deep
        ([opening(), msgspec.msgpack.encode({"type": "hack"})], "no message of a run"),
        ([opening(), msgspec.msgpack.encode({"type": "extend"})], "no message of a run"),
        ([opening(), "text"], "binary frames"),
        ([opening(), ExtendRun(RequestGraph(()), {3: to_wire(ProgramError("x"))})], "node 3"),
        (
            [opening(), ExtendRun(RequestGraph((GraphNode(0, "0", Gen("a"), 7),)))],
            "has an edge to 7",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_words_and_harms_nobody(
    served: Served, messages: list[ClientMessage | bytes | str], words: str
) -> None:
    build = GraphBuilder()
    build.gen("held")
    with served.connect() as bystander, served.connect() as socket:
        send(bystander, opening(), ExtendRun(build.piece()), CloseRun())
        for message in messages:
            if isinstance(message, bytes | str):
                socket.send(message)
            else:
                send(socket, message)
        if words == MAY_BE_LATE:
            read(socket)
        else:
            error, code = refusal(socket)
            assert isinstance(error, ProgramError)
            assert re.search(words, str(error))
            assert code == 4400
        send(bystander, CancelNodes())
        messages_, code = read(bystander)
        assert code == 1000
        assert isinstance(events(messages_)[-1], NodeFailed)
    one_run(served)
    served.wait_until_idle()


def test_a_closed_run_takes_no_pieces(served: Served) -> None:
    build = GraphBuilder()
    build.gen("held")
    with served.connect() as socket:
        send(socket, opening(), ExtendRun(build.piece()), CloseRun(), piece(1))
        error, code = refusal(socket)
    assert "no pieces after 'close'" in str(error)
    assert code == 4400


@settings(max_examples=40, deadline=None)
@given(noise=st.lists(st.binary(max_size=60), min_size=1, max_size=4), is_open=st.booleans())
def test_noise_is_refused(served: Served, noise: list[bytes], is_open: bool) -> None:
    with served.connect() as socket:
        if is_open:
            send(socket, opening())
        for data in noise:
            try:
                socket.send(data)
            except ConnectionClosed:
                break
        error, code = refusal(socket)
    assert isinstance(error, ProgramError)
    assert code == 4400


def test_a_message_that_is_too_long_is_refused(served: Served) -> None:
    text = ExtendRun(RequestGraph((GraphNode(0, "0", Text(("x" * MAX_BYTES,))),)))
    with served.connect() as socket:
        send(socket, opening(), text)
        error, code = refusal(socket)
    assert isinstance(error, BodyTooLargeError)
    assert "4,096" in str(error)
    assert code == 4413
    one_run(served)


def test_a_frame_longer_than_any_message_ends_its_socket_alone() -> None:
    with Served() as served:
        with served.connect() as socket:
            send(socket, opening())
            with suppress(ConnectionClosed):
                socket.send(b"\0" * (17 << 20))
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=20)
            # the reason is lost where the network was still full of the frame
            assert closed.value.rcvd is None or closed.value.rcvd.code == 1009
        one_run(served)
        served.wait_until_idle()


def test_a_server_that_takes_longer_messages_reads_them() -> None:
    limit = 20 << 20
    node = GraphNode(0, "0", Text(("x" * (17 << 20),)))
    with (
        Served(max_body_bytes=limit, read_bytes=limit) as served,
        served.connect(max_size=None) as socket,
    ):
        send(socket, opening(), ExtendRun(RequestGraph((node,))), CloseRun())
        with suppress(ConnectionClosed):
            while True:
                socket.recv(timeout=20)
        assert socket.close_code == 1000


def test_a_run_may_not_send_without_end() -> None:
    limits = SocketLimits(max_run_bytes=6000)
    with Served(limits=limits) as served, served.connect() as socket:
        send(socket, opening())
        for i in range(3):
            node = GraphNode(i, str(i), Text(("x" * 3000,)))
            send(socket, ExtendRun(RequestGraph((node,), i)))
        error, code = refusal(socket)
    assert isinstance(error, BodyTooLargeError)
    assert "6,000" in str(error)
    assert code == 4413


def test_limits_are_above_zero() -> None:
    with pytest.raises(EngineConfigError, match="max_sockets"):
        SocketLimits(max_sockets=0)


def test_who_says_nothing_is_asked_to_leave() -> None:
    limits = SocketLimits(open_timeout_s=0.1)
    with Served(limits=limits) as served, served.connect() as socket:
        error, code = refusal(socket)
    assert "send 'open'" in str(error)
    assert code == 4408


def test_a_client_that_goes_away_cancels_its_run(served: Served) -> None:
    build = GraphBuilder()
    build.gen("held")
    served.engine.cancelled.clear()
    with Raw(served) as raw:
        raw.send(opening(), ExtendRun(build.piece()))
        raw.socket.recv(100)
    assert served.engine.cancelled.wait(10)
    served.wait_until_idle()


def test_a_client_that_closes_orderly_without_a_word_cancels_its_run(served: Served) -> None:
    build = GraphBuilder()
    build.gen("held")
    served.engine.cancelled.clear()
    with served.connect() as socket:
        send(socket, opening(), ExtendRun(build.piece()))
        socket.recv(timeout=20)
    assert served.engine.cancelled.wait(10)
    served.wait_until_idle()


class Raw:
    """A client that shakes hands and then does nothing of its own: no pongs, no reading."""

    def __init__(self, served: Served) -> None:
        self.socket = sockets.socket()
        self.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
        self.socket.settimeout(2.0)
        self.socket.connect(("127.0.0.1", int(served.server.url.rsplit(":", 1)[1])))
        self.socket.sendall(
            f"GET {SOCKET_PATH} HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\n"
            "connection: upgrade\r\nsec-websocket-version: 13\r\n"
            "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        assert b" 101 " in self.socket.recv(4096)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *messages: ClientMessage) -> None:
        for message in messages:
            data = encode_message(message)
            self.socket.sendall(b"\x82\xfe" + len(data).to_bytes(2, "big") + b"\0\0\0\0" + data)


def test_a_client_that_answers_no_ping_is_gone() -> None:
    build = GraphBuilder()
    build.gen("held")
    with Served(ping_s=0.2) as served, Raw(served) as raw:
        raw.send(opening(), ExtendRun(build.piece()))
        assert served.engine.cancelled.wait(10)
        served.wait_until_idle()


def send_without_end(raw: Raw) -> None:
    for i in range(1 << 20):
        node = GraphNode(i, str(i), Text(("x" * 3000,)))
        raw.send(ExtendRun(RequestGraph((node,), i)))


def test_a_client_that_reads_nothing_loses_its_run() -> None:
    limits = SocketLimits(send_timeout_s=0.2, max_pending_events=8)
    with Served(limits=limits) as served:
        with Raw(served) as raw:
            raw.send(opening())
            with pytest.raises(OSError):  # noqa: PT011  # nobody takes it, or it is cut
                send_without_end(raw)
            assert len(served.engine.runs[-1].state.nodes) < 1 << 17
            served.wait_until_idle()
        one_run(served)


def test_small_messages_are_sent_at_once() -> None:
    async def no_delay() -> int:
        """Return whether asyncio has set TCP_NODELAY on the server's side of a connection."""
        found = asyncio.get_running_loop().create_future()

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            raw = writer.get_extra_info("socket")
            found.set_result(raw.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as listening:
            server = await asyncio.start_server(accept, sock=listening)
            _, writer = await asyncio.open_connection(*listening.getsockname())
            value: int = await found
            writer.close()
            server.close()
            return value

    assert asyncio.run(no_delay())


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_the_kernel_drops_a_connection_whose_peer_takes_nothing() -> None:
    with bind("127.0.0.1", 0) as listening:
        listening.listen()
        with (
            sockets.create_connection(listening.getsockname()),
            listening.accept()[0] as accepted,
        ):
            unread_ms = accepted.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_USER_TIMEOUT)
    assert unread_ms == 60_000


def test_a_long_wait_is_told_of(served: Served) -> None:
    with Served(keep_alive_s=0.05) as quick, quick.connect() as socket:
        send(socket, opening())
        data = socket.recv(timeout=20)
        assert isinstance(data, bytes)
        assert decode_server_message(data) == RunEvents(())


def test_a_server_that_stops_says_so_and_cancels_its_runs() -> None:
    with Served() as served, served.connect() as socket:
        build = GraphBuilder()
        build.gen("held")
        send(socket, opening(), ExtendRun(build.piece()))
        socket.recv(timeout=20)
        served.server.stop()
        _, code = read(socket)
        assert code == 1012
        assert served.engine.cancelled.wait(10)


def test_a_stopped_engine_refuses_with_its_own_error() -> None:
    with Served() as served:
        served.engine.close()
        with served.connect() as socket:
            send(socket, opening())
            error, code = refusal(socket)
    assert isinstance(error, EngineStoppedError)
    assert code == 4503


def test_too_many_sockets_are_refused_with_a_status() -> None:
    with Served(limits=SocketLimits(max_sockets=1)) as served:
        with served.connect():
            with pytest.raises(InvalidStatus) as caught, served.connect():
                pass
            assert caught.value.response.status_code == 503
            body = msgspec.json.decode(caught.value.response.body, type=ErrorResponse)
            assert "1 sockets are open" in body.error.message
        served.wait_until_idle()
        deadline = time.monotonic() + 10
        while True:  # the place is free once the server has seen the end
            try:
                with served.connect():
                    break
            except InvalidStatus:
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_a_web_page_may_not_open_a_socket(served: Served) -> None:
    with (
        pytest.raises(InvalidStatus) as caught,
        served.connect(origin="https://evil.example"),
    ):
        pass
    assert caught.value.response.status_code == 403
    assert b"web page" in caught.value.response.body


@pytest.mark.parametrize("given_key", [None, "wrong", KEY + "x", "é" * 5])
def test_a_socket_wants_the_key_as_requests_do(
    given_key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"), Served(api_key=KEY) as served:
        assert served.http.get("/health").status_code == 200
        value = b"Bearer " + (given_key or "").encode("latin-1")
        headers = {} if given_key is None else {"authorization": value.decode("latin-1")}
        raw = [] if given_key is None else [(b"authorization", value)]
        for path in ("/v1/model", "/v1/nothing"):
            answer = served.http.get(path, headers=raw)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        error = from_wire(msgspec.json.decode(answer.content, type=ErrorResponse).error)
        assert not isinstance(error, BackendError)
        with pytest.raises(InvalidStatus) as caught, served.connect(additional_headers=headers):
            pass
        assert caught.value.response.status_code == 401
        says = b"wants a key" if given_key is None else b"is not this server's"
        assert says in caught.value.response.body
        right = {"authorization": f"Bearer {KEY}"}
        assert served.http.get("/v1/model", headers=right).status_code == 200
        with served.connect(additional_headers=right) as socket:
            send(socket, opening(), CloseRun())
            assert read(socket) == ([], 1000)
    told = [r for r in caplog.records if not r.name.startswith("websockets.client")]
    assert KEY not in "\n".join(r.getMessage() for r in told)


@pytest.mark.parametrize("key", ["", "two words", "é", "line\nbreak"])
def test_a_key_that_fits_no_header_is_refused(key: str) -> None:
    engine = FakeEngine()
    with pytest.raises(EngineConfigError, match="printable ASCII") as caught:
        create_app(engine, model_name="fake", capabilities={}, api_key=key)
    engine.close()
    assert not key or key not in str(caught.value)
