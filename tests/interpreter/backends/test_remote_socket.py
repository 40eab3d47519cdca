"""Graphs that grow on a socket: when there is one, when there is none, and when it breaks."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fake_engine import FakeEngine
from tests.support.graphs import GraphBuilder, graphs
from tests.support.recorder import Recorder
from tests.support.runs import extend_with_reads, start_run
from tests.support.socket_proxy import Fault, SocketProxy

import umbel as ub
from umbel.interpreter.backends import remote
from umbel.interpreter.backends.remote import RemoteBackend
from umbel.lang.errors import (
    AuthenticationError,
    BackendConnectionError,
    BackendError,
    BackendTimeoutError,
    BodyTooLargeError,
    CancelledError,
    GenerationError,
    NodeTimeoutError,
    ProgramError,
    UnsupportedFeatureError,
)
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen
from umbel.lang.results import RunOptions
from umbel.runtime.server import BackgroundServer, SocketLimits, create_app

CAPABILITIES = {"token_native": True}
KEY = "a-key-that-must-not-be-seen"


class Proxied:
    """An engine of one test's own, behind a proxy."""

    def __init__(self, *held: str, fault: Fault | None = None, **options: Any) -> None:
        self.engine = FakeEngine(held)
        client = options.pop("client", {})
        app = create_app(self.engine, model_name="fake", capabilities=CAPABILITIES, **options)
        self.server = BackgroundServer(app)
        self.proxy = SocketProxy(self.server.url, fault)
        self.backend = RemoteBackend(self.proxy.url, **client)

    def __enter__(self) -> Proxied:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        self.proxy.close()
        self.server.close(force=True)
        self.engine.close()

    def num_sockets(self) -> int:
        return sum(b"/socket" in line for line in self.proxy.counts.requests)


@pytest.fixture(scope="module")
def shared() -> Iterator[Proxied]:
    with Proxied() as proxied:
        yield proxied


@ub.function
def whole(s: ub.State) -> None:
    s += "hello " + ub.gen("a") + ub.gen("b")


@ub.function
def growing(s: ub.State) -> None:
    s += "hello " + ub.gen("a")
    for i in range(3):
        s += f" {s['a']}" + ub.gen(f"b{i}")
        assert s[f"b{i}"]


def test_a_whole_graph_is_one_request_and_no_socket() -> None:
    with Proxied() as proxied:
        whole.options(backend=proxied.backend, seed=1).run()
        assert proxied.num_sockets() == 0
        assert len(proxied.engine.runs) == 1


def test_a_graph_that_grows_is_one_socket_and_one_run_of_the_engine() -> None:
    with Proxied() as proxied:
        result = growing.options(backend=proxied.backend, seed=1).run()
        assert proxied.num_sockets() == 1
        assert len(proxied.engine.runs) == 1
        with RemoteBackend(proxied.proxy.url, socket="never") as posting:
            posted = growing.options(backend=posting, seed=1).run()
        assert proxied.num_sockets() == 1
        assert len(proxied.engine.runs) > 3
        assert posted.text() == result.text()
        assert len(result.text()) > 20


@pytest.mark.parametrize("status", [200, 400, 403, 404, 405, 426, 501])
def test_a_proxy_that_refuses_the_upgrade_costs_a_log_line_and_no_result(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxied(fault=Fault(refuse_upgrade=status)) as proxied, caplog.at_level(logging.INFO):
        first = growing.options(backend=proxied.backend, seed=1).run()
        again = growing.options(backend=proxied.backend, seed=1).run()
        assert proxied.num_sockets() == 1  # it is not asked twice
        proxied.proxy.fault.refuse_upgrade = 0
        with RemoteBackend(proxied.proxy.url, socket="required") as backend:
            direct = growing.options(backend=backend, seed=1).run()
    assert first.text() == again.text() == direct.text()
    (line,) = [r.getMessage() for r in caplog.records if r.name == remote.__name__]
    assert "has no socket" in line
    assert str(status) in line


def test_a_server_that_knows_no_sockets_is_asked_for_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SOCKET_VERSION", 99)  # of a client from a later time
    with caplog.at_level(logging.INFO), Proxied() as proxied:
        growing.options(backend=proxied.backend, seed=1).run()
        assert proxied.num_sockets() == 0
        with pytest.raises(UnsupportedFeatureError, match="versions 1 of it, and not 99"):
            RemoteBackend(proxied.proxy.url, socket="required")
    assert len([r for r in caplog.records if r.name == remote.__name__]) == 1


def test_a_socket_that_is_required_and_refused_fails_the_run_by_name() -> None:
    with Proxied(fault=Fault(refuse_upgrade=404), client={"socket": "required"}) as proxied:
        sink = Recorder()
        proxied.backend.open(RunOptions(), sink).extend(named_gen())
        sink.wait(0)
        assert isinstance(sink.errors[0], UnsupportedFeatureError)
        assert "'answer' (0): " in str(sink.errors[0])
        assert "status 404" in str(sink.errors[0])


def test_a_server_with_no_socket_to_spare_gets_posts_for_this_run_alone() -> None:
    limits = SocketLimits(max_sockets=1)
    with Proxied("held", socket_limits=limits) as proxied:
        sink = Recorder()
        build = GraphBuilder()
        build.gen("held")
        holding = proxied.backend.open(RunOptions(), sink)
        holding.extend(build.piece())
        sink.wait_started(0)
        growing.options(backend=proxied.backend, seed=1).run()
        assert len(proxied.engine.runs) > 3
        proxied.engine.release("held")
        holding.close()
        sink.wait(0)


def test_sockets_of_one_client_are_bounded_and_nobody_waits_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "MAX_SOCKETS", 2)
    with Proxied("held") as proxied:
        sinks = [Recorder() for _ in range(6)]
        for sink in sinks:
            build = GraphBuilder()
            build.gen("held")
            session = proxied.backend.open(RunOptions(), sink)
            session.extend(build.piece())
            session.close()
        for sink in sinks:
            sink.wait_started(0)  # each has begun, though no other has ended
        assert proxied.num_sockets() == 2
        proxied.engine.release("held")
        for sink in sinks:
            sink.wait(0)


def named_gen() -> RequestGraph:
    return RequestGraph((GraphNode(0, "0", Gen("answer")),))


@pytest.mark.parametrize("use", ["auto", "never"])
@pytest.mark.parametrize("fault", ["cut", "server"])
def test_a_dropped_connection_fails_each_unfinished_node_by_name(use: str, fault: str) -> None:
    with Proxied("slow", client={"socket": use}) as proxied:
        build = GraphBuilder()
        done, slow = build.text("done"), build.gen("slow")
        after = build.gen("after", slow)
        sink, _ = start_run(proxied.backend, build)
        sink.wait(done)
        sink.wait_started(slow)
        if fault == "cut":
            proxied.proxy.cut()
        else:
            proxied.server.close(force=True)
        sink.wait(slow, after)
        for node, label in ((slow, "'slow' (1)"), (after, "'after' (2)")):
            error = sink.errors[node]
            assert isinstance(error, BackendConnectionError)
            assert error.retryable
            assert str(error).startswith(f"{label}: the connection to {proxied.proxy.url} broke")
        assert done in sink.results
        assert proxied.engine.cancelled.wait(10)


def test_what_comes_after_a_drop_fails_at_once() -> None:
    with Proxied("slow") as proxied:
        build = GraphBuilder()
        slow = build.gen("slow")
        sink, session = start_run(proxied.backend, build)
        sink.wait_started(slow)
        proxied.proxy.cut()
        sink.wait(slow)
        later = build.gen("later")
        session.extend(build.piece())
        sink.wait(later)
        assert isinstance(sink.errors[later], BackendConnectionError)
        assert str(sink.errors[later]).startswith("'later' (1): ")
        session.cancel()
        session.close()


def test_a_connection_that_stalls_ends_within_the_bound() -> None:
    options: dict[str, Any] = {"keep_alive_s": 0.1, "client": {"silence_timeout": 1.5}}
    with Proxied("slow", **options) as proxied:
        build = GraphBuilder()
        slow = build.gen("slow")
        sink, _ = start_run(proxied.backend, build)
        sink.wait_started(slow)
        time.sleep(2.0)  # longer than the bound, but not silent
        assert slow not in sink.errors
        proxied.proxy.stall()
        sink.wait(slow)
        error = sink.errors[slow]
        assert isinstance(error, BackendTimeoutError)
        assert error.retryable
        assert str(error).startswith("'slow' (0): ")
        assert "fell silent" in str(error)


def test_a_handshake_that_is_never_answered_ends_in_time() -> None:
    with Proxied(client={"connect_timeout": 0.3}) as proxied:
        proxied.proxy.stall()
        sink = Recorder()
        proxied.backend.open(RunOptions(), sink).extend(named_gen())
        sink.wait(0)
        assert isinstance(sink.errors[0], BackendConnectionError)
        assert "'answer' (0): can't connect to" in str(sink.errors[0])


def test_a_run_out_of_time_on_a_dead_line_is_ended_by_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("umbel.interpreter.backends.remote_socket.TIMEOUT_GRACE_S", 0.1)
    with Proxied("slow") as proxied:
        build = GraphBuilder()
        slow = build.gen("slow")
        sink, _ = start_run(proxied.backend, build, RunOptions(timeout=0.5))
        sink.wait_started(slow)
        proxied.proxy.stall()
        sink.wait(slow)
        assert isinstance(sink.errors[slow], NodeTimeoutError)
        assert "'slow' (0): " in str(sink.errors[slow])


@settings(max_examples=40, deadline=None)
@given(nodes=graphs(), data=st.data())
def test_a_drop_at_any_byte_ends_every_node_and_leaves_nothing_behind(
    shared: Proxied, nodes: list[GraphNode], data: st.DataObject
) -> None:
    direct = Recorder()
    shared.engine.open(RunOptions(seed=1), direct).extend(RequestGraph(tuple(nodes)))
    direct.wait(*range(len(nodes)))
    at = data.draw(st.integers(0, 1500))
    is_up = data.draw(st.booleans())
    shared.proxy.fault = Fault(cut_after_sent=at) if is_up else Fault(cut_after=at)
    remote_sink = Recorder()
    session = shared.backend.open(RunOptions(seed=1), remote_sink)
    extend_with_reads(session, remote_sink, nodes, data)
    session.close()
    remote_sink.wait(*range(len(nodes)))
    shared.proxy.fault = Fault()
    for i, node in enumerate(nodes):
        error = remote_sink.errors.get(i)
        if isinstance(error, BackendConnectionError):
            assert error.retryable
            assert str(error).startswith(node.label + ": ")
        else:  # whatever came through is what it would have been
            assert remote_sink.outcome(i) == direct.outcome(i)
    deadline = time.monotonic() + 10
    while any(run.state.unfinished() for run in list(shared.engine.runs)):
        assert time.monotonic() < deadline, "a run was left over"
        time.sleep(0.005)
    shared.engine.runs.clear()
    assert shared.backend.stats()  # the connection for requests still works


def test_a_piece_over_the_servers_limit_is_refused_by_name_and_others_go_on() -> None:
    for use in ("auto", "never"):
        with Proxied(max_body_bytes=3000, client={"socket": use}) as proxied:
            build = GraphBuilder()
            before = build.gen("before")
            sink, session = start_run(proxied.backend, build)
            sink.wait(before)
            large = build.gen("large", build.text("x" * 3000, before))
            session.extend(build.piece())
            sink.wait(large)
            error = sink.errors[large]
            assert isinstance(error, BodyTooLargeError)
            assert "'large' (2): this piece of the run is 3," in str(error)
            assert f"{proxied.proxy.url} takes 3,000" in str(error)
            victim, free = build.gen("victim", large), build.gen("free", before)
            join = build.join([large, free], None, policy="collect", mode="append")
            last = build.gen("last", join)
            session.extend(build.piece())
            session.close()
            sink.wait(victim, free, join, last)
            assert isinstance(sink.errors[victim], GenerationError)
            assert isinstance(sink.errors[victim].__cause__, BodyTooLargeError)
            assert sink.results[join].text == sink.results[before].text + sink.results[free].text
            (refused, none) = sink.results[join].branch_errors
            assert refused is not None
            assert refused.type == "BodyTooLargeError"
            assert none is None
            assert last in sink.results


def test_text_that_is_not_unicode_fails_its_piece_alone(shared: Proxied) -> None:
    build = GraphBuilder()
    bad = build.text("\ud800")
    sink, session = start_run(shared.backend, build)
    good = build.gen("good")
    session.extend(build.piece())
    session.close()
    sink.wait(bad, good)
    assert isinstance(sink.errors[bad], ProgramError)
    assert good in sink.results


def test_the_key_opens_requests_and_sockets_and_is_in_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG), Proxied(api_key=KEY, client={"api_key": KEY}) as proxied:
        growing.options(backend=proxied.backend, seed=1).run()
        whole.options(backend=proxied.backend, seed=1).run()
        assert proxied.num_sockets() == 1
        assert KEY not in repr(proxied.backend)
        for wrong, says in ((None, "wants a key"), ("another", "is not this server's")):
            with pytest.raises(AuthenticationError, match=says):
                RemoteBackend(proxied.proxy.url, api_key=wrong)
        proxied.backend._headers = {}  # a key that was withdrawn meanwhile
        sink = Recorder()
        proxied.backend.open(RunOptions(), sink).extend(named_gen())
        sink.wait(0)
        assert isinstance(sink.errors[0], AuthenticationError)
    assert KEY not in caplog.text
    assert len(caplog.records) > 3


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "é"])
def test_a_key_that_fits_no_header_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ProgramError, match="api_key is not fit") as caught:
        RemoteBackend("http://127.0.0.1:1", api_key=key)
    assert not key or key not in str(caught.value)


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ProgramError, match="api_key=") as caught:
        RemoteBackend("http://me:secret@127.0.0.1:1")
    assert "secret" not in str(caught.value)


def test_a_word_that_is_no_way_to_use_sockets_is_refused() -> None:
    with pytest.raises(ProgramError, match="auto, never, required"):
        RemoteBackend("http://127.0.0.1:1", socket="sometimes")  # type: ignore[arg-type]


def test_many_sockets_share_one_thread() -> None:
    with Proxied("held") as proxied:
        before = threading.active_count()
        sinks = [Recorder() for _ in range(100)]
        for sink in sinks:
            build = GraphBuilder()
            build.gen("held")
            session = proxied.backend.open(RunOptions(), sink)
            session.extend(build.piece())
            session.close()
        for sink in sinks:
            sink.wait_started(0)
        assert proxied.num_sockets() == 100
        assert threading.active_count() <= before
        proxied.engine.release("held")
        for sink in sinks:
            sink.wait(0)


def test_closing_the_backend_drops_its_sockets() -> None:
    with Proxied("held") as proxied:
        build = GraphBuilder()
        gen = build.gen("held")
        sink, _ = start_run(proxied.backend, build)
        sink.wait_started(gen)
        proxied.backend.close()
        sink.wait(gen)
        assert type(sink.errors[gen]) is BackendError
        assert proxied.engine.cancelled.wait(10)


def test_a_run_that_is_cancelled_before_its_socket_is_open_ends() -> None:
    with Proxied("held") as proxied:
        proxied.proxy.stall()
        build = GraphBuilder()
        gen = build.gen("held")
        sink, session = start_run(proxied.backend, build)
        session.cancel()
        session.close()
        proxied.proxy.flow()
        sink.wait(gen)
        assert isinstance(sink.errors[gen], CancelledError)


def test_a_run_that_is_over_is_not_kept_for_its_time_limit() -> None:
    with Proxied() as proxied:
        sink = Recorder()
        session = proxied.backend.open(RunOptions(timeout=3600.0), sink)
        session.extend(named_gen())
        session.close()
        sink.wait(0)
        kept = weakref.ref(session)
        del session
        deadline = time.monotonic() + 10
        while kept() is not None:
            assert time.monotonic() < deadline, "the session is still there"
            gc.collect()
            time.sleep(0.01)


def bytes_sent(use: str, reads: int) -> int:
    """Return how many bytes a run with so many reads sends, without those of asking the server."""
    with Proxied(client={"socket": use}) as proxied:
        before = proxied.proxy.counts.sent
        many_reads.options(backend=proxied.backend, seed=1).run(reads)
        return proxied.proxy.counts.sent - before


@ub.function
def many_reads(s: ub.State, reads: int) -> None:
    s += "word " * 400
    for i in range(reads):
        s += ub.gen(f"a{i}")
        assert s[f"a{i}"]


def test_a_socket_carries_each_piece_once_and_posts_carry_what_went_before() -> None:
    few, many = bytes_sent("required", 10), bytes_sent("required", 20)
    piece = (many - few) / 10
    assert piece < 250  # a gen and its frame, whatever the prompt
    assert few < 2000 + 700 + 10 * piece + 250  # the prompt once, and a handshake
    few_posted, many_posted = bytes_sent("never", 10), bytes_sent("never", 20)
    assert few_posted > 10 * 2000  # the prompt each time
    assert many_posted > 10 * many
    assert many_posted - few_posted > few_posted  # it grows faster than the reads
