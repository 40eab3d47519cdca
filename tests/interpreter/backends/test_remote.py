"""RemoteBackend against a real server on loopback whose engine is a hash of the prefix.

What holds for runs that grow is tested over a socket and over requests for each piece.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.fake_engine import FakeEngine
from tests.support.graphs import GraphBuilder, graphs
from tests.support.recorder import Recorder
from tests.support.runs import extend_with_reads, start_run

from umbel.interpreter.backends.base import Backend
from umbel.interpreter.backends.remote import RemoteBackend, SocketUse
from umbel.lang.errors import (
    BackendConnectionError,
    BackendError,
    BackendStatusError,
    BackendTimeoutError,
    CancelledError,
    EngineStoppedError,
    GenerationError,
    NodeTimeoutError,
    ProgramError,
)
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Ref, Select, Text
from umbel.lang.results import RunOptions
from umbel.runtime.server import BackgroundServer, create_app

CAPABILITIES = {"token_native": True, "regex": True, "select_methods": ["sum"], "later": 1}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["required", "never"])
def socket_use(request: pytest.FixtureRequest) -> SocketUse:
    use: SocketUse = request.param
    return use


@pytest.fixture(scope="module")
def backend(engine: FakeEngine, socket_use: SocketUse) -> Iterator[RemoteBackend]:
    app = create_app(engine, model_name="fake", capabilities=CAPABILITIES)
    with (
        BackgroundServer(app) as server,
        RemoteBackend(server.url, socket=socket_use) as backend,
    ):
        yield backend


class Served:
    """An engine of one test's own, with gens that wait."""

    def __init__(self, use: SocketUse, *held: str, **app_options: float) -> None:
        self.engine = FakeEngine(held)
        app = create_app(
            self.engine,
            model_name="fake",
            capabilities=CAPABILITIES,
            keep_alive_s=app_options.get("keep_alive_s", 10.0),
        )
        self.server = BackgroundServer(app)
        self.backend = RemoteBackend(
            self.server.url,
            silence_timeout=app_options.get("silence_timeout", 60.0),
            socket=use,
        )

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()
        self.server.close(force=True)
        self.engine.close()


def test_a_server_says_what_it_honours(backend: RemoteBackend) -> None:
    as_backend: Backend = backend
    assert as_backend.capabilities.token_native
    assert as_backend.capabilities.regex
    assert not as_backend.capabilities.grammar
    assert as_backend.capabilities.select_methods == frozenset({"sum"})
    assert backend.model_name == "fake"
    assert backend.stats()["forward_s"] == 1.5


def test_a_run_gives_what_the_engine_gives(backend: RemoteBackend, engine: FakeEngine) -> None:
    build = GraphBuilder()
    gen = build.gen("a", build.text("hello"))
    select = build.add(Select("s", ("yes", "no")), gen)
    graph = build.piece()
    options = RunOptions(seed=5, row=2)
    direct, remote = Recorder(), Recorder()
    engine.open(options, direct).extend(graph)
    backend.open(options, remote).extend(graph)
    direct.wait(select)
    remote.wait(select)
    # an infinite log-probability travels, and so does a line separator
    assert remote.events == direct.events
    assert remote.text(gen) == remote.results[gen].text


@settings(max_examples=60, deadline=None)
@given(nodes=graphs(), data=st.data())
def test_a_run_in_pieces_gives_what_one_piece_gives(
    backend: RemoteBackend, engine: FakeEngine, nodes: list[GraphNode], data: st.DataObject
) -> None:
    direct, remote = Recorder(), Recorder()
    engine.open(RunOptions(seed=1), direct).extend(RequestGraph(tuple(nodes)))
    session = backend.open(RunOptions(seed=1), remote)
    extend_with_reads(session, remote, nodes, data)
    session.close()
    everything = range(len(nodes))
    direct.wait(*everything)
    remote.wait(*everything)
    assert {i: remote.outcome(i) for i in everything} == {i: direct.outcome(i) for i in everything}


def test_a_later_piece_carries_its_prefix_and_runs_only_itself(
    backend: RemoteBackend, engine: FakeEngine, socket_use: SocketUse
) -> None:
    if socket_use != "never":
        pytest.skip("on a socket the server keeps what went before")
    build = GraphBuilder()
    other = build.gen("other", build.text("not mine"))
    first = build.gen("a", build.text("mine"))
    sink, session = start_run(backend, build)
    sink.wait(first, other)
    again = build.gen("b", build.add(Text(("and ", Ref(other))), first))
    session.extend(build.piece())
    sink.wait(again)
    run = engine.runs[-1]
    assert run.ran == [str(first + 1), str(again)]
    # the prefix, the value that is read (not what it was made from), and the new nodes
    assert [node.address for node in run.state.nodes] == ["1", "2", "3", "4", "5"]


def test_nodes_wait_for_what_they_build_on_and_others_do_not(socket_use: SocketUse) -> None:
    with Served(socket_use, "slow") as served:
        build = GraphBuilder()
        slow = build.gen("slow")
        sink, session = start_run(served.backend, build)
        sink.wait_started(slow)
        behind = build.gen("behind", slow)
        free = build.gen("free")
        session.extend(build.piece())
        sink.wait(free)
        assert behind not in sink.results
        served.engine.release("slow")
        sink.wait(slow, behind)


def test_a_late_join_takes_every_branch_that_has_ended(backend: RemoteBackend) -> None:
    build = GraphBuilder()
    tips = build.fork(None, 3)
    ends = [build.gen(name, tip) for name, tip in zip("abc", tips, strict=True)]
    sink, session = start_run(backend, build)
    sink.wait(*ends)
    join = build.join(ends, None, policy="any", mode="append")
    after = build.gen("after", join)
    session.extend(build.piece())
    sink.wait(after)
    assert sink.results[join].text == "".join(sink.results[end].text for end in ends)
    assert sink.results[join].branch_errors == ()


def test_an_any_join_over_two_posts_stops_the_branch_it_does_not_need(
    socket_use: SocketUse,
) -> None:
    with Served(socket_use, "slow", "fast") as served:
        build = GraphBuilder()
        slow_tip, fast_tip = build.fork(None, 2)
        slow, fast = build.gen("slow", slow_tip), build.gen("fast", fast_tip)
        sink, session = start_run(served.backend, build)
        sink.wait_started(slow)
        sink.wait_started(fast)
        join = build.join([slow, fast], None, policy="any", mode="append")
        session.extend(build.piece())
        served.engine.release("fast")
        sink.wait(join, slow)
        assert sink.results[join].text == sink.results[fast].text
        assert isinstance(sink.errors[slow], CancelledError)
        if socket_use == "never":  # on a socket the engine knows the join itself
            assert served.engine.cancelled.wait(10)


def test_cancelling_a_branch_stops_it_on_the_server_and_nothing_else(socket_use: SocketUse) -> None:
    with Served(socket_use, "a", "b") as served:
        build = GraphBuilder()
        a, b = build.gen("a"), build.gen("b")
        sink, session = start_run(served.backend, build)
        sink.wait_started(a)
        sink.wait_started(b)
        session.cancel([a])
        sink.wait(a)
        assert isinstance(sink.errors[a], CancelledError)
        assert served.engine.cancelled_nodes.wait(10)
        assert not served.engine.cancelled.is_set()
        served.engine.release("b")
        sink.wait(b)
        assert b in sink.results


def test_cancelling_a_run_cancels_it_on_the_server(socket_use: SocketUse) -> None:
    with Served(socket_use, "a") as served:
        build = GraphBuilder()
        after = build.gen("after", build.gen("a"))
        sink, session = start_run(served.backend, build)
        sink.wait_started(0)
        session.cancel()
        sink.wait(0, after)
        assert isinstance(sink.errors[0], CancelledError)
        assert served.engine.cancelled.wait(10)


def test_closing_the_backend_ends_every_node(socket_use: SocketUse) -> None:
    with Served(socket_use, "a") as served:
        build = GraphBuilder()
        gen = build.gen("a")
        sink, session = start_run(served.backend, build)
        build.gen("waits", gen)
        session.extend(build.piece())
        sink.wait_started(gen)
        served.backend.close()
        sink.wait(0, 1)
        assert {type(error) for error in sink.errors.values()} == {BackendError}
        assert served.engine.cancelled.wait(10)
        session.cancel()
        session.close()
        with pytest.raises(BackendError, match="closed"):
            session.extend(RequestGraph((GraphNode(2, "2", Gen("c")),), base=2))
        with pytest.raises(BackendError, match="closed"):
            served.backend.open(RunOptions(), sink)
        served.backend.close()


def test_a_server_that_dies_fails_what_has_not_ended(socket_use: SocketUse) -> None:
    with Served(socket_use, "a") as served:
        build = GraphBuilder()
        done, gen = build.text("done"), build.gen("a")
        after = build.text("after", gen)
        sink, session = start_run(served.backend, build)
        sink.wait_started(gen)
        served.server.close(force=True)
        sink.wait(done, gen, after)
        assert done in sink.results
        for node in (gen, after):
            error = sink.errors[node]
            assert isinstance(error, BackendConnectionError)
            assert error.retryable
        later = build.gen("later", done)
        session.extend(build.piece())
        sink.wait(later)
        assert isinstance(sink.errors[later], BackendConnectionError)


def test_an_engine_that_stops_fails_nodes_with_its_own_error(socket_use: SocketUse) -> None:
    with Served(socket_use, "a") as served:
        build = GraphBuilder()
        gen = build.gen("a")
        sink, session = start_run(served.backend, build)
        sink.wait_started(gen)
        served.engine.close()
        sink.wait(gen)
        assert isinstance(sink.errors[gen], EngineStoppedError)
        later = build.gen("later")
        session.extend(build.piece())
        sink.wait(later)  # answered with a status, from which the same error is rebuilt
        assert isinstance(sink.errors[later], EngineStoppedError)


def test_what_a_failed_node_carries_is_poisoned_and_names_it(backend: RemoteBackend) -> None:
    build = GraphBuilder()
    broken = build.gen("broken")
    sink, session = start_run(backend, build)
    sink.wait(broken)
    victim = build.gen("victim", broken)
    session.extend(build.piece())
    sink.wait(victim)
    error = sink.errors[victim]
    assert isinstance(error, GenerationError)
    assert error.address == "0"
    assert repr(error.__cause__) == repr(sink.errors[broken])


def test_a_silent_server_fails_its_runs_in_time(socket_use: SocketUse) -> None:
    with Served(socket_use, "a", keep_alive_s=30.0, silence_timeout=0.3) as served:
        build = GraphBuilder()
        gen = build.gen("a")
        sink = Recorder()
        served.backend.open(RunOptions(), sink).extend(build.piece())
        sink.wait(gen)
        assert isinstance(sink.errors[gen], BackendTimeoutError)


def test_a_server_that_only_waits_is_not_taken_for_dead(socket_use: SocketUse) -> None:
    with Served(socket_use, "a", keep_alive_s=0.05, silence_timeout=0.5) as served:
        build = GraphBuilder()
        gen = build.gen("a")
        sink = Recorder()
        served.backend.open(RunOptions(), sink).extend(build.piece())
        timer = threading.Timer(1.0, served.engine.release, ["a"])
        timer.start()
        sink.wait(gen)
        timer.join()
        assert gen in sink.results


def test_a_run_whose_time_is_over_sends_nothing(backend: RemoteBackend, engine: FakeEngine) -> None:
    build = GraphBuilder()
    gen = build.gen("a")
    sink = Recorder()
    num_runs = len(engine.runs)
    backend.open(RunOptions(timeout=0.0), sink).extend(build.piece())
    sink.wait(gen)
    assert isinstance(sink.errors[gen], NodeTimeoutError)
    assert len(engine.runs) == num_runs


def test_a_piece_that_does_not_fit_is_refused_at_once(backend: RemoteBackend) -> None:
    session = backend.open(RunOptions(), Recorder())
    with pytest.raises(ProgramError, match="the run has 0"):
        session.extend(RequestGraph((GraphNode(3, "3", Gen("a")),), base=3))


def test_text_that_is_not_unicode_fails_its_run_alone(backend: RemoteBackend) -> None:
    build = GraphBuilder()
    text = build.text("\ud800")
    sink = Recorder()
    backend.open(RunOptions(), sink).extend(build.piece())
    sink.wait(text)
    assert isinstance(sink.errors[text], ProgramError)


def test_a_sink_that_raises_stops_its_own_run_only(backend: RemoteBackend) -> None:
    def broken_sink(_: object) -> None:
        raise RuntimeError("the user's bug")

    build = GraphBuilder()
    build.gen("a")
    graph = build.piece()
    backend.open(RunOptions(), broken_sink).extend(graph)
    sink = Recorder()
    backend.open(RunOptions(), sink).extend(graph)
    sink.wait(0)
    assert 0 in sink.results


def test_many_runs_share_one_thread(backend: RemoteBackend) -> None:
    before = threading.active_count()
    build = GraphBuilder()
    last = build.gen("b", build.gen("a"))
    graph = build.piece()
    sinks = [Recorder() for _ in range(64)]
    for row, sink in enumerate(sinks):
        session = backend.open(RunOptions(row=row), sink)
        session.extend(graph)
        session.close()
    for sink in sinks:
        sink.wait(last)
    assert threading.active_count() <= before
    assert len({sink.results[last].text for sink in sinks}) == 64


def test_no_server_is_one_clear_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BackendConnectionError, match="can't connect to http://127"):
            RemoteBackend(url)


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(BackendTimeoutError, match="fell silent"):
            RemoteBackend(url, silence_timeout=0.2)


def test_an_address_needs_a_scheme() -> None:
    with pytest.raises(ProgramError, match="http://"):
        RemoteBackend("localhost:8000")


def test_a_server_of_another_kind_is_refused() -> None:
    app = FastAPI()
    with (
        BackgroundServer(app) as server,
        pytest.raises(BackendStatusError, match="answered 404") as caught,
    ):
        RemoteBackend(server.url)
    assert caught.value.status_code == 404

    @app.get("/v1/model")
    def model() -> dict[str, int]:
        return {"model": 3}

    with (
        BackgroundServer(app) as server,
        pytest.raises(BackendStatusError, match="not as an umbel server"),
    ):
        RemoteBackend(server.url)
